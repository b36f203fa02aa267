"""The command line as its users meet it: sweeps, bad input, interruption and resumption."""

import json
import re
import sys
from pathlib import Path

import pytest

from kvbench import main as cli
from kvbench import report
from kvbench.engine import Engine
from tests.cli import Cli, refusal

TINY = (
    "model=tiny",
    "workload.num_requests=4",
    "workload.chat_template=false",
    "workload.output_tokens=6",
    "pool.size=2MiB",
    "measure.progress=false",
    "executor.kernels=reference",
)


def test_a_sweep_writes_complete_records_and_compares_them(run_and_draw: Cli) -> None:
    run = run_and_draw
    code, out, err = run(*TINY, "-m", "allocator=static,paged", "debug.audit=true")
    assert code == 0, err
    assert "static" in out
    assert "identical in all 2 runs" in out
    static, paged = run.runs()
    for record in (static, paged):
        assert record.status == "complete"
        assert record.metric("num_finished") == 4
        assert len(record.requests()) == 4
        steps = record.steps()
        parts = steps[["token_states", "reservation", "internal_fragmentation", "rounding", "free"]]
        assert (parts.sum(axis=1) == record.record["pool"]["num_slots"]).all()
        environment = json.loads((record.path / "env.json").read_text())
        assert environment["versions"]["torch"]
    sweep = static.path.parent
    assert {"comparison.png", "comparison.pdf", "comparison.csv"} <= {path.name for path in sweep.iterdir()}
    assert static.metric("internal_fragmentation_fraction") > paged.metric("internal_fragmentation_fraction")


def test_one_seed_gives_the_same_tokens_again(run: Cli) -> None:
    sampling = ("workload=parallel_sampling", "workload.n=3", "allocator=paged")
    for _ in range(2):
        assert run(*sampling, *TINY)[0] == 0
    assert run(*sampling, *TINY, "seed=1")[0] == 0
    first, second, other = (record.record["tokens_sha256"] for record in run.runs())
    assert first == second != other


BAD_INPUT = {
    "unknown allocator": (["allocator=slab"], "allocator/slab"),
    "unknown experiment": (["+experiment=nope"], "experiment/nope"),
    "unknown key": (["workload.promts=x"], "promts"),
    "wrong type": (["scheduler.max_num_seqs=many"], "max_num_seqs"),
    "unknown choice": (["scheduler.preemption=maybe"], "auto, swap, recompute"),
    "unknown kernels": (["executor.kernels=cuda"], "executor.kernels"),
    "tiny pool": (["pool.size=1KiB"], "pool.size"),
    "no static region": (["allocator=static", "pool.size=24KiB"], "lower max_model_len to at most 48"),
    "pool holds no token": (["pool.size=100"], "pool.size"),
    "senseless pool": (["pool.size=lots"], "pool.size"),
    "long prompt": (["max_model_len=16"], "max_model_len"),
    "model limit": (["max_model_len=100000"], "max_model_len"),
    "no beams": (["workload=beam_search", "workload.beam_width=0"], "workload.beam_width"),
    "negative rate": (["workload.arrival.process=poisson", "workload.arrival.rate=-1"], "workload.arrival.rate"),
    "block size": (["allocator=paged", "allocator.make.block_size=0"], "block_size"),
    "unknown option": (["allocator=paged", "+allocator.make.blocksize=8"], "blocksize"),
    "no swap space": (["allocator=paged_swap", "pool.host_size=0"], "pool.host_size"),
    "cannot swap": (["allocator=paged", "scheduler.preemption=swap"], "scheduler.preemption"),
    "unknown truth": (["allocator=buddy_oracle"], "workload.ignore_eos"),
    "no cuda": (["device=cuda"], "device"),
    "missing prompts": (["workload.prompts=/nowhere.txt"], "workload.prompts"),
    "missing model": (["model=/nowhere/at/all"], "model.path"),
    "too many sequences": (["workload=beam_search", "scheduler.max_num_seqs=2"], "scheduler.max_num_seqs"),
    "negative seed": (["seed=-1"], "seed"),
    "appended typo": (["+workload.promts=x"], "promts"),
    "a group without an option": (["allocator=1"], "group override"),
    "no results folder": (["results_dir=''"], "results_dir"),
    "block size of a later job": (["allocator.make.block_size=16,0"], "block_size"),
    "not an allocator": (["allocator.make._target_=os.getcwd"], "_target_"),
    "too many threads": (["device.num_threads=100000"], "device.num_threads"),
    "rows beyond counting": (["scheduler.max_num_seqs=999999999999"], "scheduler.max_num_seqs"),
    "tokens beyond counting": (["workload.output_tokens=99999999999999999999"], "workload.output_tokens"),
    "tokens beyond measure": (["workload.output_tokens={lognormal:{mean:5,cv:1e200}}"], "workload.output_tokens"),
    "host beyond memory": (["allocator=paged_swap", "pool.host_size=1000000GiB"], "pool.host_size"),
    "kernels of a GPU": (["executor.kernels=triton"], "executor.kernels"),
}


# One or two of each place where a sweep can be stopped; the slow suite takes all of them there.
STOPS = [
    "unknown allocator",  # as Hydra composes
    "wrong type",
    "a group without an option",
    "no beams",  # as its jobs are validated
    "block size of a later job",
    "no results folder",
    "long prompt",  # as a job is built
    "tiny pool",
]
OF_A_SWEEP = ["a group without an option", "block size of a later job"]


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def job_of(case: str) -> list[str]:
    groups = {argument.split("=")[0] for argument in BAD_INPUT[case][0]}
    return [*(setting for setting in TINY if setting.split("=")[0] not in groups), *BAD_INPUT[case][0]]


@pytest.mark.parametrize("case", [case for case in BAD_INPUT if case not in OF_A_SWEEP])
def test_bad_input_is_refused_by_name(case: str, no_cuda: None) -> None:
    assert BAD_INPUT[case][1] in refusal(*job_of(case))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in STOPS else pytest.mark.slow) for case in BAD_INPUT]
)
def test_bad_input_stops_the_command(run: Cli, case: str, no_cuda: None) -> None:
    """Exit code 2, the setting named, no run left behind."""
    code, _, err = run(*job_of(case))
    assert code == 2, err
    assert BAD_INPUT[case][1] in err
    assert "Traceback" not in err
    assert not re.search("object_type|provider=", err), "libraries describe themselves"
    assert run.runs() == []


def test_a_bad_job_stops_the_sweep_before_its_first(run: Cli) -> None:
    code, _, err = run(*TINY, "allocator=static,paged_swap", "pool.host_size=0")
    assert code == 2
    assert "pool.host_size" in err
    assert run.runs() == []


def test_a_malformed_prompt_file_is_refused_with_its_line(run: Cli, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "fine"}\n{"prompt": \n')
    code, _, err = run(*TINY, f"workload.prompts={prompts}")
    assert code == 2
    assert "prompts.jsonl" in err
    assert "2" in err.split("prompts.jsonl", 1)[1]


def test_results_that_cannot_be_written_are_refused(run: Cli, tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file, not a folder")
    code, _, err = run(*TINY)
    assert code == 2
    assert "results_dir" in err


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_measured_survives_and_resume_runs_the_rest(
    run: Cli, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, engine_run = [], Engine.run

    def break_second(engine: Engine, groups: object) -> float:
        calls.append(engine)
        if len(calls) == 2:
            raise error("boom")
        return engine_run(engine, groups)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "run", break_second)
    sweep = (*TINY, "allocator=static,paged")
    code, out, _ = run(*sweep)
    assert code == (130 if error is KeyboardInterrupt else 1)
    assert "static" in out, "the finished runs are still compared"
    broken = "interrupted" if error is KeyboardInterrupt else "failed"
    assert [record.status for record in run.runs()] == ["complete", broken]
    assert run.runs()[1].metric("duration_s") is None
    code, out, _ = run(*sweep, "resume=true")
    assert code == 0
    assert len(calls) == 3, "only the missing job ran again"
    assert "identical in all 2 runs" in out


def test_repetitions_of_a_job_are_each_reported(run: Cli) -> None:
    """Also where older runs of the same configuration exist, here one of hydra.mode=RUN."""
    assert run(*TINY, "hydra.mode=RUN")[0] == 0
    assert run(*TINY, "allocator=paged,paged")[0] == 0
    tables = [path.read_text().splitlines()[1:] for path in sorted(run.results_dir.rglob("comparison.csv"))]
    assert [len({row.split(",")[1] for row in rows}) for rows in tables] == [1, 2]


def test_a_run_directory_is_claimed_once(run: Cli) -> None:
    fixed = ("hydra.sweep.subdir=same", f"hydra.sweep.dir={run.results_dir}")
    assert run(*TINY, *fixed)[0] == 0
    (first,) = run.runs()
    code, _, err = run(*TINY, *fixed, "seed=1")
    assert code == 2
    assert "never overwritten" in err
    assert run.runs() == [first]


def test_a_run_that_rejects_every_request_is_a_complete_record_without_latencies(run_and_draw: Cli) -> None:
    run = run_and_draw
    code, _, err = run(*TINY[:4], *TINY[5:], "scheduler.oversized=reject", "pool.size=8KiB")
    assert code == 0, err
    (record,) = run.runs()
    assert record.metric("num_finished") == 0
    assert record.metric("output_tokens_per_s") == 0
    assert record.metric("free_fraction") == 1
    assert record.metric("normalized_latency_s") is None
    assert list(record.requests()["status"]) == ["rejected"] * 4


def test_requests_that_only_some_runs_serve_are_named_and_left_out_of_the_comparison(run: Cli, tmp_path: Path) -> None:
    """Of 48 slots buddy can give 32 in one piece: too few for the second request, which paged serves."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a" * 20 + "\n" + "b" * 40 + "\n" + "c" * 10)
    scarce = (f"workload.prompts={prompts}", "workload.num_requests=3", "workload.ignore_eos=true", "pool.size=24KiB")
    allocators = ("allocator=buddy_oracle,paged", "max_model_len=64", "scheduler.oversized=reject")
    code, out, err = run(*(s for s in TINY if not s.startswith(("pool", "workload.num"))), *scarce, *allocators)
    assert code == 0, err
    buddy, paged = run.runs()
    assert list(buddy.requests()["status"]) == ["finished", "rejected", "finished"]
    assert list(paged.requests()["status"]) == ["finished"] * 3
    assert "identical in all 2 runs" in out
    assert "; 1 requests not served by all: 1\n" in out


def test_damaged_records_are_left_out(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(*TINY, "seed=0,1")[0] == 0
    first, second = run.runs()
    for damaged in ("", "[]", "{}"):
        (first.path / "run.json").write_text(damaged)
        assert run.runs() == [second]
    (second.path / "config.yaml").unlink()
    monkeypatch.setattr(sys, "argv", ["report", str(run.results_dir)])
    with pytest.raises(SystemExit, match="2"):
        report.main()


def test_help_tells_every_key(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kvbench", "--help"])
    cli.main()
    out, _ = run._capfd.readouterr()
    for key in ("max_model_len", "host_size", "beam_width", "preemption", "+experiment=beam_search"):
        assert key in out


def test_every_setting_is_explained() -> None:
    """A comment beside or above each key of each configuration file."""
    for path in sorted(cli.CONFIG_DIR.rglob("*.yaml")):
        if path.parent.name in ("experiment", "hydra"):
            continue
        lines = path.read_text().split("\nhydra:")[0].splitlines()
        inherits = any(line.startswith("defaults:") for line in lines) and path.parent != cli.CONFIG_DIR
        for above, line in zip(["", *lines], lines, strict=False):
            key = line.split("#")[0].strip()
            is_leaf = ":" in key and not key.endswith(":") and not key.startswith("-")
            assert not is_leaf or inherits or "#" in line or above.strip().startswith("#"), f"{path.name}: {line}"
