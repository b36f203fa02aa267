"""Workloads: equal for equal seeds, exact lengths, honest arrivals, errors that name file and line."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.arrivals import ArrivalConfig, arrival_times
from kvbench.byte_tokenizer import ByteTokenizer
from kvbench.errors import ConfigError
from kvbench.length_distributions import draw_lengths
from kvbench.request import Request, Sampling
from kvbench.workload import WorkloadConfig, build
from tests.composed import composed

CONF = Path(__file__).parent.parent / "conf" / "workload"
TEXTS = ["one", "twice two", "three is more than two", "four", "a fifth prompt", "six"]


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    return str(path)


def build_bytes(cfg, seed=0, max_tokens=2048, vocab_size=257):
    return build(cfg, ByteTokenizer(), vocab_size=vocab_size, max_tokens=max_tokens, seed=seed).requests


def contents(requests):
    return [(r.request_id, r.prompt.tolist(), r.arrival_s, r.max_new_tokens, r.sampling) for r in requests]


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


# Determinism and streams


def random_workload(texts):
    arrival = ArrivalConfig("gamma", rate=3.0, cv=2.0)
    return WorkloadConfig(
        prompts=texts,
        num_requests=40,
        output_tokens={"uniform": [1, 99]},
        arrival=arrival,
        mode="sample",
        n=3,
    )


def test_a_workload_is_its_seed(texts):
    cfg = random_workload(texts)
    assert contents(build_bytes(cfg, seed=5)) == contents(build_bytes(cfg, seed=5))
    assert contents(build_bytes(cfg, seed=5)) != contents(build_bytes(cfg, seed=6))


def test_streams_are_independent(texts):
    cfg = random_workload(texts)
    changed = replace(cfg, output_tokens=7, arrival=ArrivalConfig())
    before, after = build_bytes(cfg), build_bytes(changed)
    assert [r.prompt.tolist() for r in before] == [r.prompt.tolist() for r in after]
    assert [r.sampling.seed for r in before] == [r.sampling.seed for r in after]
    assert len({r.sampling.seed for r in before}) == 40


def test_prompts_repeat_in_shuffled_passes(texts):
    requests = build_bytes(WorkloadConfig(prompts=texts, num_requests=12, chat_template=False))
    order = [bytes(r.prompt.tolist()).decode() for r in requests]
    assert sorted(order[:6]) == sorted(order[6:]) == sorted(TEXTS)
    assert order[:6] != order[6:]


def test_requests_are_sorted_int32_and_read_only(texts):
    requests = build_bytes(random_workload(texts))
    arrivals = [r.arrival_s for r in requests]
    assert arrivals == sorted(arrivals)
    assert [r.request_id for r in requests] == list(range(40))
    assert requests[0].num_sequences == 3
    for request in requests:
        assert request.prompt.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            request.prompt[0] = 0


def test_chat_template_wraps_the_prompt(tmp_path):
    cfg = WorkloadConfig(prompts=write(tmp_path, "p.txt", "hi"))
    (request,) = build_bytes(cfg)
    assert bytes(request.prompt.tolist()) == b"User: hi\nAssistant: "
    (request,) = build_bytes(replace(cfg, chat_template=False))
    assert bytes(request.prompt.tolist()) == b"hi"


# Lengths


def lengths_workload(texts, file, **changes):
    return WorkloadConfig(prompts=texts, lengths=file, chat_template=False, output_tokens=None, **changes)


def test_lengths_are_exact_and_prompts_differ(tmp_path, texts):
    rows = [(1, 9), (300, 1), (17, 40)]
    text = "output_tokens,note,input_tokens\n" + "".join(f"{o},x,{i}\n" for i, o in rows) + "\n"
    requests = build_bytes(lengths_workload(texts, write(tmp_path, "l.csv", text), num_requests=5))
    assert [(len(r.prompt), r.max_new_tokens) for r in requests] == [*rows, *rows[:2]]
    whole = b"".join(bytes(r.prompt.tolist()) for r in requests).decode()
    # Texts follow one another uncut across requests: 6 texts of 58 bytes make a pass.
    assert {text: whole[:58].count(text) for text in TEXTS[1:3]} == dict.fromkeys(TEXTS[1:3], 1)
    assert requests[1].prompt.tolist() != requests[4].prompt.tolist()


@pytest.mark.parametrize(
    ("row", "what"),
    [("3,x", "output_tokens is 'x'"), ("3", "output_tokens is None"), ("0,5", "input_tokens is '0'"),
     ("2.5,5", "input_tokens is '2.5'"), ("-1,5", "input_tokens is '-1'")],
)  # fmt: skip
def test_malformed_lengths_name_file_and_line(tmp_path, texts, row, what):
    path = write(tmp_path, "l.csv", f"input_tokens,output_tokens\n3,4\n\n{row}\n")
    message = rf"workload\.lengths: {re.escape(path)}:4: {re.escape(what)}, not an integer >= 1"
    with pytest.raises(ConfigError, match=message):
        build_bytes(lengths_workload(texts, path))


def test_lengths_need_their_columns_and_rows(tmp_path, texts):
    with pytest.raises(ConfigError, match=r"workload\.lengths: .*:1: no column 'output_tokens'"):
        build_bytes(lengths_workload(texts, write(tmp_path, "l.csv", "input_tokens\n3\n")))
    with pytest.raises(ConfigError, match=r"workload\.lengths: .*no rows"):
        build_bytes(lengths_workload(texts, write(tmp_path, "l.csv", "input_tokens,output_tokens\n")))


def test_output_length_distributions(tmp_path):
    rng = np.random.default_rng(0)
    assert draw_lengths(12, 3, rng, key="output_tokens").tolist() == [12, 12, 12]
    assert set(draw_lengths({"uniform": [3, 5]}, 500, rng, key="output_tokens")) == {3, 4, 5}
    drawn = draw_lengths({"lognormal": {"mean": 200, "cv": 0.8}}, 40_000, rng, key="output_tokens")
    assert drawn.mean() == pytest.approx(200, rel=0.02)
    assert drawn.std() / drawn.mean() == pytest.approx(0.8, rel=0.03)
    assert draw_lengths({"lognormal": {"mean": 1, "cv": 3}}, 500, rng, key="output_tokens").min() == 1
    file = write(tmp_path, "o.csv", "input_tokens,output_tokens\n1,7\n1,8\n")
    assert set(draw_lengths({"from": file}, 100, rng, key="output_tokens")) == {7, 8}


@pytest.mark.parametrize(
    "spec",
    [None, 0, True, 2.5, "x", {}, {"normal": [1, 2]}, {"uniform": [5, 3]}, {"uniform": [0, 3]},
     {"uniform": 4}, {"lognormal": {"mean": 5}}, {"lognormal": {"mean": -5, "cv": 1}}, {"from": 3},
     {"uniform": [1, 2], "from": "x.csv"}],
)  # fmt: skip
def test_illegal_output_tokens_are_refused_with_the_legal_forms(spec):
    with pytest.raises(
        ConfigError, match=r"workload\.output_tokens: .* must be an integer from 1 to 2\^31 - 1, \{uniform"
    ):
        draw_lengths(spec, 3, np.random.default_rng(0), key="output_tokens")


# Limits


@pytest.mark.parametrize(("too_long", "expected"), [("skip", [(0, 3, 5)]), ("truncate", [(0, 3, 5), (1, 4, 5)])])
def test_too_long_requests(tmp_path, too_long, expected):
    file = write(tmp_path, "p.jsonl", '"abc"\n"abcdef"')
    cfg = WorkloadConfig(prompts=file, chat_template=False, output_tokens=5, too_long=too_long)
    seed = next(seed for seed in range(9) if len(build_bytes(cfg, seed)[0].prompt) == 3)
    requests = build_bytes(cfg, seed, max_tokens=9)
    assert [(r.request_id, len(r.prompt), r.max_new_tokens) for r in requests] == expected
    if too_long == "truncate":
        assert bytes(requests[1].prompt.tolist()) == b"cdef"
    assert [len(r.prompt) for r in build_bytes(cfg, seed, max_tokens=11)] == [3, 6]  # 6 + 5 just fits


def test_truncation_leaves_room_for_a_prompt_token(texts):
    cfg = WorkloadConfig(prompts=texts, output_tokens=50, too_long="truncate")
    assert {(len(r.prompt), r.max_new_tokens) for r in build_bytes(cfg, max_tokens=20)} == {(1, 19)}


def test_too_long_error_names_the_request(tmp_path):
    cfg = WorkloadConfig(prompts=write(tmp_path, "p.txt", "abcdef"), chat_template=False, output_tokens=5)
    with pytest.raises(ConfigError, match=r"workload\.too_long: request 0 needs 6 prompt \+ 5 output"):
        build_bytes(cfg, max_tokens=10)
    with pytest.raises(ConfigError, match=r"workload\.too_long: skip leaves no request"):
        build_bytes(replace(cfg, too_long="skip"), max_tokens=10)


# Arrivals


@pytest.mark.parametrize(("process", "cv"), [("poisson", 1.0), ("gamma", 0.5), ("gamma", 3.0)])
def test_arrival_gaps_have_the_stated_mean_and_cv(process, cv):
    cfg = ArrivalConfig(process, rate=4.0, cv=cv)
    times = arrival_times(cfg, 100_000, np.random.default_rng(1))
    gaps = np.diff(times, prepend=0.0)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.04)


def test_poisson_counts_are_poisson():
    times = arrival_times(ArrivalConfig("poisson", rate=5.0), 50_000, np.random.default_rng(2))
    counts = np.bincount(times.astype(int))[:9_900]
    assert counts.mean() == pytest.approx(5, rel=0.02)
    assert counts.var() == pytest.approx(5, rel=0.05)


def test_trace_arrivals(tmp_path):
    file = write(tmp_path, "a.csv", "arrival_s,x\n0.5,\n3,\n1e1,\n")
    rng = np.random.default_rng(0)
    assert arrival_times(ArrivalConfig("trace", file=file), 2, rng).tolist() == [0.5, 3.0]
    with pytest.raises(ConfigError, match=r"workload\.arrival\.file: .* has 3 arrivals for 4 requests"):
        arrival_times(ArrivalConfig("trace", file=file), 4, rng)
    with pytest.raises(ConfigError, match=r"workload\.arrival\.file: .*b\.csv:3: arrival_s is '-1'"):
        arrival_times(ArrivalConfig("trace", file=write(tmp_path, "b.csv", "arrival_s\n0\n-1\n")), 2, rng)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (ArrivalConfig("poisson"), r"workload\.arrival\.rate: None is not a finite number of requests/s > 0"),
        (ArrivalConfig("poisson", rate=0.0), r"workload\.arrival\.rate: 0"),
        (ArrivalConfig("gamma", rate=-2.0), r"workload\.arrival\.rate: -2"),
        (ArrivalConfig("poisson", rate=float("nan")), r"workload\.arrival\.rate: nan"),
        (ArrivalConfig("gamma", rate=1.0, cv=0.0), r"workload\.arrival\.cv: 0"),
        (ArrivalConfig("trace"), r"workload\.arrival\.file: give"),
        (ArrivalConfig("burst", rate=1.0), r"workload\.arrival\.process: 'burst' is not one of all_at_once"),
    ],
)
def test_impossible_arrivals_are_named(cfg, message):
    with pytest.raises(ConfigError, match=message):
        arrival_times(cfg, 3, np.random.default_rng(0))


# Settings


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"mode": "argmax"}, "mode"),
        ({"mode": "sample", "n": 0}, "n"),
        ({"n": 2}, "n"),
        ({"mode": "beam", "beam_width": 0}, "beam_width"),
        ({"beam_width": 4}, "beam_width"),
        ({"temperature": 0.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"length_penalty": float("inf")}, "length_penalty"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"too_long": "cut"}, "too_long"),
        ({"num_requests": 0}, "num_requests"),
        ({"lengths": "l.csv"}, "chat_template"),
        ({"lengths": "l.csv", "chat_template": False}, "output_tokens"),
    ],
)
def test_illegal_settings_are_named(texts, changes, key):
    with pytest.raises(ConfigError, match=rf"^workload\.{key}: "):
        build_bytes(WorkloadConfig(prompts=texts, **changes))


def test_tokenizers_that_cannot_serve_are_refused(texts):
    cfg = WorkloadConfig(prompts=texts)
    with pytest.raises(ConfigError, match="no tokenizer"):
        build(cfg, None, vocab_size=257, max_tokens=100, seed=0)
    with pytest.raises(ConfigError, match="vocabulary of 100"):
        build_bytes(cfg, vocab_size=100)
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"workload\.chat_template: .*legal value: false"):
        build(cfg, tokenizer, vocab_size=257, max_tokens=2048, seed=0)


@pytest.mark.parametrize(
    ("sampling", "num_sequences"),
    [(Sampling(), 1), (Sampling("sample", n=3), 3), (Sampling("beam", beam_width=4), 4)],
)
def test_num_sequences(sampling, num_sequences):
    assert Request(0, np.array([1], dtype=np.int32), 0.0, 1, sampling).num_sequences == num_sequences


@pytest.mark.parametrize(
    ("change", "key"),
    [({"prompt": np.array([], dtype=np.int32)}, "prompts"), ({"max_new_tokens": 0}, "output_tokens"),
     ({"arrival_s": -1.0}, "arrival")],
)  # fmt: skip
def test_impossible_requests_are_refused(change, key):
    fields = {"prompt": np.array([1], dtype=np.int32), "arrival_s": 0.0, "max_new_tokens": 1}
    with pytest.raises(ConfigError, match=rf"^workload\.{key}: "):
        Request(request_id=0, sampling=Sampling(), **(fields | change))


@pytest.mark.parametrize("file", sorted(CONF.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_workload_composes_and_builds(file, tmp_path):
    cfg = composed(f"workload={file.stem}").workload
    assert set(cfg) == set(WorkloadConfig.__dataclass_fields__)
    rows = write(tmp_path, "l.csv", "arrival_s,input_tokens,output_tokens\n0.5,30,3\n")
    if file.stem in ("lengths", "trace"):
        with pytest.raises(ConfigError, match=r"workload\.lengths: give a CSV .* or workload\.trace\.file a trace"):
            build_bytes(OmegaConf.to_object(cfg))
        if file.stem == "trace":
            cfg.trace.file = rows
        else:
            cfg.lengths = rows
    if cfg.duration_s is not None:
        cfg.duration_s = 60
    requests = build_bytes(OmegaConf.to_object(cfg), max_tokens=8192)
    assert cfg.name == file.stem
    rates = {"sharegpt_paper": 2, "alpaca_paper": 30, "chat_paper": 0.5, "translation": 10}
    paper = {name: range(int(60 * rate * 0.7), int(60 * rate * 1.3)) for name, rate in rates.items()}
    expected = {"lengths": range(1, 2), "trace": range(1, 2)} | paper
    assert len(requests) in expected.get(file.stem, range(96, 97))
    assert {r.num_sequences for r in requests} == {4 if file.stem in ("beam_search", "parallel_sampling") else 1}
    if file.stem == "trace":
        assert [r.arrival_s for r in requests] == [0.5]


def test_the_schema_refuses_typos_and_wrong_types():
    schema = OmegaConf.structured(WorkloadConfig)
    for bad in ({"beam": 4}, {"n": "many"}, {"arrival": {"rates": 1.0}}):
        with pytest.raises(OmegaConfBaseException):
            OmegaConf.merge(schema, bad)
