"""From samples to a table: one row per setting and block size.

``python -m kvbench.attention_kernel.summary RUNS_FOLDER TABLE.parquet`` collects the complete runs of a folder.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvbench import results
from kvbench.models import DTYPES
from kvbench.results import Run

SETTING = ["dtype", "threads", "batch", "context"]
_PEERS = ("sdpa", "flex", "flashinfer")
_RESAMPLES = 1000
_COVERAGE = 0.95


def is_attention(run: Run) -> bool:
    return "attention" in run.record


def summarize(run: Run) -> pd.DataFrame:
    """Medians over the rounds of one run, in microseconds.

    ratio: median over the rounds of paged over contiguous time within the round; ``*_low`` and ``*_high``: its
    95 % bootstrap interval. bytes: K and V, once. gb_per_s: bytes over paged time. stream_gb_per_s: what the
    memory did with the same bytes in the same rounds (CPU: a sum; CUDA: a copy, reads and writes counted).
    read_ratio: as ratio, of reading the tokens in the two orders and nothing else (NaN on CUDA).
    """
    environment = run.environment()
    rows = [
        dict(zip(SETTING, setting, strict=True)) | row
        for setting, group in run.table("samples").groupby(SETTING, sort=False)
        for row in _rows(group, run.record["attention"])
    ]
    origin = {key: environment[key] for key in ("device", "commit", "dirty")} | {"config_hash": run.config_hash}
    return pd.DataFrame([origin | row for row in rows])


def _rows(samples: pd.DataFrame, heads: dict[str, Any]) -> list[dict[str, Any]]:
    first = samples.iloc[0]
    slot_bytes = 2 * heads["num_kv_heads"] * heads["head_dim"] * DTYPES[first["dtype"]].itemsize
    num_bytes = int(first["batch"] * first["context"]) * slot_bytes
    seconds = samples.pivot(index="round", columns=["candidate", "block_size"], values="seconds")
    contiguous = seconds["contiguous", 0]
    limit = seconds["copy", 0] / 2 if "copy" in seconds else seconds["stream", 0]
    rows = []
    for size in sorted(seconds["paged"]):
        paged = seconds["paged", size]
        ratio, low, high = _median_interval((paged / contiguous).to_numpy())
        peers = {f"{name}_us": _peer_us(seconds, name, size) for name in _PEERS}
        rows.append(
            {
                "block_size": size,
                "query_heads": heads["num_query_heads"],
                "kv_heads": heads["num_kv_heads"],
                "head_dim": heads["head_dim"],
                "paged_us": 1e6 * paged.median(),
                "contiguous_us": 1e6 * contiguous.median(),
                **peers,
                "ratio": ratio,
                "ratio_low": low,
                "ratio_high": high,
                "read_ratio": (seconds["read", size] / seconds["read", 0]).median() if "read" in seconds else np.nan,
                "bytes": num_bytes,
                "gb_per_s": num_bytes / paged.median() / 1e9,
                "contiguous_gb_per_s": num_bytes / contiguous.median() / 1e9,
                "stream_gb_per_s": num_bytes / limit.median() / 1e9,
                "rounds": len(seconds),
            }
        )
    return rows


def _peer_us(seconds: pd.DataFrame, name: str, block_size: int) -> float:
    """NaN where the peer was not timed with this block size."""
    key = (name, 0 if name == "sdpa" else block_size)
    return 1e6 * seconds[key].median() if key in seconds else np.nan


def _median_interval(values: np.ndarray) -> tuple[float, float, float]:
    """The median and its bootstrap interval."""
    drawn = np.random.default_rng(0).integers(len(values), size=(_RESAMPLES, len(values)))
    medians = np.median(values[drawn], axis=1)
    tail = (1 - _COVERAGE) / 2
    low, high = np.quantile(medians, (tail, 1 - tail))
    return float(np.median(values)), float(low), float(high)


def main() -> None:
    if len(sys.argv) != 3 or not Path(sys.argv[1]).is_dir():
        print("usage: python -m kvbench.attention_kernel.summary RUNS_FOLDER TABLE.parquet", file=sys.stderr)
        sys.exit(2)
    runs = [run for run in results.find(Path(sys.argv[1])) if run.status == "complete" and is_attention(run)]
    if not runs:
        print(f"error: no complete run of attention_kernel in {sys.argv[1]}", file=sys.stderr)
        sys.exit(2)
    table = pd.concat([summarize(run) for run in runs], ignore_index=True)
    Path(sys.argv[2]).parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(sys.argv[2], index=False)
    print(f"{len(table)} rows of {len(runs)} runs: {sys.argv[2]}")


if __name__ == "__main__":
    main()
