"""The CPU attention kernel: work list, loops and merge.

Work is cut into *pieces*: some neighbouring queries of one sequence over a span of its tokens. A piece
leaves unnormalised results, which the merge combines. How a sequence is cut depends on that sequence
only, so results depend neither on the batch nor on the number of threads.
"""

import functools
import zlib
from pathlib import Path

import numpy as np
from numba import carray, cfunc, from_dtype, njit, types

from kernels import cpu_vectors
from kernels.cpu_vectors import (
    ITEM_BYTES,
    STEP,
    TILE,
    fetch_add,
    float32_pointer,
    int32_pointer,
    int64_pointer,
    score_step,
    softmax_step,
    value_step,
)

SPAN = 512  # tokens per piece of a sequence with few queries
QUERY_BLOCK = 16  # queries per piece

# Columns of a piece.
SEQUENCE, QUERY, NUM_QUERIES, POSITION, START, STOP, PARTIAL = range(7)
PIECE_COLUMNS = 7

# What the kernel and the merge are given. Fields without a remark are addresses of contiguous arrays.
ARGUMENTS = np.dtype(
    [
        ("query", np.int64),  # float32 [num_tokens, num_query_heads, head_dim], scaled
        ("key", np.int64),  # [num_slots, num_kv_heads, head_dim]
        ("value", np.int64),
        ("tables", np.int64),  # int32 [num_sequences, table_width], or int64 [num_sequences] base slots
        ("output", np.int64),  # float32 [num_tokens, num_query_heads, head_dim]
        ("pieces", np.int64),  # int64 [num_pieces, PIECE_COLUMNS]
        ("partial", np.int64),  # float32 [num_partials, num_query_heads, head_dim]: weighted values
        ("state", np.int64),  # float32 [num_partials, num_kv_heads, 2, group]: maximum and sum
        ("counter", np.int64),  # int64: the next piece to take
        ("num_pieces", np.int64),  # count, as are the following
        ("table_width", np.int64),
        ("block_size", np.int64),  # 0: contiguous
        ("num_slots", np.int64),
        ("num_kv_heads", np.int64),
        ("window", np.int64),  # tokens, 0: all
        ("invalid", np.int64),  # out: set when an address form names a slot outside the pool
        ("softcap", np.float32),  # in base-2 units
    ],
    align=True,
)
_ENTRY = types.void(types.CPointer(from_dtype(ARGUMENTS)))
_SOURCE = zlib.crc32(Path(cpu_vectors.__file__).read_bytes())


@njit(cache=True)
def plan(query_starts, lengths, window):
    """Pieces, int64 ``[num_pieces, PIECE_COLUMNS]``; those that share queries are neighbours."""
    most = 0
    for i in range(lengths.size):
        num_queries = query_starts[i + 1] - query_starts[i]
        if num_queries < 0:
            raise ValueError("query_starts must not decrease")
        most += num_queries // QUERY_BLOCK + lengths[i] // SPAN + 2
    pieces = np.empty((most, PIECE_COLUMNS), np.int64)
    count = 0
    num_partials = 0
    for i in range(lengths.size):
        num_queries = query_starts[i + 1] - query_starts[i]
        for first in range(0, num_queries, QUERY_BLOCK):
            block = min(QUERY_BLOCK, num_queries - first)
            position = lengths[i] - num_queries + first
            start = max(0, position - window + 1) if window > 0 else 0
            stop = max(start, position + block)
            span = SPAN if num_queries <= QUERY_BLOCK else stop
            while True:
                until = min(start + span, stop)
                pieces[count] = (i, query_starts[i] + first, block, position, start, until, num_partials)
                count += 1
                num_partials += block
                start = until
                if start == stop:
                    break
    return pieces[:count]


@njit
def _fill_rows(rows, work, sequence, start, stop, row_bytes):
    """Byte offsets of the tokens from ``start``, one tile; beyond ``stop`` the last one repeats."""
    last = min(start + TILE, stop) - start
    if work.block_size == 0:
        slot = int64_pointer(work.tables)[sequence] + start
        if slot < 0 or slot + last > work.num_slots:
            work.invalid = 1
            slot = 0
            row_bytes = 0
        for t in range(TILE):
            rows[t] = (slot + min(t, last - 1)) * row_bytes
        return
    table = int32_pointer(work.tables + sequence * work.table_width * 4)
    index = start // work.block_size
    offset = start - index * work.block_size
    first_slot = _first_slot(table, index, work)
    for t in range(last):
        if offset == work.block_size:
            offset = 0
            index += 1
            first_slot = _first_slot(table, index, work)
        rows[t] = (first_slot + offset) * row_bytes
        offset += 1
    for t in range(last, TILE):
        rows[t] = rows[last - 1]


@njit
def _first_slot(table, index, work):
    if index < work.table_width:
        slot = table[index] * work.block_size
        if 0 <= slot and slot + work.block_size <= work.num_slots:
            return slot
    work.invalid = 1
    return 0


@functools.cache
def attention(head_dim: int, group: int, kind: int, capped: bool):
    """Kernel for one head shape, kind of cache element, and use of the softcap: a numba cfunc.

    Per tile and KV head: scores of the head group, online softmax, weighted values, with the rows of
    the next head (or of the next tile's first head) prefetched meanwhile, so that memory never waits.
    """
    source = _SOURCE
    capped = int(capped)

    @cfunc(_ENTRY, nopython=True, cache=True)
    def attend(arguments):
        _ = source  # a cell of this closure, thus in numba's cache key, which covers this file only
        work = carray(arguments, (1,))[0]
        row_bytes = work.num_kv_heads * head_dim * ITEM_BYTES[kind]
        head_bytes = head_dim * ITEM_BYTES[kind]
        head_floats = group * head_dim * 4
        row_buffers = np.empty((2, TILE), np.int64)
        scores = np.empty(group * TILE, np.float32)
        rescale = np.empty(group, np.float32)
        scores_at, rescale_at = scores.ctypes.data, rescale.ctypes.data
        while True:
            taken = fetch_add(work.counter, 1)
            if taken >= work.num_pieces:
                return
            piece = int64_pointer(work.pieces + taken * PIECE_COLUMNS * 8)
            start, stop = piece[START], piece[STOP]
            num_queries, position = piece[NUM_QUERIES], piece[POSITION]
            queries = work.query + piece[QUERY] * work.num_kv_heads * head_floats
            partials = work.partial + piece[PARTIAL] * work.num_kv_heads * head_floats
            states = work.state + piece[PARTIAL] * work.num_kv_heads * group * 8
            _clear(partials, states, num_queries * work.num_kv_heads, group, head_dim)
            if start < stop:
                _fill_rows(row_buffers[0], work, piece[SEQUENCE], start, stop, row_bytes)
            for tile in range(start, stop, TILE):
                parity = ((tile - start) // TILE) % 2
                rows = row_buffers[parity].ctypes.data
                next_rows = rows
                if tile + TILE < stop:
                    next_rows = row_buffers[1 - parity].ctypes.data
                    _fill_rows(row_buffers[1 - parity], work, piece[SEQUENCE], tile + TILE, stop, row_bytes)
                for head in range(work.num_kv_heads):
                    key, value = work.key + head * head_bytes, work.value + head * head_bytes
                    next_key, next_value, ahead = key + head_bytes, value + head_bytes, rows
                    if head + 1 == work.num_kv_heads:
                        next_key, next_value, ahead = work.key, work.value, next_rows
                    for j in range(num_queries):
                        seen = position + j + 1 - tile
                        low = max(0, seen - work.window) if work.window > 0 else 0
                        high = min(seen, TILE, stop - tile)
                        if high <= low:
                            continue
                        lane = j * work.num_kv_heads + head
                        for t in range(0, high, STEP):
                            score_step(
                                queries + lane * head_floats,
                                key,
                                rows + t * 8,
                                next_key,
                                ahead + t * 8,
                                scores_at + t * 4,
                                head_dim,
                                group,
                                kind,
                            )
                        state = states + lane * group * 8
                        softmax_step(scores_at, low, high, work.softcap, state, rescale_at, group, capped)
                        value_step(
                            scores_at,
                            value,
                            rows,
                            next_value,
                            ahead,
                            low,
                            high,
                            rescale_at,
                            partials + lane * head_floats,
                            head_dim,
                            group,
                            kind,
                        )

    return attend


@njit
def _clear(partials, states, num_lanes, group, head_dim):
    values, state = float32_pointer(partials), float32_pointer(states)
    for i in range(num_lanes * group * head_dim):
        values[i] = 0
    for lane in range(num_lanes):
        for g in range(group):
            state[lane * 2 * group + g] = -np.inf
            state[lane * 2 * group + group + g] = 0


@functools.cache
def merge(head_dim: int, group: int):
    """Combine the pieces of each query into ``output``: a numba cfunc."""

    @cfunc(_ENTRY, nopython=True, cache=True)
    def combine(arguments):
        work = carray(arguments, (1,))[0]
        pieces = carray(int64_pointer(work.pieces), (work.num_pieces, PIECE_COLUMNS))
        num_heads = work.num_kv_heads * group
        while True:
            first = fetch_add(work.counter, 1)
            if first >= work.num_pieces:
                return
            if first > 0 and pieces[first - 1, QUERY] == pieces[first, QUERY]:
                continue
            last = first + 1
            while last < work.num_pieces and pieces[last, QUERY] == pieces[first, QUERY]:
                last += 1
            for j in range(pieces[first, NUM_QUERIES]):
                for head in range(num_heads):
                    _combine_head(work, pieces[first:last], j, head, num_heads, head_dim, group)

    return combine


@njit
def _combine_head(work, pieces, j, head, num_heads, head_dim, group):
    state, partial = float32_pointer(work.state), float32_pointer(work.partial)
    output = float32_pointer(work.output + ((pieces[0, QUERY] + j) * num_heads + head) * head_dim * 4)
    maximum_of_head = head // group * 2 * group + head % group
    maximum = np.float32(-np.inf)
    for i in range(len(pieces)):
        maximum = max(maximum, state[(pieces[i, PARTIAL] + j) * 2 * num_heads + maximum_of_head])
    total = np.float32(0)
    for d in range(head_dim):
        output[d] = 0
    if maximum == -np.inf:
        return
    for i in range(len(pieces)):
        row = pieces[i, PARTIAL] + j
        at = row * 2 * num_heads + maximum_of_head
        factor = np.exp2(state[at] - maximum)
        total += factor * state[at + group]
        for d in range(head_dim):
            output[d] += factor * partial[(row * num_heads + head) * head_dim + d]
    for d in range(head_dim):
        output[d] /= total
