# mypy: disable-error-code="call-arg, var-annotated"
# (numba's decorators change signatures in ways that its stubs do not tell)
"""Reading a layer's KV and nothing else, in the order in which attention would: what the memory makes of that order."""

import functools

import numpy as np
import torch
from numba import carray, cfunc, from_dtype, njit, types
from torch import Tensor

from kernels import cpu_program, cpu_work
from kernels.addressing import BaseSlots, BlockTables
from kernels.cpu_steps import float32_pointer, int32_pointer, int64_pointer

_ARGUMENTS = np.dtype(
    [
        ("key", np.int64),  # address of [num_slots, slot_words] of 32 bits, as is value
        ("value", np.int64),
        ("slot_words", np.int64),
        ("tables", np.int64),  # as in kernels.cpu_work.ARGUMENTS, as are the two that follow
        ("table_width", np.int64),
        ("block_size", np.int64),
        ("lengths", np.int64),  # address of int32 [num_sequences]
        ("sums", np.int64),  # address of float32 [num_sequences], out: so that nothing is optimised away
    ]
)


def read_kv(key_cache: Tensor, value_cache: Tensor, where: BlockTables | BaseSlots, lengths: Tensor) -> Tensor:
    """Read K and V of every token once: float32 ``[num_sequences]``, sums of the words without meaning otherwise.

    key_cache, value_cache: contiguous ``[num_slots, num_kv_heads, head_dim]``, a slot's bytes a multiple of 4.
    lengths: int32 ``[num_sequences]``. Addresses are not checked.
    """
    sums = torch.empty(len(lengths))
    arguments = np.zeros((), _ARGUMENTS)
    table, arguments["table_width"], arguments["block_size"] = cpu_work.address_form(where)
    arguments["key"], arguments["value"], arguments["tables"] = (
        tensor.data_ptr() for tensor in (key_cache, value_cache, table)
    )
    arguments["slot_words"] = key_cache.shape[1] * key_cache.shape[2] * key_cache.element_size() // 4
    arguments["lengths"], arguments["sums"] = lengths.data_ptr(), sums.data_ptr()
    cpu_program.run_one(_reader().address, arguments.ctypes.data, len(lengths), torch.get_num_threads())
    return sums


@functools.cache
def _reader():
    @cfunc(types.void(types.CPointer(from_dtype(_ARGUMENTS)), types.int64, types.int64), cache=True)
    def read(arguments, item, ahead):
        work = carray(arguments, (1,))[0]
        length = int32_pointer(work.lengths)[item]
        total = np.float32(0)
        if work.block_size == 0:
            total += _read_slots(work, int64_pointer(work.tables)[item], length)
        else:
            table = int32_pointer(work.tables + item * work.table_width * 4)
            for start in range(0, length, work.block_size):
                first_slot = table[start // work.block_size] * work.block_size
                total += _read_slots(work, first_slot, min(work.block_size, length - start))
        float32_pointer(work.sums)[item] = total

    return read


@njit
def _read_slots(work, slot, count):
    """K and V in turns, by at most 16 slots, as a tile of attention does."""
    total = np.float32(0)
    for start in range(slot, slot + count, 16):
        offset = start * work.slot_words * 4
        words = min(16, slot + count - start) * work.slot_words
        total += _sum(float32_pointer(work.key + offset), words)
        total += _sum(float32_pointer(work.value + offset), words)
    return total


@njit(fastmath=True)
def _sum(words, count):
    total = np.float32(0)
    for word in carray(words, count):
        total += word
    return total
