"""Programs of operations on the CPU."""

import numpy as np
import pytest
from numba import carray, cfunc, types

from kernels import cpu_program, openmp

SIZE = 64


@cfunc(types.void(types.CPointer(types.int64), types.int64, types.int64))
def _sum_all(arguments, item, ahead):
    """Every item of a row becomes the sum of the row before; the last one takes its time."""
    rows = carray(arguments, (2, SIZE))
    total = rows[0].sum() % 1009
    state = rows[0, 0]
    for _ in range(20_000 if item == SIZE - 1 else 0):
        state = (state * 48271 + 11) % 2147483647
    rows[1, item] = total + item + (state < 0)


@pytest.mark.parametrize("with_openmp", [True, False])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_an_operation_starts_when_the_one_before_is_done(num_threads, with_openmp, monkeypatch) -> None:
    if not with_openmp:
        monkeypatch.setattr(openmp, "_gomp_parallel", lambda: None)
    rows = np.zeros((40, SIZE), np.int64)
    rows[0] = range(SIZE)
    expected = rows.copy()
    for row in range(1, len(rows)):
        expected[row] = expected[row - 1].sum() % 1009 + np.arange(SIZE)
    operations = np.zeros(len(rows) - 1, cpu_program.OPERATION)
    operations["function"], operations["num_items"] = _sum_all.address, SIZE
    operations["arguments"] = rows.ctypes.data + rows.strides[0] * np.arange(len(operations))
    for _ in range(3):
        rows[1:] = -1
        cpu_program.run(operations, num_threads)
        np.testing.assert_array_equal(rows, expected)


def test_nothing_to_do() -> None:
    cpu_program.run(np.zeros(0, cpu_program.OPERATION), 2)
    cpu_program.run_one(_sum_all.address, 0, 0, 2)
