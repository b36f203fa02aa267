"""CPU decode attention against torch's and the speed of memory: ``python -m tests.benchmarks.attention``.

KV is cold: calls rotate over pools that together exceed the last-level cache. Candidates take turns, so
that a change of the machine's mood hits all of them. ``stream`` sums and ``copy`` copies the same bytes in
order: no kernel that reads them once can beat the former. Times are medians in ms.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kernels
from kernels import BaseSlots, BlockTables
from kernels.memory import advise_huge_pages

CPU = kernels.load("cpu")
COLD_BYTES = 150 * 2**20  # all pools together: several times a last-level cache


@dataclass(frozen=True)
class Setting:
    batch: int
    context: int
    dtype: torch.dtype
    num_query_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    block_size: int = 16
    threads: int = 1

    @property
    def kv_bytes(self) -> int:
        return 2 * self.batch * self.context * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def __str__(self) -> str:
        heads = f"{self.num_query_heads}/{self.num_kv_heads}x{self.head_dim}"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{dtype:8} B{self.batch:<2} ctx {self.context:<4} {heads:8} block {self.block_size:<3}"
            f" threads {self.threads}"
        )


class Bench:
    """One setting: inputs, and the candidates as functions of a pool."""

    def __init__(self, setting: Setting) -> None:
        self.setting = s = setting
        num_blocks = s.batch * s.context // s.block_size
        shape = (2, num_blocks * s.block_size, s.num_kv_heads, s.head_dim)
        num_pools = max(2, COLD_BYTES // s.kv_bytes)
        self.pools = [advise_huge_pages(torch.empty(shape, dtype=s.dtype)).normal_() for _ in range(num_pools)]
        self.destination = torch.empty_like(self.pools[0])
        self.query = torch.randn(s.batch, s.num_query_heads, s.head_dim).to(s.dtype)
        self.lengths = torch.full((s.batch,), s.context, dtype=torch.int32)
        blocks = torch.arange(num_blocks, dtype=torch.int32)
        self.in_order = BlockTables(blocks.view(s.batch, -1), s.block_size)
        self.shuffled = BlockTables(blocks[torch.randperm(num_blocks)].view(s.batch, -1), s.block_size)
        self.bases = BaseSlots(torch.arange(s.batch) * s.context)
        self.slots = torch.cat([self.shuffled.slots(i, s.context) for i in range(s.batch)])

    def candidates(self) -> dict[str, Callable[[Tensor], object]]:
        return {
            "shuffled": lambda pool: self.attend(pool, self.shuffled),
            "in_order": lambda pool: self.attend(pool, self.in_order),
            "contiguous": lambda pool: self.attend(pool, self.bases),
            "sdpa": self.sdpa,
            "gather+sdpa": self.gather_and_sdpa,
            "stream": lambda pool: pool.view(-1).view(torch.float32).sum(),
            "copy": self.destination.copy_,
        }

    def attend(self, pool: Tensor, where: BlockTables | BaseSlots) -> Tensor:
        scale = self.setting.head_dim**-0.5
        return CPU.decode_attention(self.query, pool[0], pool[1], where, self.lengths, scale=scale)

    def sdpa(self, pool: Tensor) -> Tensor:
        """torch's attention on contiguous KV, the head group folded into the query length."""
        s = self.setting
        key, value = pool.view(2, s.batch, s.context, s.num_kv_heads, s.head_dim).transpose(2, 3)
        query = self.query.view(s.batch, s.num_kv_heads, -1, s.head_dim)
        return scaled_dot_product_attention(query, key, value)

    def gather_and_sdpa(self, pool: Tensor) -> Tensor:
        return self.sdpa(torch.index_select(pool, 1, self.slots, out=self.destination))

    def run(self, repeats: int, quantile: float) -> dict[str, float]:
        """Seconds by candidate: a quantile over the repeats, the first left out."""
        torch.set_num_threads(self.setting.threads)
        candidates = self.candidates()
        seconds: dict[str, list[float]] = {name: [] for name in candidates}
        call = 0
        for _ in range(repeats + 1):
            for name, candidate in candidates.items():
                pool = self.pools[call % len(self.pools)]
                call += 1
                start = time.perf_counter()
                candidate(pool)
                seconds[name].append(time.perf_counter() - start)
        return {name: float(np.quantile(samples[1:], quantile)) for name, samples in seconds.items()}


def settings(quick: bool) -> list[Setting]:
    dtypes = (torch.float32, torch.bfloat16)
    main = [Setting(32, 2048, dtype) for dtype in dtypes]
    if quick:
        return main
    wide = [Setting(8, 2048, dtype, 32, 8, 128) for dtype in dtypes]
    threads = [Setting(32, 2048, dtype, threads=2) for dtype in dtypes]
    sizes = [Setting(b, c, dtype) for dtype in dtypes for b, c in ((1, 64), (1, 4096), (32, 256), (64, 512))]
    blocks = [Setting(32, 1024, torch.float32, block_size=size) for size in (1, 8, 64, 256)]
    return [*main, *wide, *threads, *sizes, *blocks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quantile", type=float, default=0.5, help="reported; lower on a busy machine")
    parser.add_argument("--quick", action="store_true", help="only the main setting")
    arguments = parser.parse_args()
    for setting in settings(arguments.quick):
        seconds = Bench(setting).run(arguments.repeats, arguments.quantile)
        times = "  ".join(f"{name} {median * 1e3:.3f}" for name, median in seconds.items())
        rate = setting.kv_bytes / seconds["shuffled"] / 1e9
        print(
            f"{setting} | {times} | {rate:.1f} GB/s"
            f"  paged/contiguous {seconds['shuffled'] / seconds['contiguous']:.3f}"
            f"  shuffled/in order {seconds['shuffled'] / seconds['in_order']:.3f}"
            f"  contiguous/stream {seconds['contiguous'] / seconds['stream']:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
