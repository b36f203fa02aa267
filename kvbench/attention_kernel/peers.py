"""Other people's paged attention on CUDA, each where it is installed and accepts the problem."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kvbench.attention_kernel.candidates import Candidate
from kvbench.attention_kernel.problem import Problem

FLEX_BLOCK_SIZE = 128  # FlexAttention's own; it compiles for minutes, and most sizes below it fail
_WORKSPACE_BYTES = 128 * 2**20  # as FlashInfer asks


def paged_peers(block_sizes: list[int]) -> dict[str, Callable[[Problem], Candidate]]:
    """Functions that build the peers, by name. They raise whatever stands in the way."""
    peers: dict[str, Callable[[Problem], Candidate]] = {}
    if FLEX_BLOCK_SIZE in block_sizes:
        peers["flex"] = functools.partial(flex_candidate, attend=_compiled_flex())
    for size in block_sizes:
        peers[f"flashinfer {size}"] = functools.partial(flashinfer_candidate, size)
    return peers


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


def flex_candidate(problem: Problem, attend: Callable[..., Tensor]) -> Candidate:
    """FlexAttention over the pool as one long sequence, of which each query sees the blocks of its table."""
    tables = problem.block_tables(FLEX_BLOCK_SIZE)
    num_blocks = tables.tables.numel()
    mask = _block_mask(problem, tables.tables, num_blocks)
    query = problem.query[:, :, None]

    def run(key_cache: Tensor, value_cache: Tensor) -> Tensor:
        key, value = (cache.transpose(0, 1)[None] for cache in (key_cache, value_cache))
        return attend(query, key, value, block_mask=mask, enable_gqa=True)[:, :, 0]

    return Candidate("flex", FLEX_BLOCK_SIZE, num_blocks * FLEX_BLOCK_SIZE, run, tables)


def _block_mask(problem: Problem, tables: Tensor, num_blocks: int) -> BlockMask:
    sequences, columns = torch.meshgrid(*(torch.arange(n, device=tables.device) for n in tables.shape), indexing="ij")
    owner, first_token = torch.empty(2, num_blocks, dtype=torch.int64, device=tables.device)
    owner[tables.long()] = sequences
    first_token[tables.long()] = columns * FLEX_BLOCK_SIZE

    def visible(batch: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        block = slot // FLEX_BLOCK_SIZE
        return (owner[block] == batch) & (first_token[block] + slot % FLEX_BLOCK_SIZE < problem.context)

    num_full = problem.context // FLEX_BLOCK_SIZE
    indices = torch.zeros(problem.batch, 1, 1, num_blocks, dtype=torch.int32, device=tables.device)
    indices[:, 0, 0, : tables.shape[1]] = tables
    partial = torch.full((problem.batch, 1, 1), tables.shape[1] - num_full, dtype=torch.int32, device=tables.device)
    return BlockMask.from_kv_blocks(
        partial,
        indices.roll(-num_full, dims=3),
        torch.full_like(partial, num_full),
        indices,
        BLOCK_SIZE=(FLEX_BLOCK_SIZE, FLEX_BLOCK_SIZE),
        mask_mod=visible,
        seq_lengths=(1, num_blocks * FLEX_BLOCK_SIZE),
    )


def flashinfer_candidate(block_size: int, problem: Problem) -> Candidate:
    """FlashInfer's batch decode, planned beforehand."""
    flashinfer: Any = importlib.import_module("flashinfer")
    tables, device = problem.block_tables(block_size), problem.query.device
    blocks_each = tables.tables.shape[1]
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    group = problem.query.shape[1] // problem.num_kv_heads
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=group >= 4)
    wrapper.plan(
        torch.arange(problem.batch + 1, dtype=torch.int32, device=device) * blocks_each,
        tables.tables.flatten(),
        torch.full_like(problem.lengths, problem.context - (blocks_each - 1) * block_size),
        problem.query.shape[1],
        problem.num_kv_heads,
        problem.head_dim,
        block_size,
        q_data_type=problem.query.dtype,
        kv_data_type=problem.query.dtype,
    )

    def run(key_cache: Tensor, value_cache: Tensor) -> Tensor:
        pages = tuple(cache.view(-1, block_size, *cache.shape[1:]) for cache in (key_cache, value_cache))
        return wrapper.run(problem.query, pages)

    return Candidate("flashinfer", block_size, tables.tables.numel() * block_size, run, tables)
