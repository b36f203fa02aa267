"""Workloads of lengths: published histograms, filters, pairing, durations, prompts that cost nothing."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from omegaconf import OmegaConf

from kvbench import histograms, traces
from kvbench.arrivals import ArrivalConfig, arrival_times
from kvbench.byte_tokenizer import ByteTokenizer
from kvbench.errors import ConfigError
from kvbench.length_filter import FilterConfig
from kvbench.traces import Trace, TraceConfig
from kvbench.workload import Workload, WorkloadConfig, build, validate
from kvbench.workload_config import length_source
from tests.composed import composed

PUBLISHED = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}
POISSON = ArrivalConfig("poisson", rate=2.0)
REPLAY = ArrivalConfig("trace")


def lengths_only(**changes) -> WorkloadConfig:
    return WorkloadConfig(**({"chat_template": False, "output_tokens": None, "ignore_eos": True} | changes))


def build_blank(cfg: WorkloadConfig, seed: int = 0, max_tokens: int = 2**31) -> Workload:
    return build(cfg, None, vocab_size=1, max_tokens=max_tokens, seed=seed)


def pairs(workload: Workload) -> list[tuple[int, int]]:
    return [(len(request.prompt), request.max_new_tokens) for request in workload.requests]


def arrivals(workload: Workload) -> list[float]:
    return [request.arrival_s for request in workload.requests]


def save(tmp_path, text: str, name: str = "rows.csv") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def rows(tmp_path, num_rows: int = 10, with_arrivals: bool = True) -> str:
    """Row i: input i + 1, output 100 - i, arrival 2 i."""
    columns = [np.arange(1, num_rows + 1), 100 - np.arange(num_rows)]
    trace = Trace(*columns, 2.0 * np.arange(num_rows) if with_arrivals else None)
    traces.write(tmp_path / "rows.parquet", trace)
    return str(tmp_path / "rows.parquet")


# The published histograms


@pytest.mark.parametrize("dataset", PUBLISHED)
@pytest.mark.parametrize("kind", [0, 1], ids=["input", "output"])
def test_the_histograms_have_the_published_means(dataset, kind):
    values, probabilities = histograms.pmf(dataset, ("input", "output")[kind])
    assert probabilities.sum() == pytest.approx(1)
    assert probabilities.min() > 0
    assert values.min() >= 1
    assert np.unique(values).size == len(values)  # bins do not overlap
    assert values @ probabilities == pytest.approx(PUBLISHED[dataset][kind], rel=6e-4)


@pytest.mark.parametrize("dataset", PUBLISHED)
def test_draws_follow_the_histogram_within_sampling_error(dataset):
    n = 200_000
    drawn = histograms.sample(dataset, FilterConfig(), n, np.random.default_rng(1))
    for kind, sample in (("input", drawn.input_tokens), ("output", drawn.output_tokens)):
        values, probabilities = histograms.pmf(dataset, kind)
        mean = values @ probabilities
        error = np.sqrt((values - mean) ** 2 @ probabilities / n)
        assert abs(sample.mean() - mean) < 4 * error
        expected = n * probabilities
        frequent = expected > 20
        counts = np.bincount(sample, minlength=values.max() + 1)[values]
        chi_square = ((counts - expected) ** 2 / expected)[frequent].sum()
        assert chi_square < frequent.sum() + 5 * np.sqrt(2 * frequent.sum())


def test_input_and_output_are_drawn_independently():
    drawn = histograms.sample("sharegpt", FilterConfig(), 100_000, np.random.default_rng(2))
    assert abs(np.corrcoef(drawn.input_tokens, drawn.output_tokens)[0, 1]) < 4 / np.sqrt(100_000)


BENCHMARK_FILTER = FilterConfig(min_input=4, min_output=4, max_input=1024, max_total=2048)


@pytest.mark.parametrize(("name", "means"), [("sharegpt_paper", (161.31, 337.99)), ("alpaca_paper", (19.31, 58.45))])
def test_paper_workloads_fit_the_model_and_keep_the_published_means(name, means):
    """Redrawing the pairs beyond 2048 tokens moves no mean by more than 6 %."""
    cfg = OmegaConf.to_object(composed(f"workload={name}", "workload.num_requests=60000").workload)
    cfg = replace(cfg, duration_s=None)
    drawn = np.array(pairs(build_blank(cfg)))
    assert drawn.sum(axis=1).max() <= 2048
    assert drawn.mean(axis=0) == pytest.approx(means, rel=0.06)


def test_the_filter_of_the_vllm_benchmark_is_kept():
    cfg = OmegaConf.to_object(composed("workload=sharegpt_paper", "workload.duration_s=200").workload)
    for num_input, num_output in pairs(build_blank(replace(cfg, filter=BENCHMARK_FILTER))):
        assert 4 <= num_input <= 1024
        assert num_output >= 4
        assert num_input + num_output <= 2048
    assert min(min(pair) for pair in pairs(build_blank(replace(cfg, filter=FilterConfig())))) < 4


def test_a_filter_that_nothing_passes_is_named():
    cfg = lengths_only(histogram="alpaca", filter=FilterConfig(min_input=5000), num_requests=3)
    with pytest.raises(ConfigError, match=r"^workload\.filter: none of 65,536 draws passes"):
        build_blank(cfg)


def test_histogram_provenance_states_pairing_and_source():
    provenance = build_blank(lengths_only(histogram="alpaca", num_requests=4)).provenance
    assert provenance["pairing"] == "independent"
    assert provenance["publication"].startswith("Kwon et al., SOSP 2023")
    assert json.loads(json.dumps(provenance)) == provenance


# Seeds, durations and rates


def test_a_workload_of_lengths_is_its_seed():
    cfg = lengths_only(histogram="sharegpt", arrival=POISSON, duration_s=300, mode="sample", n=2)

    def contents(seed):
        drawn = build_blank(cfg, seed)
        return pairs(drawn), arrivals(drawn), [request.sampling.seed for request in drawn.requests]

    assert contents(3) == contents(3)
    assert all(ours != theirs for ours, theirs in zip(contents(3), contents(4), strict=True))
    assert len(set(contents(3)[2])) == len(contents(3)[2])


def test_a_shorter_run_is_the_beginning_of_a_longer_one():
    cfg = lengths_only(histogram="sharegpt", arrival=POISSON, filter=FilterConfig(max_total=700))
    long = build_blank(replace(cfg, num_requests=70_000))
    for shorter in (replace(cfg, num_requests=50), replace(cfg, duration_s=100.0)):
        short = build_blank(shorter)
        n = len(short.requests)
        assert pairs(short) == pairs(long)[:n]
        assert arrivals(short) == arrivals(long)[:n]
    assert arrivals(short)[-1] < 100 <= arrivals(long)[n]


def test_the_rate_changes_nothing_but_the_gaps():
    slow, fast = (
        build_blank(lengths_only(histogram="alpaca", num_requests=500, arrival=replace(POISSON, rate=rate)))
        for rate in (2.0, 8.0)
    )
    assert pairs(slow) == pairs(fast)
    assert [time_s / 4 for time_s in arrivals(slow)] == arrivals(fast)


def test_the_number_of_arrivals_in_a_window_is_poisson():
    cfg = ArrivalConfig("poisson", rate=0.5)
    counts = [len(arrival_times(cfg, None, np.random.default_rng(i), duration_s=50)) for i in range(2000)]
    assert np.mean(counts) == pytest.approx(25, abs=4 * 5 / np.sqrt(2000))
    assert np.var(counts) == pytest.approx(25, rel=0.15)


def test_duration_and_number_limit_one_another(tmp_path):
    cfg = lengths_only(histogram="alpaca", arrival=POISSON)
    assert len(build_blank(replace(cfg, num_requests=5, duration_s=1000)).requests) == 5
    assert arrivals(build_blank(replace(cfg, num_requests=1000, duration_s=5)))[-1] < 5
    whole = WorkloadConfig(prompts=save(tmp_path, "a\nb\n", "p.txt"), arrival=POISSON, duration_s=60)
    drawn = build(whole, ByteTokenizer(), vocab_size=257, max_tokens=999, seed=0)
    assert len(drawn.requests) == len(arrival_times(POISSON, None, streams_arrivals(), duration_s=60)) > 60


def streams_arrivals() -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(0).spawn(4)[2])


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_requests": None}, "num_requests"),
        ({"num_requests": None, "arrival": POISSON}, "num_requests"),
        ({"num_requests": None, "duration_s": 9}, "num_requests"),  # all at once
        ({"duration_s": 0.0}, "duration_s"),
        ({"duration_s": 1e-9, "arrival": POISSON}, "duration_s"),
        ({"histogram": "wmt"}, "histogram"),
        ({"pairs": "shuffled"}, "pairs"),
        ({"filter": FilterConfig(min_input=0)}, r"filter\.min_input"),
        ({"lengths": "x.csv"}, "lengths"),
        ({"trace": TraceConfig(file="x")}, "histogram"),
        ({"chat_template": True}, "chat_template"),
        ({"output_tokens": 5}, "output_tokens"),
        ({"histogram": None}, "lengths"),
        ({"histogram": None, "output_tokens": 5, "filter": FilterConfig(max_total=9)}, "filter"),
        ({"arrival": REPLAY}, r"arrival\.file"),
    ],
)
def test_illegal_settings_are_named(changes, key):
    cfg = lengths_only(**({"histogram": "alpaca", "num_requests": 5} | changes))
    for refuse in (build_blank, validate):
        with pytest.raises(ConfigError, match=rf"^workload\.{key}: "):
            refuse(cfg)


# Traces and pairs


def test_a_trace_is_replayed_with_its_own_arrivals(tmp_path):
    cfg = lengths_only(trace=TraceConfig(file=rows(tmp_path)), arrival=REPLAY)
    replayed = build_blank(cfg)
    assert pairs(replayed) == [(i + 1, 100 - i) for i in range(10)]
    assert arrivals(replayed) == [2.0 * i for i in range(10)]
    assert [r.request_id for r in replayed.requests] == list(range(10))
    assert replayed.provenance["mean_input_tokens"] == 5.5
    assert replayed.provenance["mean_output_tokens"] == 95.5
    assert replayed.provenance["pairing"] == "joint"
    part = build_blank(replace(cfg, trace=replace(cfg.trace, window_s=[4, 15], rate_scale=2.0), duration_s=4))
    assert list(zip(pairs(part), arrivals(part), strict=True)) == [((i + 1, 100 - i), i - 2.0) for i in (2, 3, 4, 5)]
    with pytest.raises(ConfigError, match=r"arrival\.file: the trace has 10 arrivals for 11 requests"):
        build_blank(replace(cfg, num_requests=11))


def test_other_arrivals_may_replace_the_trace_own(tmp_path):
    cfg = lengths_only(trace=TraceConfig(file=rows(tmp_path)), arrival=POISSON)
    redrawn = build_blank(cfg)
    assert pairs(redrawn) == [(i + 1, 100 - i) for i in range(10)]
    assert arrivals(redrawn) == arrival_times(POISSON, 10, streams_arrivals()).tolist()
    assert pairs(build_blank(replace(cfg, num_requests=13)))[10:] == pairs(redrawn)[:3]
    with pytest.raises(ConfigError, match=r"^workload\.trace\.rate_scale: must be 1"):
        build_blank(replace(cfg, trace=replace(cfg.trace, rate_scale=2.0)))
    unstamped = lengths_only(trace=TraceConfig(file=rows(tmp_path, with_arrivals=False)), arrival=REPLAY)
    with pytest.raises(ConfigError, match=r"^workload\.arrival\.process: the trace states no arrival times"):
        build_blank(unstamped)


def test_pairs_are_kept_or_broken_as_asked(tmp_path):
    cfg = lengths_only(lengths=rows(tmp_path, num_rows=50), num_requests=4000)
    kept, broken = (build_blank(replace(cfg, pairs=pairing)) for pairing in ("sample", "independent"))
    for drawn in (kept, broken):
        assert {i for i, _ in pairs(drawn)} == set(range(1, 51))
        assert {o for _, o in pairs(drawn)} == set(range(51, 101))
    assert all(i + o == 101 for i, o in pairs(kept))
    assert pairs(kept)[:50] != pairs(build_blank(cfg))[:50]
    assert len(set(pairs(broken))) > 1000
    assert (kept.provenance["pairing"], broken.provenance["pairing"]) == ("joint", "independent")
    within = build_blank(replace(cfg, pairs="independent", filter=FilterConfig(max_total=101)))
    assert max(i + o for i, o in pairs(within)) == 101


def test_pairs_in_order_begin_again(tmp_path):
    drawn = build_blank(lengths_only(lengths=rows(tmp_path, num_rows=3), num_requests=5))
    assert pairs(drawn) == [(1, 100), (2, 99), (3, 98), (1, 100), (2, 99)]


def test_block_ids_follow_their_prompt(tmp_path):
    lines = [{"timestamp": i, "input_length": 600 + i, "output_length": 1, "hash_ids": [0, i]} for i in range(4)]
    file = save(tmp_path, "\n".join(map(json.dumps, lines)), "t.jsonl")
    cfg = lengths_only(trace=TraceConfig(file=file), num_requests=30, pairs="sample", too_long="truncate")
    requests = build_blank(cfg).requests
    assert {len(request.prompt) for request in requests} == {600, 601, 602, 603}
    assert all(request.hash_ids == (0, len(request.prompt) - 600) for request in requests)
    # A prompt that lost its start has other blocks than those the trace names.
    cut = build_blank(replace(cfg, num_requests=4, pairs="in_order"), max_tokens=603).requests
    assert [request.hash_ids for request in cut] == [(0, 0), (0, 1), (0, 2), ()]


def test_a_trace_counts_what_it_left_out_in_the_record(tmp_path):
    text = "arrival_s,input_tokens,output_tokens\n0,5,5\n1,0,5\n2,500,5\n3,50,5\n4,7,5\n"
    trace = TraceConfig(file=save(tmp_path, text), on_bad_row="skip")
    cfg = lengths_only(trace=trace, arrival=REPLAY, filter=FilterConfig(max_input=100), too_long="skip")
    provenance = build_blank(cfg, max_tokens=40).provenance
    kept = {key: value for key, value in provenance.items() if key.startswith(("rows", "num"))}
    assert kept == {"rows_read": 5, "rows_skipped": 1, "rows_filtered": 1, "num_requests": 2, "num_too_long": 1}
    assert provenance["mean_input_tokens"] == 6


# Texts


def sharegpt(tmp_path) -> str:
    turns = [{"from": "human", "value": "four"}, {"from": "gpt", "value": "sevenxx"}]
    return save(tmp_path, json.dumps([{"conversations": turns}] * 3), "s.json")


def test_sharegpt_is_counted_by_the_model_or_by_the_named_tokenizer(tmp_path):
    cfg = lengths_only(trace=TraceConfig(file=sharegpt(tmp_path)), filter=FilterConfig(min_output=7))
    by_model = build(cfg, ByteTokenizer(), vocab_size=257, max_tokens=99, seed=0)
    assert pairs(by_model) == [(4, 7)] * 3
    with pytest.raises(ConfigError, match=r"^workload\.trace\.tokenizer: "):
        build_blank(cfg)
    named = replace(cfg, trace=replace(cfg.trace, tokenizer="bytes"))
    assert pairs(build_blank(named)) == [(4, 7)] * 3
    nowhere = replace(cfg, trace=replace(cfg.trace, tokenizer=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"^workload\.trace\.tokenizer: .* is no tokenizer .* legal: null"):
        build_blank(nowhere)
    # Before a model is there, what a filter makes of its tokens is not known and is not refused.
    validate(replace(cfg, filter=FilterConfig(min_output=8)))


def test_with_a_tokenizer_prompts_are_text_of_the_same_lengths(tmp_path):
    cfg = lengths_only(trace=TraceConfig(file=rows(tmp_path)), prompts=save(tmp_path, "abcdefgh\n", "p.txt"))
    text = build(cfg, ByteTokenizer(), vocab_size=257, max_tokens=999, seed=0)
    assert pairs(text) == pairs(build_blank(cfg))
    assert bytes(text.requests[3].prompt.tolist()) == b"ghab"


def test_blank_prompts_are_read_only_zeros_that_share_one_number(tmp_path):
    requests = build_blank(lengths_only(trace=TraceConfig(file=rows(tmp_path)))).requests
    for request in requests:
        assert request.prompt.dtype == np.int32
        assert request.prompt.strides == (0,)
        assert not request.prompt.any()
        with pytest.raises(ValueError, match="read-only"):
            request.prompt[0] = 1
    assert np.shares_memory(requests[0].prompt, requests[9].prompt)


def test_a_hundred_thousand_requests_build_at_once():
    cfg = lengths_only(histogram="sharegpt", num_requests=100_000, arrival=POISSON)
    start = time.process_time()
    requests = build_blank(cfg).requests
    assert time.process_time() - start < 4  # about 0.5 s; a materialised prompt each would take 60 MB and more
    assert len({id(request.sampling) for request in requests}) == 1  # greedy: no seed to keep apart
    assert {request.prompt.strides for request in requests} == {(0,)}


def test_only_one_source_of_lengths():
    assert length_source(WorkloadConfig()) is None
    assert length_source(lengths_only(histogram="alpaca")) == "workload.histogram"
    assert length_source(lengths_only(lengths="x.csv")) == "workload.lengths"
    assert length_source(lengths_only(trace=TraceConfig(file="x"))) == "workload.trace.file"
