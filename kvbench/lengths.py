"""Workloads that are lengths and arrival times only: distributions, a lengths file, a trace or published histograms."""

from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench import chat, histograms, traces
from kvbench.arrivals import arrival_times
from kvbench.errors import ConfigError
from kvbench.length_distributions import draw_lengths
from kvbench.length_filter import FilterConfig, first_kept
from kvbench.models import Tokenizer
from kvbench.traces import Trace, TraceConfig
from kvbench.traces.sharegpt import named_tokenizer
from kvbench.workload_config import WorkloadConfig, request_limit


def draw(
    cfg: WorkloadConfig,
    tokenizer: Tokenizer | None,
    length_rng: np.random.Generator,
    arrival_rng: np.random.Generator,
) -> tuple[Trace, dict[str, Any]]:
    """One row per request, arrival times included, and where the lengths came from (JSON types).

    The number of requests is ``num_requests``; else those that arrive within ``duration_s``; else one per row
    of the file. ``tokenizer``: counts the texts of a ShareGPT file, unless the trace names one.
    Raises ConfigError.
    """
    if cfg.lengths is None and cfg.trace.file is None:
        arrivals = arrival_times(cfg.arrival, cfg.num_requests, arrival_rng, duration_s=cfg.duration_s)
        sample = _from_distributions if cfg.histogram is None else _from_histogram
        drawn, provenance = sample(cfg, len(arrivals), length_rng)
        return replace(drawn, arrival_s=arrivals), provenance | {"pairing": "independent"}
    rows, provenance = _rows(cfg, tokenizer)
    arrivals = _arrivals(cfg, rows, arrival_rng)
    pairing = "independent" if cfg.pairs == "independent" else "joint"
    drawn = _pair(rows, cfg.pairs, cfg.filter, len(arrivals), length_rng)
    return replace(drawn, arrival_s=arrivals), provenance | {"pairs": cfg.pairs, "pairing": pairing}


def _from_distributions(cfg: WorkloadConfig, count: int, rng: np.random.Generator) -> tuple[Trace, dict[str, Any]]:
    rngs = dict(zip(("input_tokens", "output_tokens"), rng.spawn(2), strict=True))

    def draw(size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        inputs, outputs = (draw_lengths(getattr(cfg, key), size, rngs[key], key=key) for key in rngs)
        return inputs, outputs

    return Trace(*first_kept(cfg.filter, draw, count)), {"source": "distributions"}


def _from_histogram(cfg: WorkloadConfig, count: int, rng: np.random.Generator) -> tuple[Trace, dict[str, Any]]:
    dataset = str(cfg.histogram)
    provenance = {"source": "histogram", **histograms.provenance(dataset)}
    if cfg.chat.mean_rounds is None:
        return histograms.sample(dataset, cfg.filter, count, rng), provenance
    rounds = partial(histograms.sample, dataset, cfg.filter, rng=rng)  # from children of `rng`
    return chat.requests(cfg.chat, rounds, count, rng), provenance | {"chat": asdict(cfg.chat)}


def _rows(cfg: WorkloadConfig, tokenizer: Tokenizer | None) -> tuple[Trace, dict[str, Any]]:
    """The file's rows that are to be served."""
    if cfg.lengths is not None:
        source, selection = "lengths", TraceConfig()
        container = "parquet" if cfg.lengths.endswith(".parquet") else "csv"
        rows, provenance = traces.read(cfg.lengths, format=container, setting="workload.lengths")
    else:
        source, selection = "trace", cfg.trace
        if selection.tokenizer is not None:
            tokenizer = named_tokenizer(selection.tokenizer)
        rows, provenance = traces.read(
            str(selection.file), format=selection.format, on_bad_row=selection.on_bad_row, tokenizer=tokenizer
        )
    rows, counts = traces.select(rows, selection, cfg.filter)
    return rows, {"source": source, **provenance, **counts}


def _arrivals(cfg: WorkloadConfig, rows: Trace, rng: np.random.Generator) -> NDArray[np.float64]:
    own = rows.arrival_s if cfg.lengths is None else None
    replays = cfg.arrival.process == "trace" and cfg.arrival.file is None and cfg.lengths is None
    if replays and own is None:
        raise ConfigError(
            "workload.arrival.process: the trace states no arrival times; use all_at_once, poisson or gamma, "
            "or give workload.arrival.file"
        )
    if not replays and cfg.trace.rate_scale != 1:
        raise ConfigError(
            "workload.trace.rate_scale: must be 1 unless the trace's own arrivals are replayed; "
            "use workload.arrival.process=trace, or set workload.arrival.rate"
        )
    limit = cfg.num_requests if replays else request_limit(cfg, len(rows))
    return arrival_times(cfg.arrival, limit, rng, duration_s=cfg.duration_s, own=own)


def _pair(rows: Trace, pairs: str, keep: FilterConfig, count: int, rng: np.random.Generator) -> Trace:
    """``count`` requests from ``rows``, as ``workload.pairs`` says."""
    if pairs == "in_order":
        return rows.take(np.arange(count) % len(rows))
    if pairs == "sample":
        return rows.take(rng.integers(len(rows), size=count))
    input_rng, output_rng = rng.spawn(2)

    def draw_independently(size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return input_rng.choice(rows.input_tokens, size), output_rng.choice(rows.output_tokens, size)

    return Trace(*first_kept(keep, draw_independently, count))
