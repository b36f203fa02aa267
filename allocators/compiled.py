"""The verbs that steps wait for, compiled: numpy needs 20 to 40 calls of 1 us for each.

All work in place on the arrays of `allocators.blocks.BlockTier` and check nothing that it promises.
They are compiled when this module is first imported, and read from numba's cache after that.
"""

import numba
from numba import types

_ROWS = types.Array(types.int64, 1, "A", readonly=True)
_INT64 = types.int64[::1]
_INT32 = types.int32[::1]
_TABLES = types.int32[:, ::1]
_BOOL = types.boolean[::1]


@numba.njit(
    types.int64(
        _ROWS, _ROWS, _INT64, _INT64, _TABLES, _INT32, _BOOL, _INT64, types.int64, types.int64, types.int64, _INT64
    ),
    cache=True,
)
def append_one(
    rows, counts, lengths, extents, tables, references, owns_tail, free, num_free, block_size, max_tokens, slots
):
    """One more token for each of the rows, in the ordinary case: how many blocks were taken, or -1.

    -1, with nothing changed, if a count is not 1, if a row is out of range, named twice, without tokens or
    full, if a row would write into a shared block, or if free blocks do not suffice.
    slots: int64 ``[n]``, receives the new tokens' slots.
    """
    num_checked = num_new = 0
    for i, row in enumerate(rows):
        if counts[i] != 1:
            break
        if not 0 <= row < lengths.size or not 0 < lengths[row] < max_tokens:
            break
        if lengths[row] == extents[row]:
            num_new += 1
        elif references[tables[row, lengths[row] // block_size]] > 1:
            break
        lengths[row] = -lengths[row]  # a second visit breaks off
        num_checked += 1
    for row in rows[:num_checked]:
        lengths[row] = -lengths[row]
    if num_checked < rows.size or num_new > num_free:
        return -1
    top = num_free
    for i, row in enumerate(rows):
        column, offset = divmod(lengths[row], block_size)
        if offset == 0:
            top -= 1
            tables[row, column] = free[top]
            references[free[top]] = 1
            extents[row] += block_size
            owns_tail[row] = True
        slots[i] = tables[row, column] * block_size + offset
        lengths[row] += 1
    return num_new


@numba.njit(
    types.int64(_ROWS, _INT64, _INT64, _TABLES, _INT32, _BOOL, _INT64, types.int64, types.int64, _INT64), cache=True
)
def place(rows, lengths, extents, tables, references, owns_tail, free, num_free, block_size, slots):
    """Put a group that shares ``slots.size`` tokens on free blocks: how many.

    slots: int64 ``[num_tokens]``, receives the tokens' slots.
    """
    num_blocks = -(-slots.size // block_size)
    table = tables[rows[0]]
    for column in range(num_blocks):
        block = free[num_free - 1 - column]
        references[block] = rows.size
        table[column] = block
        in_block = slots[column * block_size : (column + 1) * block_size]
        for offset in range(in_block.size):
            in_block[offset] = block * block_size + offset
    for row in rows[1:]:
        tables[row, :num_blocks] = table[:num_blocks]
    for row in rows:
        lengths[row] = slots.size
        extents[row] = num_blocks * block_size
    owns_tail[rows[0]] = True
    return num_blocks


@numba.njit(
    types.UniTuple(types.int64, 2)(
        *(_ROWS, _INT64, _INT64, _TABLES, _INT32, _BOOL, _INT64),
        *(types.int64, types.int64, types.int64, types.int64[:, ::1], types.int64[::1]),
    ),
    cache=True,
)
def grow(
    rows, lengths, extents, tables, references, owns_tail, free, num_free, block_size, max_tokens, capacities, taken
):
    """As many decode steps as fit, at most ``len(taken)``, of live and distinct rows: how many, and their blocks.

    Stops before a step for which free blocks do not suffice, or a row of ``max_tokens`` would grow; takes none if
    a row would write into a shared block. capacities: int64 ``[steps, n]``, receives the slots of each row's
    blocks after each step; taken: int64 ``[steps]``, the blocks taken up to then.
    """
    before, num_steps = num_free, taken.size
    for row in rows:
        num_steps = min(num_steps, max_tokens - lengths[row])
        if lengths[row] < extents[row] and references[tables[row, lengths[row] // block_size]] > 1:
            return 0, 0
    for step in range(num_steps):
        num_new = 0
        for row in rows:
            num_new += lengths[row] == extents[row]
        if num_new > num_free:
            return step, before - num_free
        for i, row in enumerate(rows):
            if lengths[row] == extents[row]:
                num_free -= 1
                tables[row, lengths[row] // block_size] = free[num_free]
                references[free[num_free]] = 1
                extents[row] += block_size
                owns_tail[row] = True
            lengths[row] += 1
            capacities[step, i] = extents[row]
        taken[step] = before - num_free
    return num_steps, before - num_free


@numba.njit(
    types.UniTuple(types.int64, 2)(_ROWS, _INT64, _INT64, _TABLES, _INT32, _BOOL, _INT64, types.int64, types.int64),
    cache=True,
)
def release(rows, lengths, extents, tables, references, owns_tail, free, num_free, block_size):
    """Drop live and distinct rows of which none shares a block: the blocks freed and the slots that were vacant.

    (-1, -1), with nothing changed, if one does, or if the counts contradict one another.
    """
    num_held = 0
    for row in rows:
        for column in range(extents[row] // block_size):
            num_held += 1
            if references[tables[row, column]] != 1:
                return -1, -1
    if num_free + num_held > free.size:
        return -1, -1
    num_blocks = num_vacant = 0
    for row in rows:
        for column in range(extents[row] // block_size):
            block = tables[row, column]
            references[block] = 0
            free[num_free + num_blocks] = block
            num_blocks += 1
            tables[row, column] = 0
        num_vacant += extents[row] - lengths[row]
        lengths[row] = extents[row] = 0
        owns_tail[row] = False
    return num_blocks, num_vacant
