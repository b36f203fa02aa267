"""How attention on the CPU is cut up, and what its kernel is given.

Work is cut into *pieces*: some neighbouring queries of one sequence over a span of its tokens. How a
sequence is cut depends on that sequence only, so results depend neither on the batch nor on threads.
"""

import math
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from kernels.addressing import BaseSlots, BlockTables

LOG2_E = 1 / math.log(2)
SPAN = 512  # tokens per piece of a sequence with few queries
QUERY_BLOCK = 16  # queries per piece

# Columns of a piece. The pieces of one query block are neighbours: FIRST is the index of the first of
# them and COUNT their number, of which UNFINISHED (kept in the first one) are still being computed.
SEQUENCE, QUERY, NUM_QUERIES, POSITION, START, STOP, PARTIAL, FIRST, COUNT, UNFINISHED = range(10)
COLUMNS = 10


# What the kernel is given. Fields without a remark are addresses of contiguous arrays.
ARGUMENTS = np.dtype(
    [
        ("query", np.int64),  # float32 [num_tokens, num_query_heads, head_dim]
        ("key", np.int64),  # [num_slots, num_kv_heads, head_dim]
        ("value", np.int64),
        ("tables", np.int64),  # int32 [num_sequences, table_width], or int64 [num_sequences] base slots
        ("output", np.int64),  # float32 [num_tokens, num_query_heads, head_dim]
        ("pieces", np.int64),  # int64 [num_pieces, COLUMNS]
        ("partial", np.int64),  # float32 [num_partials, num_query_heads, head_dim]: weighted values
        ("state", np.int64),  # float32 [num_partials, num_kv_heads, 2, group]: maximum and sum
        ("table_width", np.int64),  # a number, as are all that follow
        ("block_size", np.int64),  # 0: contiguous
        ("num_slots", np.int64),
        ("num_kv_heads", np.int64),
        ("window", np.int64),  # tokens, 0: all
        ("scale", np.float32),  # of scores, to base-2 units or, with a softcap, to units of it
        ("softcap", np.float32),  # in base-2 units
        ("invalid", np.int64),  # out: set when `tables` names a slot outside the pool
    ]
)


def describe(
    arguments: NDArray,
    where: BlockTables | BaseSlots,
    query_starts: NDArray,
    lengths: Tensor,
    window: int,
    num_query_heads: int,
    head_dim: int,
) -> tuple[int, Any]:
    """Write into ARGUMENTS ``[...]`` where sequences' KV is and how their attention is cut up.

    Returns the number of pieces, and the memory that must live as long as the arguments are used.
    """
    pieces = plan(query_starts, lengths.numpy(), window)
    num_heads = num_query_heads * (int(pieces[-1, PARTIAL] + pieces[-1, NUM_QUERIES]) if len(pieces) else 0)
    partial, state = torch.empty(num_heads * head_dim), torch.empty(num_heads * 2)
    table, width, block_size = address_form(where)
    arguments["tables"], arguments["table_width"], arguments["block_size"] = table.data_ptr(), width, block_size
    arguments["pieces"], arguments["window"] = pieces.ctypes.data, window
    arguments["partial"], arguments["state"] = partial.data_ptr(), state.data_ptr()
    arguments["invalid"] = 0
    return len(pieces), (pieces, partial, state, table)


def address_form(where: BlockTables | BaseSlots) -> tuple[Tensor, int, int]:
    """Table of addresses, its width, block size (0: contiguous)."""
    if isinstance(where, BlockTables):
        return where.tables, where.tables.shape[1], where.block_size
    return where.bases, 0, 0


@njit(cache=True)
def plan(query_starts, lengths, window):
    """Pieces for int32 ``query_starts`` and ``lengths``: int64 ``[num_pieces, COLUMNS]``."""
    most = 0
    for i in range(lengths.size):
        num_queries = query_starts[i + 1] - query_starts[i]
        if num_queries < 0:
            raise ValueError("query_starts must not decrease")
        if 0 < lengths[i] < num_queries:
            raise ValueError("lengths must count the new tokens")
        most += num_queries // QUERY_BLOCK + lengths[i] // SPAN + 2
    pieces = np.empty((most, COLUMNS), np.int64)
    count = 0
    num_partials = 0
    for i in range(lengths.size):
        num_queries = query_starts[i + 1] - query_starts[i]
        for first in range(0, num_queries, QUERY_BLOCK):
            block = min(QUERY_BLOCK, num_queries - first)
            position = lengths[i] - num_queries + first
            start = max(0, position - window + 1) if window > 0 else 0
            stop = max(start, position + block)
            span = SPAN if num_queries <= QUERY_BLOCK else max(1, stop - start)
            parts = max(1, (stop - start + span - 1) // span)
            for part in range(parts):
                piece = pieces[count + part]
                piece[SEQUENCE] = i
                piece[QUERY] = query_starts[i] + first
                piece[NUM_QUERIES] = block
                piece[POSITION] = position
                piece[START] = start + part * span
                piece[STOP] = min(start + (part + 1) * span, stop)
                piece[PARTIAL] = num_partials + part * block
                piece[FIRST] = count
                piece[COUNT] = parts
                piece[UNFINISHED] = parts
            count += parts
            num_partials += parts * block
    return pieces[:count]
