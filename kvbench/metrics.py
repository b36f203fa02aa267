"""From a run's tables to its scalar metrics, each with its unit."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvbench.recorder import PARTS, SECONDS

Metrics = dict[str, tuple[float, str]]
PERCENTILES = (50, 90, 99)


def window(steps: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Steps that pool averages are taken over, and the window's name.

    ``loaded``: from the first to the last step at which the head of the queue was refused, so that
    neither filling nor draining the pool counts. ``whole run`` where fewer than two steps refused.
    """
    refused = np.flatnonzero(steps["refused"])
    if len(refused) < 2:
        return steps, "whole run"
    return steps.iloc[refused[0] : refused[-1] + 1], "loaded"


@dataclass(frozen=True)
class Objective:
    """A service-level objective: most seconds to the first token, and per token after it; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def limits(self) -> dict[str, float]:
        """By the column of the requests' table that they bound."""
        return {name: limit for name, limit in vars(self).items() if limit is not None}

    def met(self, requests: pd.DataFrame) -> NDArray[np.bool_]:
        """Which requests were finished within every limit. One that has a single token has no time per token."""
        kept = (requests["status"] == "finished").to_numpy(copy=True)
        for name, limit in self.limits.items():
            kept &= ~(requests[name].to_numpy(float) > limit)
        return kept


def summarize(
    steps: pd.DataFrame,
    requests: pd.DataFrame,
    *,
    bytes_per_slot: int,
    block_size: int,
    objective: Objective | None = None,
) -> Metrics:
    """All scalar metrics of a run. steps, requests: the recorder's tables. ``objective``: what goodput counts."""
    duration = float(steps["duration_s"].sum())
    done = requests[requests["status"] == "finished"]
    tokens = int(done["output_tokens"].sum())
    metrics: Metrics = {
        "duration_s": (duration, "s"),
        "num_requests": (len(requests), "requests"),
        "num_finished": (len(done), "requests"),
        "num_steps": (int((steps["kind"] != "idle").sum()), "steps"),
        "output_tokens": (tokens, "tokens"),
        "output_tokens_per_s": (tokens / duration, "tokens/s"),
        "requests_per_s": (len(done) / duration, "requests/s"),
    }
    if objective is not None and objective.limits:
        met = int(objective.met(requests).sum())
        metrics["goodput_requests_per_s"] = (met / duration, "requests/s")
        metrics["attainment_fraction"] = (met / len(requests), "of requests")
    if len(done):
        hits = int(done["num_cached_tokens"].sum()) / int(done["prompt_tokens"].sum())
        metrics["prefix_hit_fraction"] = (hits, "of prompt tokens")
        metrics["normalized_latency_s"] = (float(done["normalized_latency_s"].mean()), "s/token")
    gaps = _gaps_s(done["token_times_s"].tolist())
    for name in ("ttft_s", "tpot_s", "latency_s", "queueing_s"):
        metrics |= _distribution(name, done[name].dropna().to_numpy(float), "s")
    metrics |= _distribution("itl_s", gaps, "s")
    metrics |= _pool(steps)
    metrics |= _movement(steps, bytes_per_slot, block_size)
    prefills = steps[steps["kind"].isin(["prefill", "mixed"])]
    metrics |= {"num_prefills": (len(prefills), "steps"), "prefill_s": (float(prefills["model_s"].sum()), "s")}
    parts = {name: (float(steps[name].sum()), "s") for name in SECONDS}
    return metrics | parts


def tokens_digest(requests: pd.DataFrame) -> str:
    """SHA-256 of every request's generated tokens, in request order: equal runs served equal tokens."""
    outputs = [[np.asarray(tokens).tolist() for tokens in outputs] for outputs in requests["outputs"]]
    return hashlib.sha256(json.dumps(outputs).encode()).hexdigest()


def _gaps_s(times_s: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Time between tokens, over all requests, given the times of each one's."""
    if not times_s:
        return np.empty(0)
    ends = np.cumsum([len(own) for own in times_s])
    return np.delete(np.diff(np.concatenate(times_s)), ends[:-1] - 1)


def _distribution(name: str, samples: np.ndarray, unit: str) -> Metrics:
    if len(samples) == 0:
        return {}
    points = np.percentile(samples, PERCENTILES)
    stem = name.removesuffix("_s")
    values = {f"{stem}_mean_s": float(samples.mean())} | {
        f"{stem}_p{p}_s": float(point) for p, point in zip(PERCENTILES, points, strict=True)
    }
    return {key: (value, unit) for key, value in values.items()}


def _pool(steps: pd.DataFrame) -> Metrics:
    """Averages over the window, and, as ``saturated_...``, over those of its steps that refused somebody."""
    inside, _ = window(steps)
    num_slots = int(steps[list(PARTS)].iloc[0].sum())
    metrics = _averages(inside, num_slots)
    saturated = inside[inside["refused"]]
    if len(saturated):
        metrics |= {f"saturated_{name}": entry for name, entry in _averages(saturated, num_slots).items()}
    return metrics | {
        "peak_batch": (int(steps["num_running"].max()), "requests"),
        "peak_sequences": (int(steps["num_sequences"].max()), "sequences"),
        "peak_host_slots": (int(steps["host_held"].max()), "slots"),
    }


def _averages(steps: pd.DataFrame, num_slots: int) -> Metrics:
    """Weighted by time; fractions of the pool's slots."""
    weights = steps["duration_s"].to_numpy()

    def mean(column: str) -> float:
        return float(np.average(steps[column], weights=weights))

    metrics: Metrics = {f"{part}_fraction": (mean(part) / num_slots, "of pool") for part in PARTS}
    held = steps[["token_states", "reservation", "internal_fragmentation"]].sum(axis=1)
    mapped = float((steps["mapped"] * weights).sum())
    saved = 1 - float((held * weights).sum()) / mapped if mapped else 0.0
    return metrics | {
        "waste_fraction": (1 - mean("token_states") / num_slots, "of pool"),
        "stranded_fraction": (mean("stranded") / num_slots, "of pool"),
        "cached_fraction": (mean("cached") / num_slots, "of pool"),
        "sharing_saving_fraction": (saved, "of slots without sharing"),
        "mean_batch": (mean("num_running"), "requests"),
        "mean_sequences": (mean("num_sequences"), "sequences"),
        "window_s": (float(weights.sum()), "s"),
    }


def _movement(steps: pd.DataFrame, bytes_per_slot: int, block_size: int) -> Metrics:
    copied = int(steps[["cow_slots", "fork_slots", "prompt_slots"]].to_numpy().sum())
    swapped = int(steps[["swap_out_slots", "swap_in_slots"]].to_numpy().sum())
    metrics: Metrics = {
        "copied_bytes": (copied * bytes_per_slot, "bytes"),
        "swapped_bytes": (swapped * bytes_per_slot, "bytes"),
        "num_preemptions": (int(steps["num_preemptions"].sum()), "preemptions"),
        "num_recomputed_tokens": (int(steps["num_recomputed_tokens"].sum()), "tokens"),
    }
    if block_size:
        metrics["copied_blocks"] = (copied // block_size, "blocks")
    return metrics


def as_json(metrics: Metrics) -> dict[str, Any]:
    return {name: {"value": value, "unit": unit} for name, (value, unit) in metrics.items()}
