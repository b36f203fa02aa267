"""The experiment ``attention_kernel``: what it records is what it timed, and nothing wrong is timed."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import kernels
from kernels import BaseSlots, BlockTables, reference
from kvbench import results
from kvbench.attention_kernel import peers, summary
from kvbench.attention_kernel.candidates import Candidate
from kvbench.attention_kernel.experiment import Experiment
from kvbench.attention_kernel.problem import ColdKV, Problem
from kvbench.attention_kernel.settings import AttentionConfig, GridConfig, Setting
from tests.cli import Cli

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent
COLUMNS = [
    *("device", "dtype", "threads", "block_size", "batch", "context", "query_heads", "kv_heads", "head_dim"),
    *("paged_us", "contiguous_us", "sdpa_us", "ratio", "ratio_low", "ratio_high", "read_ratio"),
    *("bytes", "gb_per_s", "stream_gb_per_s"),
]


def _grid(**changes: Any) -> GridConfig:
    usual = {"dtypes": ["float32"], "threads": [1], "block_sizes": [4, 16], "batches": [2], "contexts": [9, 24]}
    return GridConfig(**usual | {"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 16} | changes)


def _experiment(grid: GridConfig, operations: Any, rounds: int = 3) -> Experiment:
    return Experiment(AttentionConfig(rounds, "1MiB", cpu=grid), operations, CPU, seed=0)


SMALL = ("measure.progress=false", "attention.rounds=2", "attention.cold_size=1MiB")


def _attention(run: Cli, *arguments: str) -> results.Run:
    code, out, err = run("+experiment=attention_kernel", *SMALL, *arguments)
    assert code == 0, out + err
    (record,) = run.runs()
    return record


def test_the_command_keeps_every_sample_and_sums_them_up(run: Cli) -> None:
    sizes = ("attention.cpu.contexts=[9,64]", "attention.cpu.batches=[2]", "attention.cpu.block_sizes=[4,16]")
    record = _attention(run, *sizes)
    assert record.status == "complete"
    samples = record.table("samples")
    candidates = {"contiguous": 1, "paged": 2, "sdpa": 1, "stream": 1, "read": 3}
    settings = 2 * 2 * 2  # dtypes, threads, contexts
    assert samples["candidate"].value_counts().to_dict() == {
        name: count * settings * 2 for name, count in candidates.items()
    }
    table = pd.read_parquet(record.path.parent / "attention_kernel.parquet")
    assert set(COLUMNS) <= set(table)
    assert len(table) == 2 * settings
    assert table[COLUMNS].notna().all().all()
    assert table["config_hash"].eq(record.config_hash).all()
    assert {"attention_kernel.png", "attention_kernel.pdf"} <= {path.name for path in record.path.parent.iterdir()}


def test_each_candidate_has_a_turn_in_every_round_in_changing_order() -> None:
    samples = _experiment(_grid(), kernels.load("cpu"), rounds=8).run(progress=False)
    orders = set()
    for _, turns in samples.groupby(["context", "round"]):
        names = turns["candidate"] + turns["block_size"].astype(str)
        reads = ["read0", "read16", "read4"]
        assert sorted(names) == ["contiguous0", "paged16", "paged4", *reads, "sdpa0", "stream0"]
        assert turns["turn"].tolist() == list(range(8))
        orders.add(tuple(names))
    assert len(orders) > 8


def test_a_wrong_kernel_is_not_timed() -> None:
    def decode(query: Tensor, key_cache: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return kernels.load("cpu").decode_attention(query, key_cache * 1.01, *arguments, **options)

    with pytest.raises(RuntimeError, match=r"contiguous .* is wrong"):
        _experiment(_grid(), SimpleNamespace(decode_attention=decode)).run(progress=False)


def test_a_peer_that_fails_is_left_out_and_says_why() -> None:
    def missing(problem: Problem) -> Candidate:
        raise ImportError("not here")

    def wrong(problem: Problem) -> Candidate:
        zeros = torch.zeros_like(problem.query)
        return Candidate("wrong", 0, problem.batch * problem.context, lambda key, value: zeros, problem.base_slots())

    experiment = _experiment(_grid(), kernels.load("cpu"))
    experiment.peers = {"missing": missing, "wrong": wrong}
    samples = experiment.run(progress=False)
    assert set(samples["candidate"]) == {"contiguous", "paged", "read", "sdpa", "stream"}
    assert "not here" in experiment.absent["missing"]
    assert "is wrong" in experiment.absent["wrong"]


def test_calls_walk_through_the_buffer() -> None:
    """Every region comes from elsewhere until the buffer is used up, so that none is in a cache."""
    kv = ColdKV(4 * 7 * 2 * 8, torch.float32, CPU)  # 7 slots of one head x 8, K or V
    addresses = [kv.take(2, 1, 8).data_ptr() for _ in range(4)]
    start = addresses[0]
    assert [address - start for address in addresses] == [0, 128, 256, 0]


def _run_of(samples: pd.DataFrame) -> Any:
    heads = {"num_query_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    return SimpleNamespace(
        record={"attention": heads},
        config_hash="h",
        environment=lambda: {"device": "d", "commit": "c", "dirty": False},
        table=lambda name: samples,
    )


def test_ratios_are_paired_within_rounds() -> None:
    """Paged takes 1.1 times contiguous in every round, while the machine's speed drifts tenfold."""
    drift = np.linspace(1, 10, 21)
    setting = {"dtype": "bfloat16", "threads": 1, "batch": 8, "context": 64}
    times = {("contiguous", 0): 10e-6, ("paged", 16): 11e-6, ("sdpa", 0): 20e-6, ("stream", 0): 5e-6}
    times |= {("read", 0): 6e-6, ("read", 16): 9e-6}
    samples = pd.DataFrame(
        setting | {"candidate": name, "block_size": size, "round": i, "seconds": seconds * drift[i]}
        for (name, size), seconds in times.items()
        for i in range(len(drift))
    )
    (row,) = summary.summarize(_run_of(samples)).to_dict("records")
    assert [row[key] for key in ("ratio", "ratio_low", "ratio_high")] == pytest.approx([1.1] * 3)
    assert row["read_ratio"] == pytest.approx(1.5)
    assert row["contiguous_us"] == pytest.approx(10 * 5.5)
    assert row["bytes"] == 8 * 64 * 2 * 3 * 64 * 2
    assert row["gb_per_s"] == pytest.approx(row["bytes"] / (11e-6 * 5.5) / 1e9)
    assert row["stream_gb_per_s"] == pytest.approx(row["bytes"] / (5e-6 * 5.5) / 1e9)
    noisy = samples.assign(seconds=samples["seconds"] * np.random.default_rng(0).uniform(0.9, 1.1, len(samples)))
    (row,) = summary.summarize(_run_of(noisy)).to_dict("records")
    assert row["ratio_low"] < row["ratio"] < row["ratio_high"]
    assert 0.02 < row["ratio_high"] - row["ratio_low"] < 0.15


def _problem(context: int) -> tuple[Problem, ColdKV]:
    grid = _grid(contexts=[context])
    kv = ColdKV(2**22, torch.float32, CPU)
    return Problem.of(Setting("float32", 1, batch=3, context=context), grid, CPU), kv


def _assert_right(candidate: Candidate, problem: Problem, kv: ColdKV) -> None:
    key, value = kv.take(candidate.num_slots, problem.num_kv_heads, problem.head_dim)
    where = candidate.where
    assert isinstance(where, BlockTables | BaseSlots)
    expected = reference.decode_attention(problem.query, key, value, where, problem.lengths, scale=problem.scale)
    torch.testing.assert_close(candidate.run(key, value), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("context", [64, 128, 300])
def test_flex_attention_follows_the_block_tables(context: int) -> None:
    """Not compiled, FlexAttention applies the mask only; GPU runs check what is compiled."""
    problem, kv = _problem(context)
    candidate = peers.flex_candidate(problem, attend=flex_attention)
    _assert_right(candidate, problem, kv)


@pytest.mark.parametrize("context", [256, 300])
def test_flex_attention_visits_each_block_of_a_table_once(context: int) -> None:
    problem, _ = _problem(context)
    mask_of: list[Any] = []
    candidate = peers.flex_candidate(problem, attend=lambda *_, block_mask, **__: mask_of.append(block_mask) or _[0])
    candidate.run(*torch.zeros(2, candidate.num_slots, 2, 16))
    (mask,) = mask_of
    for i in range(problem.batch):
        full = mask.full_kv_indices[i, 0, 0, : mask.full_kv_num_blocks[i, 0, 0]]
        partial = mask.kv_indices[i, 0, 0, : mask.kv_num_blocks[i, 0, 0]]
        assert torch.cat([full, partial]).tolist() == candidate.where.tables[i].tolist()
        assert len(full) == context // 128


class _FlashInferStandIn:
    """Has FlashInfer's call signatures and computes what its documentation says."""

    def __init__(self, workspace: Tensor, kv_layout: str, use_tensor_cores: bool) -> None:
        assert kv_layout == "NHD"

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert (num_qo_heads, num_kv_heads, head_dim, q_data_type) == (4, 2, 16, kv_data_type)
        self.pages = [indices[start:stop] for start, stop in pairwise(indptr)]
        self.lengths = (indptr.diff() - 1) * page_size + last_page_len

    def run(self, query: Tensor, paged_kv: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv
        where = BlockTables(torch.stack(self.pages), keys.shape[1])
        flat = [cache.flatten(0, 1) for cache in (keys, values)]
        return reference.decode_attention(query, *flat, where, self.lengths, scale=query.shape[-1] ** -0.5)


def test_flashinfer_is_planned_with_our_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=_FlashInferStandIn)
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    problem, kv = _problem(context=40)
    _assert_right(peers.flashinfer_candidate(16, problem), problem, kv)


@pytest.mark.slow
def test_triton_kernels_run_in_the_interpreter(tmp_path: Path) -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    sizes = ("attention.cpu.contexts=[40]", "attention.cpu.batches=[2]", "attention.cpu.block_sizes=[16]")
    settings = ("executor.kernels=triton", "attention.cpu.dtypes=[float32]", f"results_dir={tmp_path}")
    done = subprocess.run(
        [sys.executable, "-m", "kvbench", "+experiment=attention_kernel", *SMALL, *sizes, *settings],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = results.find(tmp_path)
    assert record.record["kernels"] == "triton"


@pytest.mark.gpu
def test_the_command_on_a_gpu(run: Cli) -> None:
    sizes = ("attention.cuda.contexts=[300]", "attention.cuda.batches=[4]", "attention.cuda.block_sizes=[16,128]")
    record = _attention(run, "device=cuda", *sizes)
    table = summary.summarize(record)
    assert len(table) == 4
    assert table[COLUMNS].notna().all().all()
    assert json.dumps(record.record["absent_peers"])
