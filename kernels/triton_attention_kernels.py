"""Decode and prefill attention over the pool: the device code.

Both kernels walk a range of a sequence's positions in tiles with an online softmax
(:func:`_attend_range`). Paged and contiguous reading differ only in :func:`_token_slots`, so the ratio
of their times measures paging and nothing else. Softmax is in base 2, sums are in float32.
"""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
# Below every score, yet finite: the difference of two of them is 0, not NaN.
LOWEST = tl.constexpr(-1e38)


@triton.jit
def _token_slots(where, tile, positions, named, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Slots, int64, of a tile of positions. where: the sequence's block table (base slot: BLOCK_SIZE 0)."""
    if BLOCK_SIZE == 0:
        slots = tl.load(where) + positions
    elif BLOCK_SIZE % TILE == 0:  # the tile lies in one block
        slots = tl.load(where + tile // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    else:
        blocks = tl.load(where + positions // BLOCK_SIZE, mask=named, other=0)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    return slots


@triton.jit
def _tanh(x):
    """tanh to float32 accuracy, near 0 by its series: ``exp`` alone would lose the small scores."""
    x2 = x * x
    series = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
    decay = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    tail = (1 - decay) / (1 + decay)
    return tl.where(x2 < 0.0625, series, tl.where(x < 0, -tail, tail))


@triton.jit
def _attend_range(
    query,
    query_positions,
    first,
    stop,
    key_cache,
    value_cache,
    where,
    score_scale,
    SLOT_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Attention of query rows over the positions ``first <= j < stop`` of their sequence.

    query: ``[rows, DIMS]``; query_positions: ``[rows]``; caches: pointers to slot 0 of the KV head.
    Returns the sums of exponentials times values ``[rows, DIMS]``, the largest scores ``[rows]`` and
    the sums of exponentials relative to them ``[rows]``.
    """
    ROWS: tl.constexpr = query.shape[0]
    dims = tl.arange(0, DIMS)
    value_sums = tl.zeros([ROWS, DIMS], tl.float32)
    row_max = tl.full([ROWS], LOWEST, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for tile in range(first // TILE * TILE, stop, TILE):
        positions = tile + tl.arange(0, TILE)
        named = (positions >= first) & (positions < stop)
        slots = _token_slots(where, tile, positions, named, BLOCK_SIZE, TILE)
        offsets = slots[:, None] * SLOT_STRIDE + dims[None, :]
        mask = named[:, None] & (dims < HEAD_DIM)[None, :]

        key = tl.load(key_cache + offsets, mask=mask, other=0.0)
        scores = tl.dot(query, key.T, input_precision="ieee") * score_scale
        if SOFTCAP > 0:
            scores = _tanh(scores) * (SOFTCAP * LOG2_E)
        visible = named[None, :] & (positions[None, :] <= query_positions[:, None])
        if WINDOW > 0:
            visible = visible & (positions[None, :] > query_positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, -float("inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        rescale = tl.exp2(row_max - new_max)
        exponentials = tl.exp2(scores - new_max[:, None])
        row_sum = row_sum * rescale + tl.sum(exponentials, axis=1)
        row_max = new_max
        value = tl.load(value_cache + offsets, mask=mask, other=0.0)
        value_sums = tl.dot(exponentials.to(value.dtype), value, value_sums * rescale[:, None], input_precision="ieee")
    return value_sums, row_max, row_sum


@triton.jit(do_not_specialize=["where_stride"])
def decode_kernel(
    out,
    partial_sums,
    partial_stats,
    query,
    key_cache,
    value_cache,
    where,
    lengths,
    score_scale,
    query_stride,
    query_head_stride,
    where_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SPLIT_TILES: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """One program: the query heads of one KV head of one sequence, over one split of its context."""
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + sequence)
    begin = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    begin_tile = begin // TILE
    num_tiles = tl.cdiv(length, TILE) - begin_tile
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, tl.num_programs(2)), MIN_SPLIT_TILES)
    first_tile = begin_tile + split * tiles_per_split
    first = tl.maximum(first_tile * TILE, begin)
    stop = tl.minimum((first_tile + tiles_per_split) * TILE, length)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    heads = kv_head * GROUP + rows
    mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = sequence * query_stride + heads[:, None] * query_head_stride + dims[None, :]
    value_sums, row_max, row_sum = _attend_range(
        tl.load(query + query_offsets, mask=mask, other=0.0),
        tl.zeros([ROWS], tl.int32) + length - 1,
        first,
        stop,
        key_cache + kv_head * HEAD_DIM,
        value_cache + kv_head * HEAD_DIM,
        where + sequence * where_stride,
        score_scale,
        NUM_KV_HEADS * HEAD_DIM,
        HEAD_DIM,
        DIMS,
        BLOCK_SIZE,
        TILE,
        WINDOW,
        SOFTCAP,
    )
    out_rows = sequence * (NUM_KV_HEADS * GROUP) + heads
    if SPLIT:
        out_rows = out_rows * tl.num_programs(2) + split
        stats = partial_stats + out_rows * 2
        tl.store(stats, row_max, mask=rows < GROUP)
        tl.store(stats + 1, row_sum, mask=rows < GROUP)
        sums = partial_sums + out_rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(sums, value_sums, mask=mask & (row_sum > 0)[:, None])
    else:
        # The row's largest score adds 1 to its sum: only an empty row's is below.
        result = (value_sums / tl.maximum(row_sum, 1.0)[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_rows[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    out,
    partial_sums,
    partial_stats,
    num_splits,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program: one query head of one sequence. Empty splits have sum 0 and undefined values."""
    row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIMS)
    stats = partial_stats + (row * num_splits + splits) * 2
    row_max = tl.load(stats, mask=splits < num_splits, other=LOWEST)
    row_sum = tl.load(stats + 1, mask=splits < num_splits, other=0.0)
    weights = tl.exp2(row_max - tl.max(row_max, axis=0))
    total = tl.sum(weights * row_sum, axis=0)
    offsets = (row * num_splits + splits)[:, None] * HEAD_DIM + dims[None, :]
    mask = (row_sum > 0)[:, None] & (dims < HEAD_DIM)[None, :]
    value_sums = tl.load(partial_sums + offsets, mask=mask, other=0.0)
    result = tl.sum(weights[:, None] * value_sums, axis=0) / tl.maximum(total, 1.0)
    tl.store(out + row * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def _sequence_of_tile(query_starts, num_sequences, query_tile, ROWS: tl.constexpr):
    """The sequence of a query tile: sequence ``i`` owns the tiles from ``query_starts[i] // ROWS + i``."""
    CHUNK: tl.constexpr = 128
    sequence = -1
    for chunk in range(0, num_sequences, CHUNK):
        candidates = chunk + tl.arange(0, CHUNK)
        starts = tl.load(query_starts + candidates, mask=candidates < num_sequences, other=0)
        begun = (candidates < num_sequences) & (starts // ROWS + candidates <= query_tile)
        sequence += tl.sum(begun.to(tl.int32), axis=0)
    return sequence


@triton.jit(do_not_specialize=["where_stride", "num_sequences"])
def prefill_kernel(
    out,
    query,
    key_cache,
    value_cache,
    where,
    query_starts,
    lengths,
    score_scale,
    num_sequences,
    query_stride,
    query_head_stride,
    where_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """One program: one query head of a tile of ROWS new tokens of one sequence."""
    head = tl.program_id(0)
    # Last tiles see the most context: start them first.
    query_tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = _sequence_of_tile(query_starts, num_sequences, query_tile, ROWS)
    start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - start
    first_row = (query_tile - start // ROWS - sequence) * ROWS
    if first_row >= num_queries:
        return
    num_cached = tl.load(lengths + sequence) - num_queries
    stop = num_cached + tl.minimum(first_row + ROWS, num_queries)
    first = tl.maximum(num_cached + first_row - WINDOW + 1, 0) if WINDOW > 0 else 0

    rows = first_row + tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    tokens = (start + rows).to(tl.int64)
    mask = (rows < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = tokens[:, None] * query_stride + head * query_head_stride + dims[None, :]
    kv_head = head // GROUP
    value_sums, _, row_sum = _attend_range(
        tl.load(query + query_offsets, mask=mask, other=0.0),
        num_cached + rows,
        first,
        stop,
        key_cache + kv_head * HEAD_DIM,
        value_cache + kv_head * HEAD_DIM,
        where + sequence.to(tl.int64) * where_stride,
        score_scale,
        NUM_KV_HEADS * HEAD_DIM,
        HEAD_DIM,
        DIMS,
        BLOCK_SIZE,
        TILE,
        WINDOW,
        SOFTCAP,
    )
    # Rows beyond the sequence's last token may see nothing; they are not stored.
    result = value_sums / tl.maximum(row_sum, 1.0)[:, None]
    out_offsets = (tokens[:, None] * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM + dims[None, :]
    tl.store(out + out_offsets, result.to(out.dtype.element_ty), mask=mask)
