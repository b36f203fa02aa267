"""Pools on the host ask for huge pages."""

import re
from pathlib import Path

import pytest
import torch

from kernels.memory import advise_huge_pages

MIB = 2**20
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _huge_bytes() -> int:
    found = re.search(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found
    return int(found[1]) * 1024


@pytest.mark.skipif(
    not SETTING.exists() or "[madvise]" not in SETTING.read_text(),
    reason="the system gives huge pages unasked or never",
)
def test_a_pool_lies_on_huge_pages() -> None:
    before = _huge_bytes()
    tensor = advise_huge_pages(torch.empty(64 * MIB, dtype=torch.uint8)).fill_(7)
    assert _huge_bytes() - before >= 32 * MIB  # fewer than asked for where memory is fragmented
    assert bool((tensor == 7).all())


@pytest.mark.parametrize("size", [0, 1, 2 * MIB - 1, 2 * MIB, 5 * MIB])
def test_any_size_will_do(size: int) -> None:
    tensor = advise_huge_pages(torch.ones(size, dtype=torch.uint8))
    assert tensor.shape == (size,)
    assert bool((tensor == 1).all())
