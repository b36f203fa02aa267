"""Triton kernels against the reference, interpreted on the CPU.

Triton decides at import whether it interprets, and other tests of the suite compile. So the checks run
in one process of their own, in which TRITON_INTERPRET is set. The interpreter multiplies bfloat16 as
integers: attention in bfloat16 is left to the GPU tests; the code is that of float16.
"""

import inspect
import multiprocessing
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy
import pytest
import torch
import triton

import kernels
from kernels.triton_data import independent_batches, slots_of
from kernels.triton_launch import INTERPRETED
from tests.kernels import triton_checks as checks

Run = Callable[..., None]


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


pytestmark = pytest.mark.skipif(
    _release(triton.__version__) < (3, 9) and _release(numpy.__version__) >= (2, 4),
    reason="numpy 2.4 refuses a conversion that older interpreters of Triton rely on: use numpy<2.4",
)


def _interpreting() -> bool:
    return INTERPRETED


def _check_signatures() -> None:
    for operation in ("store_kv", "decode_attention", "prefill_attention", "copy_slots", "transfer_slots"):
        expected = inspect.signature(getattr(kernels.Kernels, operation))
        assert inspect.signature(getattr(kernels.load("triton"), operation)) == expected


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    """Runs a check in the interpreter's process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            assert process.submit(_interpreting).result()
            yield lambda check, *args: process.submit(check, *args).result()


def test_signatures_are_those_of_the_interface(interpreted: Run) -> None:
    interpreted(_check_signatures)


@pytest.mark.parametrize("case", checks.DECODE_CASES, ids=lambda case: case.name)
def test_decode_matches_reference(interpreted: Run, case: checks.AttentionCase) -> None:
    interpreted(checks.check_decode, case)


@pytest.mark.parametrize("case", checks.PREFILL_CASES, ids=lambda case: case.name)
def test_prefill_matches_reference(interpreted: Run, case: checks.AttentionCase) -> None:
    interpreted(checks.check_prefill, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 16), ((3, 3), 80), ((20, 20), 64)])
def test_store_writes_the_named_slots_only(
    interpreted: Run, dtype: torch.dtype, heads: tuple[int, int], head_dim: int
) -> None:
    interpreted(checks.check_store, checks.AttentionCase((7,), heads=heads, head_dim=head_dim, dtype=dtype))


COPIES = {
    "none": [],
    "blocks": [(0, 16, 16), (32, 48, 16)],
    "one source for many": [(0, 16, 5), (0, 24, 5), (0, 40, 5)],
    "chain": [(0, 16, 8), (16, 32, 8), (32, 48, 8)],
    "overwritten source": [(16, 32, 8), (0, 16, 8)],
    "last write wins": [(0, 32, 8), (16, 34, 3), (20, 33, 1)],
    "partial overlap": [(0, 10, 4), (12, 20, 6)],
    "empty ranges": [(0, 16, 8), (18, 40, 0), (16, 32, 0), (3, 30, 2)],
}


@pytest.mark.parametrize("ranges", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copies_have_the_effect_of_their_order(
    interpreted: Run, ranges: list[tuple[int, int, int]], dtype: torch.dtype
) -> None:
    interpreted(checks.check_copy, ranges, dtype)


def _random_ranges(seed: int) -> list[tuple[int, int, int]]:
    draw = random.Random(seed)
    ranges: list[tuple[int, int, int]] = []
    while len(ranges) < 6:
        count, source, destination = draw.randint(0, 6), draw.randint(0, 58), draw.randint(0, 58)
        if abs(source - destination) >= count:
            ranges.append((source, destination, count))
    return ranges


@pytest.mark.parametrize("seed", range(8))
def test_random_copies_have_the_effect_of_their_order(interpreted: Run, seed: int) -> None:
    interpreted(checks.check_copy, _random_ranges(seed), torch.float16)


@pytest.mark.parametrize("ranges", [*COPIES.values(), *map(_random_ranges, range(100))], ids=str)
def test_a_launch_copies_in_any_order(ranges: list[tuple[int, int, int]]) -> None:
    """The interpreter runs programs in order, a GPU does not: no launch may depend on it."""
    batches = independent_batches(torch.tensor(ranges, dtype=torch.int64).reshape(-1, 3))
    assert [tuple(row) for batch in batches for row in batch.tolist()] == ranges
    for batch in batches:
        sources, destinations = (slots.tolist() for slots in slots_of(batch))
        assert len(set(destinations)) == len(destinations)
        assert not set(destinations) & set(sources)


@pytest.mark.parametrize("name", ["blocks", "one source for many"])
def test_copy_on_write_is_one_launch(name: str) -> None:
    assert len(independent_batches(torch.tensor(COPIES[name]))) == 1


@pytest.mark.parametrize("ranges", [[], [(0, 8, 8), (60, 0, 4), (16, 30, 10)]])
def test_transfer_between_pools_of_different_size(interpreted: Run, ranges: list[tuple[int, int, int]]) -> None:
    interpreted(checks.check_transfer, ranges)
