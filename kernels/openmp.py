"""Run a compiled function on several threads.

Uses the OpenMP runtime that torch itself is linked with, hence torch's own worker threads: a second
pool would compete with torch's workers, which spin for a while after each parallel region.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch


@cache
def _gomp_parallel() -> Callable | None:
    """``GOMP_parallel(function, argument, num_threads, flags)`` of torch's runtime, where it has one."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


@cache
def _python_threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="kernels")


def parallel(function: Any, address: int, num_threads: int) -> None:
    """Call a ctypes function ``void (*)(void *)`` with ``address`` on ``num_threads`` threads at once.

    The function shares out its work itself. Without OpenMP in torch, threads of this process run it.
    """
    if num_threads == 1:
        function(address)
    elif gomp_parallel := _gomp_parallel():
        gomp_parallel(ctypes.cast(function, ctypes.c_void_p), address, num_threads, 0)
    else:
        others = [_python_threads(num_threads - 1).submit(function, address) for _ in range(num_threads - 1)]
        function(address)
        for other in others:
            other.result()
