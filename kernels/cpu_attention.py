# mypy: disable-error-code="call-arg, var-annotated"
# (numba's decorators change signatures in ways that its stubs do not tell)
"""The CPU attention kernel: the loops over pieces, tiles and heads, and the merge of pieces.

A piece leaves unnormalised results, and whoever finishes the last piece of a query block merges them.
"""

import functools
import zlib
from pathlib import Path

import numpy as np
from numba import carray, cfunc, from_dtype, njit, types

from kernels import cpu_steps, cpu_vectors, cpu_work
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
from kernels.cpu_work import (
    ARGUMENTS,
    COLUMNS,
    COUNT,
    FIRST,
    NUM_QUERIES,
    PARTIAL,
    POSITION,
    QUERY,
    SEQUENCE,
    START,
    STOP,
    UNFINISHED,
)

_TOUCHED_ROWS = 2  # one row in so many of the next tile is asked for early

_ENTRY = types.void(types.CPointer(from_dtype(ARGUMENTS)), types.int64, types.int64)
_MODULES = (cpu_steps, cpu_vectors, cpu_work)
_SOURCES = zlib.crc32(b"".join(Path(str(module.__file__)).read_bytes() for module in _MODULES))


@functools.cache
def kernel(head_dim: int, group: int, kind: int, capped: int):
    """Attention for one head shape, kind of cache element, and use of the softcap: an operation's function.

    Its items are pieces.
    """
    sources = _SOURCES

    @cfunc(_ENTRY, cache=True)
    def attend(arguments, item, ahead):
        _ = sources  # a cell of this closure, thus in numba's cache key, which covers this file only
        work = carray(arguments, (1,))[0]
        rows = np.empty((2, TILE), np.int64)
        scores = np.empty(group * TILE, np.float32)
        rescale = np.empty(group, np.float32)
        piece = int64_pointer(work.pieces + item * COLUMNS * 8)
        _clear(work, piece, head_dim, group)
        _attend_piece(work, piece, rows, scores, rescale, head_dim, group, kind, capped)
        first = int64_pointer(work.pieces + piece[FIRST] * COLUMNS * 8)
        if fetch_add(work.pieces + (piece[FIRST] * COLUMNS + UNFINISHED) * 8, -1) == 1:
            _merge(work, first, head_dim, group)
            first[UNFINISHED] = first[COUNT]  # for the next layer, which has the same pieces

    return attend


# Inlined, so that head_dim, group, kind and capped reach the steps as the constants they are.


@njit(inline="always")
def _attend_piece(work, piece, rows, scores, rescale, head_dim, group, kind, capped):
    stop = piece[STOP]
    row_bytes = work.num_kv_heads * head_dim * ITEM_BYTES[kind]
    here, ahead = rows[0], rows[1]
    if piece[START] < stop:
        _fill_rows(here, work, piece[SEQUENCE], piece[START], stop, row_bytes)
    for tile in range(piece[START], stop, TILE):
        if tile + TILE < stop:
            _fill_rows(ahead, work, piece[SEQUENCE], tile + TILE, stop, row_bytes)
            for t in range(0, TILE, _TOUCHED_ROWS):
                prefetch(work.key + ahead[t])
                prefetch(work.value + ahead[t])
        else:
            ahead = here
        _attend_tile(work, piece, tile, here, ahead, scores, rescale, head_dim, group, kind, capped)
        here, ahead = ahead, here


@njit(inline="always")
def _attend_tile(work, piece, tile, here, ahead, scores, rescale, head_dim, group, kind, capped):
    """Per KV head: scores of the head group, online softmax, weighted values.

    The rows of the next head, or of the next tile's first head, are prefetched meanwhile: far enough
    ahead for memory never to wait, near enough for the rows to be still in the first level of cache.
    """
    num_kv_heads, group_bytes = work.num_kv_heads, group * head_dim * 4
    queries = work.query + piece[QUERY] * num_kv_heads * group_bytes
    partials = work.partial + piece[PARTIAL] * num_kv_heads * group_bytes
    states = work.state + piece[PARTIAL] * num_kv_heads * group * 8
    scores_at, rescale_at = scores.ctypes.data, rescale.ctypes.data
    rows, next_rows = here.ctypes.data, here.ctypes.data
    for head in range(num_kv_heads):
        offset = head * head_dim * ITEM_BYTES[kind]
        next_offset = offset + head_dim * ITEM_BYTES[kind]
        if head + 1 == num_kv_heads:
            next_offset, next_rows = 0, ahead.ctypes.data
        key, next_key = work.key + offset, work.key + next_offset
        value, next_value = work.value + offset, work.value + next_offset
        for j in range(piece[NUM_QUERIES]):
            seen = piece[POSITION] + j + 1 - tile  # tokens of the tile up to the query's own
            low = max(0, seen - work.window) if work.window > 0 else 0
            high = min(seen, TILE, piece[STOP] - tile)
            if high <= low:
                continue
            lane = j * num_kv_heads + head
            query, output = queries + lane * group_bytes, partials + lane * group_bytes
            for t in range(0, high, STEP):
                here_at, ahead_at, at = rows + t * 8, next_rows + t * 8, scores_at + t * 4
                score_step(query, key, here_at, next_key, ahead_at, at, head_dim, group, kind)
            state = states + lane * group * 8
            softmax_step(scores_at, low, high, work.scale, work.softcap, state, rescale_at, group, capped)
            value_step(
                scores_at,
                value,
                rows,
                next_value,
                next_rows,
                low,
                high,
                rescale_at,
                output,
                head_dim,
                group,
                kind,
            )


@njit
def _fill_rows(rows, work, sequence, start, stop, row_bytes):
    """Byte offsets of one tile of tokens from ``start``; from ``stop`` on, the last one repeats.

    The only difference between paged and contiguous. An invalid address reads slot 0 instead.
    """
    count = min(TILE, stop - start)
    if work.block_size == 0:
        slot = int64_pointer(work.tables)[sequence] + start
        if slot < 0 or slot + count > work.num_slots:
            work.invalid = 1
            slot = row_bytes = 0
        _fill_run(rows, slot, count, row_bytes)
        return
    table = int32_pointer(work.tables + sequence * work.table_width * 4)
    index = start // work.block_size
    offset = start - index * work.block_size
    first_slot = _first_slot(table, index, work)
    if offset + count <= work.block_size:
        _fill_run(rows, first_slot + offset, count, row_bytes)
        return
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
def _fill_run(rows, slot, count, row_bytes):
    for t in range(TILE):
        rows[t] = (slot + min(t, count - 1)) * row_bytes


@njit
def _first_slot(table, index, work):
    if index < work.table_width:
        slot = table[index] * work.block_size
        if slot >= 0 and slot + work.block_size <= work.num_slots:
            return slot
    work.invalid = 1
    return 0


@njit
def _clear(work, piece, head_dim, group):
    num_heads = work.num_kv_heads * group
    partial = float32_pointer(work.partial + piece[PARTIAL] * num_heads * head_dim * 4)
    for i in range(piece[NUM_QUERIES] * num_heads * head_dim):
        partial[i] = 0
    state = float32_pointer(work.state + piece[PARTIAL] * num_heads * 8)
    for i in range(piece[NUM_QUERIES] * num_heads * 2):
        state[i] = 0 if i // group % 2 else -np.inf


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
