"""How long one turn of each candidate takes, KV cold."""

import time
from collections.abc import Iterable
from typing import Protocol

import torch

from kvbench.attention_kernel.candidates import Candidate
from kvbench.attention_kernel.problem import ColdKV, Problem

_WARM_UP_CALLS = 3


class Clock(Protocol):
    def add(self, candidate: Candidate) -> None:
        """Make ready, compile; raises what the candidate raises."""

    def round(self, order: Iterable[int]) -> list[float]:
        """Seconds of the candidates with these numbers, in order of adding, run in this order."""


class CpuClock:
    """The wall clock around each call; every call gets the next region of a buffer larger than the caches."""

    def __init__(self, problem: Problem, kv: ColdKV) -> None:
        self._problem, self._kv = problem, kv
        self._candidates: list[Candidate] = []

    def add(self, candidate: Candidate) -> None:
        self._seconds(candidate)
        self._candidates.append(candidate)

    def round(self, order: Iterable[int]) -> list[float]:
        return [self._seconds(self._candidates[number]) for number in order]

    def _seconds(self, candidate: Candidate) -> float:
        region = self._kv.take(candidate.num_slots, self._problem.num_kv_heads, self._problem.head_dim)
        key_cache, value_cache = region
        start = time.perf_counter()
        candidate.run(key_cache, value_cache)
        return time.perf_counter() - start


class CudaClock:
    """Events around a CUDA graph of each call, L2 overwritten before.

    A graph leaves out what the host does to launch. While the device overwrites L2, the host enqueues what
    follows, so that the device waits for nothing between the events.
    """

    def __init__(self, problem: Problem, kv: ColdKV) -> None:
        self._problem, self._kv = problem, kv
        self._graphs: list[torch.cuda.CUDAGraph] = []
        l2_bytes = torch.cuda.get_device_properties(problem.query.device).L2_cache_size
        self._flushed = torch.empty(max(4 * l2_bytes, 2**28), dtype=torch.uint8, device=problem.query.device)

    def add(self, candidate: Candidate) -> None:
        caches = self._kv.take(candidate.num_slots, self._problem.num_kv_heads, self._problem.head_dim)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_CALLS):
                candidate.run(*caches)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            candidate.run(*caches)
        self._graphs.append(graph)

    def round(self, order: Iterable[int]) -> list[float]:
        spans = [self._enqueue(self._graphs[number]) for number in order]
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) / 1e3 for start, stop in spans]

    def _enqueue(self, graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flushed.zero_()
        start.record()
        graph.replay()
        stop.record()
        return start, stop
