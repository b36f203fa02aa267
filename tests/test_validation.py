"""Real and virtual runs take the same steps; a profile is measured, written and read back."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from kvbench import config, device_file, microbenchmark
from kvbench.config import DeviceConfig, Dtype
from kvbench.device_profile import DeviceProfile
from kvbench.errors import ConfigError
from kvbench.microbenchmark import Case, Rounds
from kvbench.run import measure
from kvbench.validation import COMPARED, first_difference, retimed
from tests.cli import Cli, refusal
from tests.composed import composed

PROFILE = DeviceProfile(2**34, 8e9, 1e11, 3e9, host_memory_bytes=2**34, product_s=[[1.0, 1e-9], [8.0, 2.5e-9]])
TINY = ("model=tiny", "device=cpu", "executor.kernels=reference", "device.num_threads=1", "measure.progress=false")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    device_file.write(path, DeviceConfig("mine", 2, PROFILE), ["measured: yesterday"])
    return path


def test_a_profile_is_read_as_it_was_written_and_composed_as_it_was_read(profile: Path) -> None:
    assert device_file.read(profile) == DeviceConfig("mine", 2, PROFILE)
    cfg = composed(*device_file.overrides(profile))
    assert dict(cfg.device.profile) == vars(PROFILE)
    assert (cfg.device.name, cfg.device.num_threads) == ("mine", 2)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "profile"),
        ("name: x", "profile"),
        ("name: x\nprofile: {flops: 1.0}", "memory_bytes"),
        ("name: [", "name"),
        ("name: x\nprofile: {memory_bytes: 1, memory_bytes_per_s: -1.0, flops: 1.0, host_bytes_per_s: 1.0}", "-1.0"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named) as raised:
        device_file.overrides(path)
    assert "bad.yaml" in str(raised.value)


@pytest.mark.parametrize("value", [None, True, Dtype.float32, "it's; a=b, {c}", [1.5, [2]], {"a": float("inf")}, 1e-10])
def test_literals_are_read_back_by_hydra(value: object) -> None:
    read = composed(f"+extra={device_file.literal(value)}").extra
    assert read == (value.value if isinstance(value, Dtype) else value)


def test_every_step_of_a_virtual_run_is_that_of_the_real_one(run: Cli, profile: Path) -> None:
    """Scarce pools, forced and unforced preemption, by swap and by recomputation; contiguous and paged."""
    scarce = ("pool.size=128KiB", "pool.host_size=128KiB", "max_model_len=192", "workload.num_requests=8")
    sweep = (
        "workload.output_tokens=24",
        "allocator=buddy_pow2,paged,paged_swap",
        "scheduler.force_preemption_every=0,7",
        "calibration.repeats=2",
    )
    code, out, err = run("+experiment=validate_roofline", *TINY, *scarce, *sweep, f"calibration.file={profile}")
    assert code == 0, err
    (table,) = run.results_dir.rglob("validation.csv")
    rows = pd.read_csv(table)
    assert len(set(rows["run"])) == len(rows) == 6
    assert rows["first_different_step"].isna().all()
    assert rows["requests_equal"].all()
    assert (rows["num_preemptions"] > 0).sum() >= 3, "the law says nothing about preemption unless there is some"
    virtual, real = run.runs()[:2]
    assert (real.config()["executor"]["name"], virtual.config()["executor"]["name"]) == ("torch", "roofline")
    assert virtual.config()["device"]["name"] == "mine"
    assert out.count("yes") == 12


def test_the_first_difference_is_found() -> None:
    a = pd.DataFrame({"x": [1, 2, 3], "kind": ["a", "b", "c"]})
    assert first_difference(a, a.copy()) is None
    assert first_difference(a, a.assign(x=[1, 2, 4])) == 2
    assert first_difference(a, a.assign(kind=["a", "x", "c"])) == 1
    assert first_difference(a, a.iloc[:2]) == 2


def test_a_machine_is_calibrated_and_the_profile_runs(run: Cli, tmp_path: Path) -> None:
    """No time is asserted: only that all of it is there, legal, traceable and usable."""
    small = ("pool={size: 2MiB, host_size: 2MiB}", "max_model_len=128", "workload.num_requests=6")
    code, _, err = run("+experiment=calibrate", *TINY, *small, "calibration.budget_s=0.1")
    assert code == 0, err
    (file,) = run.results_dir.rglob("devices/*.yaml")
    assert file.name == "cpu_tiny_float32.yaml"
    device = device_file.read(file)
    assert device.profile is not None
    assert device.profile.step_s > 0
    assert device.profile.product_s[0][0] == 1
    header = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert all(
        any(word in line for line in header) for word in ("model tiny", "torch", "commit", "decode: ", "predicted")
    )
    observations = pd.read_csv(next(run.results_dir.rglob("observations.csv")))
    assert set(observations["kind"]) == {"prefill", "decode", "copy", "swap_out", "swap_in"}
    assert (observations[["seconds", "predicted_s"]] > 0).all(axis=None)
    assert (observations["rounds"] >= 3).all()
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n20,10\n")
    served = ("executor=roofline", "model=tiny", "workload=lengths", f"workload.lengths={lengths}")
    code, _, err = run(*served, f"device={file}", "measure.progress=false", "pool.size=1MiB")
    assert code == 0, err
    (record,) = run.runs()
    assert record.config()["device"] == yaml.safe_load(file.read_text())


def test_a_case_has_a_quantile_of_its_times_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.1, 5.0, 4.0, 8.0, 6.0])
    monkeypatch.setattr(microbenchmark, "_seconds", lambda device, action: next(times))
    executor = SimpleNamespace(device=None, storage=SimpleNamespace(kv=torch.empty(1)))
    rounds = Rounds(executor, {Case("decode", 1, 1, 16): lambda: None}, tick=lambda: None)  # type: ignore[arg-type]
    for _ in range(5):
        rounds.run()
    assert rounds.table()[["seconds", "rounds"]].to_numpy().tolist() == [[5.5, 4]]
    assert rounds.table(0.0)["seconds"].tolist() == [4.0]


def test_a_validation_calibrates_the_machine_in_turns_with_its_runs(run: Cli) -> None:
    small = ("model=tiny", "device=cpu", "measure.progress=false", "allocator=paged", "workload.num_requests=3")
    code, out, err = run("+experiment=validate_roofline", *small, "workload.output_tokens=3", "calibration.repeats=2")
    assert code == 0, out + err
    (observations,) = run.results_dir.rglob("observations.csv")
    assert (pd.read_csv(observations)["rounds"] == 3).all()
    virtual = run.runs()[0].config()
    assert virtual["device"]["name"] == "cpu_tiny_float32"
    assert virtual["device"]["profile"]["step_s"] > 0


BAD = {
    "arrivals": (["workload.arrival.process=poisson", "workload.arrival.rate=1"], "workload.arrival.process"),
    "eos": (["workload.ignore_eos=false"], "workload.ignore_eos"),
    "virtual": (["executor=roofline", "device=a100_40gb"], "executor"),
    "resumed": (["resume=true"], "resume"),
    "nowhere": (["device=nowhere/mine.yaml"], "nowhere/mine.yaml"),
    "no profile": (["calibration.file=nowhere/mine.yaml"], "calibration.file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_of_a_validation_are_refused_by_name(case: str) -> None:
    arguments, named = BAD[case]
    tiny = [setting for setting in TINY if setting != "device=cpu" or not any("device" in a for a in arguments)]
    assert named in refusal("+experiment=validate_roofline", *tiny, "allocator=paged", *arguments)


def test_a_sweep_has_one_task(run: Cli) -> None:
    code, _, err = run("+experiment=validate_roofline", *TINY, "allocator=paged", "task=run,validate")
    assert code == 2, err
    assert "task" in err
    assert run.runs() == []


def test_each_jobs_finding_stands_beside_its_records(run: Cli, profile: Path) -> None:
    small = ("workload.num_requests=2", "workload.output_tokens=3", "allocator=paged")
    assert run("+experiment=validate_roofline", *TINY, *small, f"calibration.file={profile}")[0] == 0
    finding = json.loads(next(run.results_dir.rglob("validation.json")).read_text())
    assert finding["first_different_step"] is None
    assert finding["output_tokens_per_s_error"] == pytest.approx(
        finding["output_tokens_per_s_roofline"] / finding["output_tokens_per_s_torch"] - 1
    )


def test_a_run_retimed_is_as_long_as_its_steps() -> None:
    """Its own times leave it as it was; each token stays within its step, however long that becomes."""
    small = ("allocator=paged", "workload.num_requests=5", "workload.output_tokens=9", "workload.too_long=truncate")
    measured = measure(config.typed(composed(*TINY, *small, "workload.ignore_eos=true", "pool.size=1MiB")))
    own = measured.steps["duration_s"].to_numpy()
    same, twice = retimed(measured, own), retimed(measured, 2 * own)
    for name in COMPARED:
        assert same[name][0] == pytest.approx(measured.summary[name][0], rel=1e-9)
        assert twice[name][0] == pytest.approx(same[name][0] * (0.5 if name.endswith("_per_s") else 2), rel=1e-3)
    slow_end = np.append(own[:-1], own[-1] + 100)
    assert retimed(measured, slow_end)["ttft_mean_s"] == same["ttft_mean_s"], "only the last step took longer"
    assert retimed(measured, slow_end)["duration_s"][0] == pytest.approx(own.sum() + 100)
