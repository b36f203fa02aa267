"""Triton kernels cross-compiled for GPUs that need not be there, and held to a budget of resources."""

import functools
from dataclasses import replace

import pytest
import torch

import kernels
from kernels import triton_attention
from kernels.addressing import BaseSlots, BlockTables
from kernels.triton_attention import Attention
from kernels.triton_data import copy_launch, store_launch
from kernels.triton_launch import INTERPRETED, Launch
from tests.kernels.cubin import Cubin, compile_cubin, compile_gcn

pytestmark = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set: nothing is compiled")

ARCHITECTURES = pytest.mark.parametrize("capability", [80, 90, 100], ids="sm_{}".format)
# sm_100 compiles like sm_90 but for prefill's tensor cores: one shape each, the others in the slow suite.
MOST_ARCHITECTURES = pytest.mark.parametrize("capability", [80, 90], ids="sm_{}".format)
half, bfloat16, float32 = torch.float16, torch.bfloat16, torch.float32

# (dtype, query heads, KV heads, head_dim, block_size (0: contiguous), window, softcap)
Shape = tuple[torch.dtype, int, int, int, int, int, float]
HALF_DECODE: list[Shape] = [
    (half, 32, 8, 128, 16, 0, 0.0),
    (half, 32, 8, 128, 0, 0, 0.0),
    (half, 32, 8, 128, 64, 0, 0.0),
    (bfloat16, 9, 3, 64, 16, 0, 0.0),
    (bfloat16, 12, 12, 64, 0, 4096, 50.0),
]
OTHER_DECODE: list[Shape] = [
    (half, 8, 8, 80, 16, 0, 0.0),
    (bfloat16, 8, 1, 256, 16, 4096, 50.0),
    (float32, 9, 3, 64, 16, 0, 0.0),
]
# (shape, tokens of two sequences)
PREFILL: list[tuple[Shape, int]] = [
    ((half, 32, 8, 128, 16, 0, 0.0), 256),
    ((half, 32, 8, 128, 16, 0, 0.0), 2),
    ((bfloat16, 9, 3, 64, 0, 0, 0.0), 256),
    ((bfloat16, 8, 4, 256, 16, 4096, 50.0), 256),
    ((float32, 9, 3, 64, 16, 0, 0.0), 256),
    # What needs most registers: positions looked up one by one, a window and a softcap.
    ((half, 8, 1, 80, 1, 4096, 50.0), 256),
    ((half, 8, 1, 8, 1, 4096, 50.0), 2),
]
ALL_SHAPES: list[Shape] = [
    (dtype, 8, kv_heads, head_dim, block_size, window, softcap)
    for dtype in (half, bfloat16, float32)
    for head_dim in (8, 64, 80, 96, 128, 256)
    for kv_heads, block_size, window, softcap in ((8, 0, 0, 0.0), (1, 1, 4096, 50.0), (2, 256, 0, 50.0))
]

# Two programs of decode share a multiprocessor of sm_80 (164 KiB, 65536 registers, 128 threads each).
SHARED_BYTES_BUDGET = 81 * 1024
REGISTER_BUDGET = 168
# Two programs of decode, and one of prefill, in the 64 KiB of shared memory and 512 registers of a gfx942's unit.
GCN_DECODE_SHARED_BYTES, GCN_PREFILL_SHARED_BYTES = 34 * 1024, 64 * 1024
GCN_REGISTER_BUDGET = 256
GCN_WIDE_LOADS = r"(buffer|global)_load_dwordx4"


def _attention(shape: Shape, num_tokens: int = 2) -> Attention:
    dtype, query_heads, kv_heads, head_dim, block_size, window, softcap = shape
    cache = torch.empty(64, kv_heads, head_dim, dtype=dtype)
    query = torch.empty(num_tokens, query_heads, head_dim, dtype=dtype)
    where = (
        BlockTables(torch.zeros(2, 8, dtype=torch.int32), block_size)
        if block_size
        else BaseSlots(torch.zeros(2, dtype=torch.int64))
    )
    lengths = torch.zeros(2, dtype=torch.int32)
    return Attention(query, cache, cache, where, lengths, torch.empty_like(query), 0.1, window, softcap)


@functools.cache
def _decode(shape: Shape, capability: int) -> Cubin:
    return compile_cubin(_attention(shape).decode_launches()[0], capability)


def _prefill(shape: Shape, capability: int, num_tokens: int) -> Cubin:
    starts = torch.zeros(3, dtype=torch.int32)
    return compile_cubin(_attention(shape, num_tokens).prefill_launch(starts), capability)


def _everywhere(cases: list[tuple]) -> list:
    """Cases and architectures; sm_100 in the quick suite for the first case only."""
    return [
        pytest.param(*case, sm, marks=pytest.mark.slow if sm == 100 and i else (), id=f"sm_{sm}-{case}")
        for i, case in enumerate(cases)
        for sm in (80, 90, 100)
    ]


def _assert_decode_budget(cubin: Cubin) -> None:
    assert cubin.num_spills == 0
    assert cubin.registers <= REGISTER_BUDGET
    assert cubin.shared_bytes <= SHARED_BYTES_BUDGET


@pytest.mark.parametrize(("shape", "capability"), _everywhere([(shape,) for shape in HALF_DECODE]))
def test_half_decode_reads_16_bytes_at_a_time_into_tensor_cores(shape: Shape, capability: int) -> None:
    cubin = _decode(shape, capability)
    _assert_decode_budget(cubin)
    assert cubin.count(r"HMMA\..*") > 0
    # Two tiles of K and V before the loop, one in it, as asynchronous copies to shared memory by 128
    # threads: 16 bytes each account for all of them. Narrower ones are entries of the block table.
    assert cubin.count(r"LDGSTS\..*\.128") * 16 * 128 == 3 * 2 * 16 * 1024
    if not shape[4]:
        assert cubin.count(r"LDGSTS\..*") == cubin.count(r"LDGSTS\..*\.128")


@MOST_ARCHITECTURES
@pytest.mark.parametrize("block_size", [16, 64])
def test_paging_keeps_as_much_in_flight(block_size: int, capability: int) -> None:
    paged = _decode((half, 32, 8, 128, block_size, 0, 0.0), capability)
    contiguous = _decode((half, 32, 8, 128, 0, 0, 0.0), capability)
    assert paged.count(r"LDGSTS\..*\.128") == contiguous.count(r"LDGSTS\..*\.128")
    assert paged.count(r"HMMA\..*") == contiguous.count(r"HMMA\..*")
    assert 0 <= paged.shared_bytes - contiguous.shared_bytes < 1024


@MOST_ARCHITECTURES
@pytest.mark.parametrize("shape", OTHER_DECODE, ids=str)
def test_decode_fits_its_budget(shape: Shape, capability: int) -> None:
    _assert_decode_budget(_decode(shape, capability))


@pytest.mark.parametrize(("shape", "num_tokens", "capability"), _everywhere(PREFILL))
def test_prefill_uses_tensor_cores_without_spills(shape: Shape, num_tokens: int, capability: int) -> None:
    cubin = _prefill(shape, capability, num_tokens)
    assert cubin.num_spills == 0
    half_precision = shape[0] != float32
    many = half_precision and num_tokens == 256  # rows enough for the instructions of a warp group
    assert (cubin.count(r"(HG?MMA\..*|UTCHMMA.*)") > 0) == half_precision
    assert (cubin.count(r"HGMMA\..*") > 0) == (many and capability == 90)
    assert (cubin.count(r"UTCHMMA.*") > 0) == (many and capability == 100)
    if half_precision and num_tokens == 256:
        assert cubin.count(r"LDG\..*\.128") > 0, "the query"
        assert cubin.count(r"LDGSTS\..*\.128") > 0, "K and V"


@pytest.mark.slow
@ARCHITECTURES
@pytest.mark.parametrize("shape", ALL_SHAPES, ids=str)
def test_every_shape_compiles_within_budget(shape: Shape, capability: int) -> None:
    _assert_decode_budget(_decode(shape, capability))
    for num_tokens in (256, 2):
        assert _prefill(shape, capability, num_tokens).num_spills == 0


@MOST_ARCHITECTURES
def test_combining_most_splits_does_not_spill(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "num_processors", lambda device: 132)
    decode, combine = _attention((half, 8, 1, 256, 16, 0, 0.0)).decode_launches()
    assert decode.grid[2] == triton_attention.MAX_SPLITS
    assert compile_cubin(combine, capability).num_spills == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_loading_says_what_is_missing() -> None:
    with pytest.raises(kernels.KernelsUnavailable, match="no CUDA device"):
        kernels.load("triton")


def _store_launch() -> Launch:
    key, value = torch.empty(2, 12, 80, dtype=half)[:, 4:].split(4, dim=1)
    cache = torch.empty(64, 4, 80, dtype=half)
    return store_launch(key, value, cache, cache, torch.zeros(2, dtype=torch.int64))


def _copy_launch() -> Launch:
    kv = torch.empty(2, 2, 64, 8, 128, dtype=bfloat16)
    return copy_launch(kv, kv, *torch.zeros(2, 16, dtype=torch.int64))


@MOST_ARCHITECTURES
@pytest.mark.parametrize("launch", [_store_launch(), _copy_launch()], ids=["store", "copy"])
def test_data_moves_16_bytes_at_a_time(launch: Launch, capability: int) -> None:
    cubin = compile_cubin(launch, capability)
    assert cubin.num_spills == 0
    assert cubin.count(r"LDG\..*\.128") == cubin.count(r"STG\..*\.128") > 0
    assert cubin.count(r"STG\..*") == cubin.count(r"STG\..*\.128")


def _slow_after(count: int, cases: list) -> list:
    """AMD's compiler takes seconds: the first few cases for the quick suite, the others for the slow one."""
    marks = [pytest.mark.slow if i >= count else () for i in range(len(cases))]
    values = [case if isinstance(case[0], tuple) else (case,) for case in cases]
    return [pytest.param(*value, marks=mark, id=str(value)) for value, mark in zip(values, marks, strict=True)]


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "AMD", True)


@pytest.mark.parametrize("shape", _slow_after(2, [*HALF_DECODE, *OTHER_DECODE]))
def test_decode_fits_an_amd_unit(shape: Shape, amd: None) -> None:
    gcn = compile_gcn(_attention(shape).decode_launches()[0])
    assert gcn.num_spills == 0
    assert gcn.registers <= GCN_REGISTER_BUDGET
    assert gcn.shared_bytes <= GCN_DECODE_SHARED_BYTES
    assert gcn.count(r"v_mfma_\w+") > 0
    if shape in HALF_DECODE:
        # Two tiles of K and V, 16 KiB each, 16 bytes at a time by 256 threads; narrower: at most the query.
        assert gcn.count(GCN_WIDE_LOADS) >= 2 * 2 * 16 * 1024 // (16 * 256)
        assert gcn.count(r"(buffer|global)_load_dwordx2") <= 1
        assert gcn.count(r"(buffer|global)_load_u?short\w*") == 0


@pytest.mark.parametrize(("shape", "num_tokens"), _slow_after(1, PREFILL))
def test_prefill_fits_an_amd_unit(shape: Shape, num_tokens: int, amd: None) -> None:
    starts = torch.zeros(3, dtype=torch.int32)
    gcn = compile_gcn(_attention(shape, num_tokens).prefill_launch(starts))
    assert gcn.num_spills == 0
    assert gcn.registers <= GCN_REGISTER_BUDGET
    assert gcn.shared_bytes <= GCN_PREFILL_SHARED_BYTES
    assert gcn.count(r"v_mfma_\w+") > 0
    if shape[3] >= 64:
        assert gcn.count(GCN_WIDE_LOADS) > 0
    else:  # a tile of 64 heads of 8 elements: 4 bytes for each of 256 threads
        assert gcn.count(r"(buffer|global)_load_dword") > gcn.count(r"(buffer|global)_load_u?short\w*")


@pytest.mark.parametrize("launch", [_store_launch(), _copy_launch()], ids=["store", "copy"])
def test_data_moves_on_an_amd_unit(launch: Launch) -> None:
    gcn = compile_gcn(launch)
    assert gcn.num_spills == 0
    wide = r"(buffer|global)_store_dwordx[24]"
    assert gcn.count(wide) == gcn.count(r"(buffer|global)_store_\w+") > 0


def test_counts_see_narrower_loads(amd: None) -> None:
    """Caches at addresses that are no multiple of 16 bytes cannot be read 16 bytes at a time."""
    decode = _attention(HALF_DECODE[1]).decode_launches()[0]
    caches = torch.empty(2, 64 * 8 * 128 + 1, dtype=half)[:, 1:].unflatten(1, (64, 8, 128))
    misplaced = {"key_cache": caches[0], "value_cache": caches[1]}
    narrow = replace(decode, arguments={**decode.arguments, **misplaced})
    assert compile_cubin(narrow, 80).count(r"LDGSTS\..*\.128") == 0
    gcn = compile_gcn(narrow)
    assert gcn.count(GCN_WIDE_LOADS) <= 1  # the query
