"""How attention on the CPU is cut up, and what its kernel is given.

Work is cut into *pieces*: some neighbouring queries of one sequence over a span of its tokens. How a
sequence is cut depends on that sequence only, so results depend neither on the batch nor on threads.
"""

import ctypes

import numpy as np
from numba import njit

SPAN = 512  # tokens per piece of a sequence with few queries
QUERY_BLOCK = 16  # queries per piece

# Columns of a piece. The pieces of one query block are neighbours: FIRST is the index of the first of
# them and COUNT their number, of which UNFINISHED (kept in the first one) are still being computed.
SEQUENCE, QUERY, NUM_QUERIES, POSITION, START, STOP, PARTIAL, FIRST, COUNT, UNFINISHED = range(10)
COLUMNS = 10


class Arguments(ctypes.Structure):
    """What the kernel is given. Fields without a remark are addresses of contiguous arrays."""

    _fields_ = [
        ("query", ctypes.c_int64),  # float32 [num_tokens, num_query_heads, head_dim]
        ("key", ctypes.c_int64),  # [num_slots, num_kv_heads, head_dim]
        ("value", ctypes.c_int64),
        ("tables", ctypes.c_int64),  # int32 [num_sequences, table_width], or int64 [num_sequences] base slots
        ("output", ctypes.c_int64),  # float32 [num_tokens, num_query_heads, head_dim]
        ("pieces", ctypes.c_int64),  # int64 [num_pieces, COLUMNS]
        ("partial", ctypes.c_int64),  # float32 [num_partials, num_query_heads, head_dim]: weighted values
        ("state", ctypes.c_int64),  # float32 [num_partials, num_kv_heads, 2, group]: maximum and sum
        ("counter", ctypes.c_int64),  # int64: the field next_piece
        ("num_pieces", ctypes.c_int64),  # a number, as are all that follow
        ("table_width", ctypes.c_int64),
        ("block_size", ctypes.c_int64),  # 0: contiguous
        ("num_slots", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("window", ctypes.c_int64),  # tokens, 0: all
        ("scale", ctypes.c_float),  # of scores, to base-2 units or, with a softcap, to units of it
        ("softcap", ctypes.c_float),  # in base-2 units
        ("next_piece", ctypes.c_int64),
        ("invalid", ctypes.c_int64),  # out: set when `tables` names a slot outside the pool
    ]


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
