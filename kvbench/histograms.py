"""Lengths drawn from published histograms.

``resources/paper_fig11_lengths.csv`` holds Figure 11 of Kwon et al., "Efficient Memory Management for Large
Language Model Serving with PagedAttention" (SOSP 2023), as density per bin, read from the vector plot; empty
bins are left out. The histograms are marginals: which output belonged to which input is not published, so
the two are drawn independently.
"""

import hashlib
from importlib import resources
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvbench.errors import ConfigError
from kvbench.length_filter import FilterConfig, first_kept
from kvbench.traces import Trace

DATASETS = ("sharegpt", "alpaca")
SHIPPED = resources.files("kvbench") / "resources" / "paper_fig11_lengths.csv"


def sample(dataset: str, keep: FilterConfig, count: int, rng: np.random.Generator) -> Trace:
    """``count`` requests of ``dataset`` (sharegpt | alpaca) that pass ``keep``; others are drawn again.

    Asking for more requests does not change the first ones. Raises ConfigError on another dataset.
    """
    check(dataset)
    input_rng, output_rng = rng.spawn(2)
    lengths = {kind: pmf(dataset, kind) for kind in ("input", "output")}

    def draw(size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return _draw(*lengths["input"], size, input_rng), _draw(*lengths["output"], size, output_rng)

    return Trace(*first_kept(keep, draw, count))


def check(dataset: str) -> None:
    if dataset not in DATASETS:
        raise ConfigError(f"workload.histogram: {dataset!r} is not one of {', '.join(DATASETS)}, or null")


def pmf(dataset: str, kind: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Lengths in tokens, int64 ``[n]``, and their probabilities, float64 ``[n]``. kind: input | output.

    A bin's mass is spread evenly over the integers in it, [low, high) and for the last bin [low, high]:
    lengths are whole, and this gives back the published means (rounding a uniform number would not).
    """
    with SHIPPED.open(encoding="utf-8") as file:
        bins = pd.read_csv(file)
    bins = bins[(bins["dataset"] == dataset) & (bins["kind"] == kind)]
    low = np.ceil(bins["low"].to_numpy()).astype(np.int64)
    high = np.ceil(bins["high"].to_numpy()).astype(np.int64)
    high[-1] = int(np.floor(bins["high"].iloc[-1])) + 1
    per_bin = high - low
    mass = ((bins["high"] - bins["low"]) * bins["density"]).to_numpy()
    values = np.concatenate([np.arange(*edges) for edges in zip(low, high, strict=True)])
    probabilities = np.repeat(mass / per_bin, per_bin)
    return values, probabilities / probabilities.sum()


def provenance(dataset: str) -> dict[str, Any]:
    """What a run record says of the histograms; JSON types."""
    return {
        "file": SHIPPED.name,
        "sha256": hashlib.sha256(SHIPPED.read_bytes()).hexdigest(),
        "dataset": dataset,
        "publication": "Kwon et al., SOSP 2023, Figure 11",
    }


def _draw(
    values: NDArray[np.int64], probabilities: NDArray[np.float64], size: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    return rng.choice(values, size, p=probabilities)
