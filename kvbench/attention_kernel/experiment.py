"""Runs the rounds of every setting and keeps every sample."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from kernels import Kernels, reference
from kvbench.attention_kernel import candidates
from kvbench.attention_kernel.candidates import Candidate
from kvbench.attention_kernel.clock import Clock, CpuClock, CudaClock
from kvbench.attention_kernel.peers import paged_peers
from kvbench.attention_kernel.problem import ColdKV, Problem, padded_slots
from kvbench.attention_kernel.settings import AttentionConfig, GridConfig, Setting, all_settings
from kvbench.models import DTYPES
from kvbench.sizing import available_bytes, parse_size

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}  # largest relative error of a result's row, by norm


@dataclass
class Experiment:
    """The samples of one run, and why peers were left out (name of the peer: reason)."""

    cfg: AttentionConfig
    kernels: Kernels
    device: torch.device
    seed: int

    def __post_init__(self) -> None:
        self.absent: dict[str, str] = {}
        sizes = self.cfg.grid(self.device.type).block_sizes
        self.peers = paged_peers(sizes) if self.device.type == "cuda" else {}
        self._random = np.random.default_rng(self.seed)
        self._checked: set[tuple[str, str, int]] = set()
        torch.manual_seed(self.seed)

    def run(self, progress: bool) -> pd.DataFrame:
        """One row per sample: the setting, candidate, block_size (0: not paged), round, turn in it, seconds."""
        grid = self.cfg.grid(self.device.type)
        settings = all_settings(grid)
        frames: list[pd.DataFrame] = []
        usual_threads = torch.get_num_threads()
        with tqdm(total=len(settings) * self.cfg.rounds, disable=not progress, unit="round", dynamic_ncols=True) as bar:
            for dtype in grid.dtypes:
                kv = self._cold_kv(grid, dtype)
                for setting in (setting for setting in settings if setting.dtype == dtype):
                    bar.set_description(str(setting))
                    frames += self._measure(setting, grid, kv, bar)
        torch.set_num_threads(usual_threads)
        return pd.concat(frames, ignore_index=True)

    def _cold_kv(self, grid: GridConfig, dtype: str) -> ColdKV:
        slot_bytes = 2 * grid.num_kv_heads * grid.head_dim * DTYPES[dtype].itemsize
        cold = parse_size(self.cfg.cold_size, "attention.cold_size", available_bytes(self.device))
        return ColdKV(max(cold, padded_slots(grid) * slot_bytes), DTYPES[dtype], self.device)

    def _measure(self, setting: Setting, grid: GridConfig, kv: ColdKV, bar: tqdm) -> Iterator[pd.DataFrame]:
        torch.set_num_threads(setting.threads)
        problem = Problem.of(setting, grid, self.device)
        clock: Clock = CudaClock(problem, kv) if self.device.type == "cuda" else CpuClock(problem, kv)
        turns = list(self._candidates(problem, setting, grid, kv, clock))
        names, sizes = np.array([turn.name for turn in turns]), np.array([turn.block_size for turn in turns])
        for number in range(self.cfg.rounds):
            order = self._random.permutation(len(turns))
            seconds = clock.round(order.tolist())
            bar.update()
            yield pd.DataFrame(
                asdict(setting)
                | {"candidate": names[order], "block_size": sizes[order], "round": number}
                | {"turn": np.arange(len(turns)), "seconds": seconds}
            )

    def _candidates(
        self, problem: Problem, setting: Setting, grid: GridConfig, kv: ColdKV, clock: Clock
    ) -> Iterator[Candidate]:
        """Those that give the right result, ready to be timed."""
        own = candidates.own(problem, self.kernels, grid.block_sizes)
        reads = candidates.reads(problem, grid.block_sizes) if self.device.type == "cpu" else []
        for candidate in (*own, candidates.sdpa(problem), candidates.memory_limit(problem), *reads):
            self._check(candidate, problem, setting.dtype, kv)
            clock.add(candidate)
            yield candidate
        for name, make in self.peers.items():
            if name in self.absent:
                continue
            try:
                candidate = make(problem)
                self._check(candidate, problem, setting.dtype, kv)
                clock.add(candidate)
            except Exception as error:  # whatever somebody else's library may raise
                self.absent[name] = f"{setting}: {type(error).__name__}: {error}"
            else:
                yield candidate

    def _check(self, candidate: Candidate, problem: Problem, dtype: str, kv: ColdKV) -> None:
        """Validate, then time: against float64, once per candidate and dtype."""
        key = (dtype, candidate.name, candidate.block_size)
        if candidate.where is None or key in self._checked:
            return
        key_cache, value_cache = kv.take(candidate.num_slots, problem.num_kv_heads, problem.head_dim)
        arguments = key_cache, value_cache, candidate.where, problem.lengths
        expected = reference.decode_attention(problem.query.double(), *arguments, scale=problem.scale)
        difference = candidate.run(key_cache, value_cache).double() - expected
        error = float((difference.norm(dim=-1) / expected.norm(dim=-1)).max())
        if not error <= TOLERANCE[dtype]:
            raise RuntimeError(f"{candidate.name} (block {candidate.block_size}) is wrong: relative error {error:.1e}")
        self._checked.add(key)


def record(experiment: Experiment, implementation: str) -> dict[str, Any]:
    """What run.json says beside the samples."""
    grid = experiment.cfg.grid(experiment.device.type)
    return {"attention": asdict(grid) | {"device": experiment.device.type}, "kernels": implementation} | {
        "absent_peers": experiment.absent
    }
