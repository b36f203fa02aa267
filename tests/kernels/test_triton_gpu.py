"""Triton kernels against the reference on a CUDA device: `pytest -m gpu`."""

from dataclasses import replace

import pytest
import torch

from kernels import triton_attention
from kernels.addressing import BlockTables
from tests.kernels import triton_checks as checks
from tests.kernels.test_triton_interpreter import COPIES

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", checks.DECODE_CASES, ids=lambda case: case.name)
def test_decode_matches_reference(case: checks.AttentionCase, dtype: torch.dtype) -> None:
    checks.check_decode(replace(case, dtype=dtype), "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", checks.PREFILL_CASES, ids=lambda case: case.name)
def test_prefill_matches_reference(case: checks.AttentionCase, dtype: torch.dtype) -> None:
    checks.check_prefill(replace(case, dtype=dtype), "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 16), ((3, 3), 80), ((20, 20), 64)])
def test_store_writes_the_named_slots_only(dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> None:
    case = checks.AttentionCase((7,), heads=heads, head_dim=head_dim, dtype=dtype)
    checks.check_store(case, "cuda")


@pytest.mark.parametrize("ranges", COPIES.values(), ids=COPIES)
def test_copies_have_the_effect_of_their_order(ranges: list[tuple[int, int, int]]) -> None:
    checks.check_copy(ranges, torch.float16, "cuda")


@pytest.mark.parametrize(("source", "destination"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_transfer_between_tiers(source: str, destination: str) -> None:
    checks.check_transfer([(0, 8, 8), (60, 0, 4), (16, 30, 10)], source, destination)


def test_a_captured_decode_follows_lengths_and_tables() -> None:
    """Nothing about a batch but its shape is baked into a CUDA graph."""
    torch.manual_seed(0)
    query = torch.randn(2, 8, 64, device="cuda", dtype=torch.float16)
    key_cache, value_cache = torch.randn(2, 1024, 2, 64, device="cuda", dtype=torch.float16)
    tables = torch.zeros(2, 32, dtype=torch.int32, device="cuda")
    lengths = torch.ones(2, dtype=torch.int32, device="cuda")
    out = torch.empty_like(query)

    def decode() -> torch.Tensor:
        return triton_attention.decode_attention(
            query, key_cache, value_cache, BlockTables(tables, 16), lengths, scale=0.125, out=out
        )

    decode()  # compile before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    tables.copy_(torch.randperm(64).reshape(2, 32).int())
    lengths.copy_(torch.tensor([512, 77]))
    graph.replay()
    captured = out.clone()
    assert torch.equal(captured, decode())
