# mypy: disable-error-code="call-arg, var-annotated"
# (numba's decorators change signatures in ways that its stubs do not tell)
"""Operations run one after the other by all threads, without a return to Python between them.

An operation is a compiled function over *items*, which the threads take one by one; the next operation starts when
every item is done. How many threads there are plays no part in that, and none waits for one that holds no item.
"""

import ctypes
import functools
import zlib
from pathlib import Path

import numpy as np
from numba import carray, cfunc, from_dtype, njit, types
from numpy.typing import NDArray

from kernels import cpu_steps
from kernels.cpu_steps import call, fetch_add, pointer_to, yield_processor
from kernels.openmp import parallel


class _Operation(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("function", "arguments", "num_items", "next_item", "num_done")]


# function: address of ``void (arguments, item, ahead)``, where ``ahead`` is the item that the thread will probably
# take next; at or beyond the last it belongs to what follows. arguments: address of what the function is given.
OPERATION = np.dtype(_Operation)

_SPINS = 2000  # looks at the others' progress before the processor is offered to them


class _Program(ctypes.Structure):
    _fields_ = [
        ("operations", ctypes.c_int64),  # address of OPERATION [num_operations]
        ("num_operations", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
    ]


def run(operations: NDArray, num_threads: int) -> None:
    """Run OPERATION ``[n]``, C-contiguous, on up to ``num_threads`` threads."""
    operations["next_item"] = operations["num_done"] = 0
    num_threads = max(1, min(num_threads, int(operations["num_items"].max(initial=0))))
    program = _Program(operations.ctypes.data, len(operations), num_threads)
    parallel(_runner(), ctypes.addressof(program), num_threads)


def run_one(function: int, arguments: int, num_items: int, num_threads: int) -> None:
    """Run a single operation; costs a few us."""
    operation = _Operation(function, arguments, num_items, 0, 0)
    num_threads = max(1, min(num_threads, num_items))
    program = _Program(ctypes.addressof(operation), 1, num_threads)
    parallel(_runner(), ctypes.addressof(program), num_threads)


_OPERATION_BYTES = OPERATION.itemsize
_operation_at = pointer_to(from_dtype(OPERATION))
_NEXT_ITEM, _NUM_DONE = (OPERATION.fields[name][1] for name in ("next_item", "num_done"))  # type: ignore[index]
_SOURCES = zlib.crc32(Path(str(cpu_steps.__file__)).read_bytes())


@functools.cache
def _runner():
    sources = _SOURCES

    @cfunc(types.void(types.CPointer(from_dtype(np.dtype(_Program)))), cache=True)
    def run_operations(arguments):
        _ = sources  # a cell of this closure, thus in numba's cache key, which covers this file only
        program = carray(arguments, (1,))[0]
        for index in range(program.num_operations):
            address = program.operations + index * _OPERATION_BYTES
            operation = carray(_operation_at(address), (1,))[0]
            item = fetch_add(address + _NEXT_ITEM, 1)
            while item < operation.num_items:
                call(operation.function, operation.arguments, item, item + program.num_threads)
                fetch_add(address + _NUM_DONE, 1)
                item = fetch_add(address + _NEXT_ITEM, 1)
            _wait(address + _NUM_DONE, operation.num_items)

    return run_operations.ctypes


@njit
def _wait(address, target):
    spins = 0
    while fetch_add(address, 0) < target:
        spins += 1
        if spins > _SPINS:
            yield_processor()
