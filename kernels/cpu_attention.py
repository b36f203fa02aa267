"""The CPU attention kernel: work list, loops and merge.

Work is cut into *pieces*: some neighbouring queries of one sequence over a span of its tokens. A piece
leaves unnormalised results, and whoever finishes the last piece of a query block merges them. How a
sequence is cut depends on that sequence only, so results depend neither on the batch nor on threads.
"""

import ctypes
import functools
import zlib
from pathlib import Path

import numpy as np
from numba import carray, cfunc, from_dtype, njit, types

from kernels import cpu_steps, cpu_vectors
from kernels.cpu_steps import (
    STEP,
    TILE,
    fetch_add,
    float32_pointer,
    int32_pointer,
    int64_pointer,
    prefetch,
    score_step,
    softmax_step,
    value_step,
)
from kernels.cpu_vectors import ITEM_BYTES

SPAN = 512  # tokens per piece of a sequence with few queries
QUERY_BLOCK = 16  # queries per piece
TOUCH = 2  # rows of the next tile between early prefetches

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


_ENTRY = types.void(types.CPointer(from_dtype(np.dtype(Arguments))))
_SOURCES = zlib.crc32(b"".join(Path(module.__file__).read_bytes() for module in (cpu_steps, cpu_vectors)))


@njit(cache=True)
def plan(query_starts, lengths, window):
    """Pieces for int32 ``query_starts`` and ``lengths``: int64 ``[num_pieces, COLUMNS]``."""
    most = 0
    for i in range(lengths.size):
        num_queries = query_starts[i + 1] - query_starts[i]
        if num_queries < 0:
            raise ValueError("query_starts must not decrease")
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


@functools.cache
def kernel(head_dim: int, group: int, kind: int, capped: int):
    """Attention for one head shape, kind of cache element, and use of the softcap: a numba cfunc.

    Per tile and KV head: scores of the head group, online softmax, weighted values, with the rows of
    the next head (or of the next tile's first head) prefetched meanwhile, so that memory never waits.
    """
    sources = _SOURCES

    @cfunc(_ENTRY, nopython=True, cache=True)
    def attend(arguments):
        _ = sources  # a cell of this closure, thus in numba's cache key, which covers this file only
        work = carray(arguments, (1,))[0]
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
            piece = int64_pointer(work.pieces + taken * COLUMNS * 8)
            start, stop = piece[START], piece[STOP]
            queries = work.query + piece[QUERY] * work.num_kv_heads * head_floats
            partials = work.partial + piece[PARTIAL] * work.num_kv_heads * head_floats
            states = work.state + piece[PARTIAL] * work.num_kv_heads * group * 8
            _clear(partials, states, piece[NUM_QUERIES] * work.num_kv_heads, group, head_dim)
            if start < stop:
                _fill_rows(row_buffers[0], work, piece[SEQUENCE], start, stop, head_bytes)
            for tile in range(start, stop, TILE):
                parity = ((tile - start) // TILE) % 2
                rows = row_buffers[parity].ctypes.data
                next_rows = rows
                if tile + TILE < stop:
                    next_rows = row_buffers[1 - parity].ctypes.data
                    _fill_rows(row_buffers[1 - parity], work, piece[SEQUENCE], tile + TILE, stop, head_bytes)
                    for t in range(0, TILE, TOUCH):
                        prefetch(work.key + row_buffers[1 - parity, t])
                        prefetch(work.value + row_buffers[1 - parity, t])
                for head in range(work.num_kv_heads):
                    key, value = work.key + head * head_bytes, work.value + head * head_bytes
                    next_key, next_value, ahead = key + head_bytes, value + head_bytes, rows
                    if head + 1 == work.num_kv_heads:
                        next_key, next_value, ahead = work.key, work.value, next_rows
                    for j in range(piece[NUM_QUERIES]):
                        seen = piece[POSITION] + j + 1 - tile
                        low = max(0, seen - work.window) if work.window > 0 else 0
                        high = min(seen, TILE, stop - tile)
                        if high <= low:
                            continue
                        lane = j * work.num_kv_heads + head
                        query = queries + lane * head_floats
                        for t in range(0, high, STEP):
                            at = scores_at + t * 4
                            score_step(
                                query, key, rows + t * 8, next_key, ahead + t * 8, at, head_dim, group, kind
                            )
                        state = states + lane * group * 8
                        softmax_step(
                            scores_at,
                            low,
                            high,
                            work.scale,
                            work.softcap,
                            state,
                            rescale_at,
                            group,
                            capped,
                        )
                        output = partials + lane * head_floats
                        value_step(
                            scores_at,
                            value,
                            rows,
                            next_value,
                            ahead,
                            low,
                            high,
                            rescale_at,
                            output,
                            head_dim,
                            group,
                            kind,
                        )
            first = work.pieces + piece[FIRST] * COLUMNS * 8
            if fetch_add(first + UNFINISHED * 8, -1) == 1:
                _merge(work, int64_pointer(first), head_dim, group)

    return attend


@njit
def _fill_rows(rows, work, sequence, start, stop, head_bytes):
    """Byte offsets of one tile of tokens from ``start``; from ``stop`` on, the last one repeats."""
    row_bytes = work.num_kv_heads * head_bytes
    count = min(TILE, stop - start)
    if work.block_size == 0:
        slot = int64_pointer(work.tables)[sequence] + start
        if slot < 0 or slot + count > work.num_slots:
            work.invalid = 1
            row_bytes = 0
        for t in range(TILE):
            rows[t] = (slot + min(t, count - 1)) * row_bytes
        return
    table = int32_pointer(work.tables + sequence * work.table_width * 4)
    index = start // work.block_size
    offset = start - index * work.block_size
    first_slot = _first_slot(table, index, work)
    for t in range(count):
        if offset == work.block_size:
            offset = 0
            index += 1
            first_slot = _first_slot(table, index, work)
        rows[t] = (first_slot + offset) * row_bytes
        offset += 1
    for t in range(count, TILE):
        rows[t] = rows[count - 1]


@njit
def _first_slot(table, index, work):
    if index < work.table_width:
        slot = table[index] * work.block_size
        if slot >= 0 and slot + work.block_size <= work.num_slots:
            return slot
    work.invalid = 1
    return 0


@njit
def _clear(partials, states, num_lanes, group, head_dim):
    values, state = float32_pointer(partials), float32_pointer(states)
    for i in range(num_lanes * group * head_dim):
        values[i] = 0
    for lane in range(num_lanes):
        for g in range(group):
            state[lane * 2 * group + g] = -np.inf
            state[lane * 2 * group + group + g] = 0


@njit
def _merge(work, first, head_dim, group):
    """Combine the pieces of a query block into ``output``."""
    num_heads = work.num_kv_heads * group
    for j in range(first[NUM_QUERIES]):
        for head in range(num_heads):
            output = work.output + ((first[QUERY] + j) * num_heads + head) * head_dim * 4
            state = head // group * 2 * group + head % group
            _merge_head(work, first, j, head, num_heads, state, output, head_dim, group)


@njit
def _merge_head(work, first, j, head, num_heads, state_offset, output_address, head_dim, group):
    state, partial = float32_pointer(work.state), float32_pointer(work.partial)
    output = float32_pointer(output_address)
    maximum = np.float32(-np.inf)
    for part in range(first[COUNT]):
        row = first[PARTIAL] + part * first[NUM_QUERIES] + j
        maximum = max(maximum, state[row * 2 * num_heads + state_offset])
    total = np.float32(0)
    for d in range(head_dim):
        output[d] = 0
    if maximum == -np.inf:
        return
    for part in range(first[COUNT]):
        row = first[PARTIAL] + part * first[NUM_QUERIES] + j
        at = row * 2 * num_heads + state_offset
        factor = np.exp2(state[at] - maximum)
        total += factor * state[at + group]
        for d in range(head_dim):
            output[d] += factor * partial[(row * num_heads + head) * head_dim + d]
    for d in range(head_dim):
        output[d] /= total
