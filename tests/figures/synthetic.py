"""Small tables in the form of the stored ones, with values that a reader can compute in the head."""

from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

SEEDS = (0, 1, 2)
CAPACITY = {"static": 1.0, "buddy_max": 2.0, "buddy_pow2": 4.0, "buddy_oracle": 5.0, "paged": 10.0}
SHARES = {
    "token_states": 0.40,
    "reservation": 0.20,
    "internal_fragmentation": 0.10,
    "rounding": 0.05,
    "free": 0.25,
}
TABLES = [
    "roofline/paper_batch_throughput",
    "roofline/paper_memory_waste",
    "roofline/paper_throughput",
    "roofline/paper_throughput_variants",
    "roofline/paper_parallel_sampling",
    "roofline/paper_beam_search",
    "roofline/paper_beam_recordings",
    "roofline/paper_shared_prefix",
    "roofline/paper_chat",
    "roofline/paper_block_size",
    "roofline/paper_swap_vs_recompute",
    "roofline/paper_swap_microbenchmark",
    "cpu/attention_kernel",
]


def write(results: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    path = results / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(path)
    return path


def run(allocator: str, workload: str, rate: float, seed: int, **more: Any) -> dict[str, Any]:
    """A row of a table of runs. Latency is rate / capacity, a tenth of the capacity more with each seed."""
    return {
        "config.allocator.name": allocator,
        "config.scheduler.batching": "static" if allocator == "static" else "continuous",
        "config.workload.name": workload,
        "config.workload.arrival.rate": rate,
        "config.seed": seed,
        "metric.normalized_latency_s": rate / (CAPACITY[allocator] * (1 + 0.1 * seed)),
    } | {key.replace("__", "."): value for key, value in more.items()}


def curve(allocator: str, workload: str, **more: Any) -> list[dict[str, Any]]:
    rates = [share * CAPACITY[allocator] for share in (0.2, 0.4, 0.8, 1.2)]
    return [run(allocator, workload, rate, seed, **more) for rate, seed in product(rates, SEEDS)]


def memory_waste() -> list[dict[str, Any]]:
    fractions = {f"metric__saturated_{part}_fraction": share for part, share in SHARES.items()}
    return [
        run(allocator, workload, rate, seed, metric__mean_batch=CAPACITY[allocator] + seed, **fractions)
        for allocator in CAPACITY
        for workload, rate in (("sharegpt_paper", 2), ("alpaca_paper", 30), ("sharegpt_paper", 1))
        for seed in SEEDS
    ]


def throughput(workloads: tuple[str, ...] = ("sharegpt_paper", "alpaca_paper")) -> list[dict[str, Any]]:
    models = ("opt_13b", "opt_66b", "opt_175b")
    return [
        row
        for allocator, workload, model in product(CAPACITY, workloads, models)
        for row in curve(allocator, workload, config__model__name=model)
    ]


def throughput_variants() -> list[dict[str, Any]]:
    """Two panels, in which everybody sustains the same rates as in ``throughput``."""
    panels = (("opt_175b", "paper_throughput_mixed"), ("opt_13b", "paper_throughput_one_by_one"))
    return [
        row
        for allocator, (model, experiment) in product([name for name in CAPACITY if name != "static"], panels)
        for row in curve(allocator, "alpaca_paper", config__model__name=model, config__experiment=experiment)
    ]


def sharing(key: str, *, saving: float) -> list[dict[str, Any]]:
    """Savings of ``saving`` per sequence beyond the first, the same at every rate."""
    return [
        row
        for allocator, width in product(CAPACITY, (2, 4, 6))
        for row in curve(
            allocator,
            "alpaca_paper",
            metric__sharing_saving_fraction=saving * (width - 1) if allocator == "paged" else 0.0,
            **{f"config__workload__{key}": width},
        )
    ]


def by_block_size(*variants: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        run("paged", "sharegpt_paper", 2, seed, config__allocator__make__block_size=size) | variant
        for variant, size, seed in product(variants, [2**i for i in range(9)], SEEDS)
    ]


def beam_recordings() -> list[dict[str, Any]]:
    """Eleven recorded searches of each width, which save 0, 1, ... 10 % for each beam."""
    return [
        {"config.allocator.name": "paged", "config.workload.name": "alpaca_paper"}
        | {"config.workload.beam_width": width, "config.workload.recording": recording}
        | {"metric.sharing_saving_fraction": 0.01 * width * recording}
        for width in (2, 4, 6)
        for recording in range(11)
    ]


def write_all(results: Path) -> None:
    prefixes = product(("buddy_oracle", "paged"), (80, 341))
    tables = {
        "roofline/paper_batch_throughput": [
            {"config.seed": seed, "metric.peak_batch": batch, "metric.output_tokens_per_s": 25.0 * batch + seed}
            for batch, seed in product(range(4, 44, 4), SEEDS)
        ],
        "roofline/paper_memory_waste": memory_waste(),
        "roofline/paper_throughput": throughput(),
        "roofline/paper_throughput_variants": throughput_variants(),
        "roofline/paper_parallel_sampling": sharing("n", saving=0.02),
        "roofline/paper_beam_search": sharing("beam_width", saving=0.1),
        "roofline/paper_beam_recordings": beam_recordings(),
        "roofline/paper_shared_prefix": [
            row for name, prefix in prefixes for row in curve(name, "prefix", config__workload__prefix__tokens=prefix)
        ],
        "roofline/paper_chat": [row for allocator in CAPACITY for row in curve(allocator, "chat")],
        "roofline/paper_block_size": by_block_size(
            {"config.workload.name": "sharegpt_paper"}, {"config.workload.name": "alpaca_paper"}
        ),
        "roofline/paper_swap_vs_recompute": by_block_size(
            {"config.scheduler.preemption": "recompute"}, {"config.scheduler.preemption": "swap"}
        ),
        "roofline/paper_swap_microbenchmark": [
            {"config.scheduler.preemption": how, "config.allocator.make.block_size": 2**i, "config.seed": 0}
            | {
                "metric.copy_s": 0.12,
                "metric.num_preemptions": 4.0,
                "metric.prefill_s": 0.19,
                "metric.num_prefills": 5.0,
            }
            for how in ("recompute", "swap")
            for i in range(9)
        ],
        "cpu/attention_kernel": [
            {"dtype": dtype, "threads": threads, "context": context, "batch": batch, "block_size": size}
            | {"paged_us": 9 + 32 / size if (dtype, threads) == ("float32", 1) else 99.0, "contiguous_us": 10.0}
            for context, batch, size in product((64, 128, 256, 512), (1, 8, 32), (8, 16))
            for dtype, threads in product(("float32", "bfloat16"), (1, 2))
        ],
    }
    assert list(tables) == TABLES
    for name, rows in tables.items():
        write(results, name, rows)
