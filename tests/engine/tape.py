"""What a CUDA graph does, on the CPU: operations are recorded with their tensors and run again on the same memory.

Python values of the time of recording are baked in, and tensors that are made later are never seen: code that
gives right results from a tape looks at nothing but its fixed tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import Kernels
from kvbench.executors.static_decode import Action

# Operations whose result the host has to wait for, besides those that torch tags as such.
READS = {"aten::is_nonzero", "aten::item", "aten::_local_scalar_dense"}
TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Tape(TorchDispatchMode):
    """Records torch's operations and, through :attr:`kernels`, those of ``operations``.

    num_replays: of all actions that it has recorded.
    """

    def __init__(self, operations: Kernels) -> None:
        super().__init__()
        self.kernels: Any = _TapedKernels(self, operations)
        self.num_replays = 0
        self._ops: list[Callable[[], object]] = []
        self._within_kernel = False

    def __call__(self, action: Action) -> Action:
        self._ops = ops = []
        with self:
            action()
        for_replay = list(ops)

        def replay() -> None:
            self.num_replays += 1
            for op in for_replay:
                op()

        return replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._within_kernel:
            assert not reads_back(func, args), f"{func} makes the host wait"
        results = func(*args, **kwargs)
        if not self._within_kernel:
            self._ops.append(lambda: _overwrite(results, func(*args, **kwargs)))
        return results

    def kernel(self, function: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Tensor | None:
        self._within_kernel = True
        result = function(*args, **kwargs)
        self._within_kernel = False
        self._ops.append(lambda: _overwrite(result, function(*args, **kwargs)))
        return result


class _TapedKernels:
    def __init__(self, tape: Tape, operations: Kernels) -> None:
        self._tape, self._operations = tape, operations

    def __getattr__(self, name: str) -> Callable[..., Tensor | None]:
        return lambda *args, **kwargs: self._tape.kernel(getattr(self._operations, name), *args, **kwargs)


class NoReads(TorchDispatchMode):
    """AssertionError on an operation whose result the host would wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not reads_back(func, args), f"{func} makes the host wait"
        return func(*args, **(kwargs or {}))


def reads_back(func: Any, args: Any) -> bool:
    name = func._schema.name
    if name in ("aten::index", "aten::index_put_"):  # by numbers, not by a mask
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return name in READS or bool(TAGS & set(func.tags))


def _overwrite(results: Any, again: Any) -> None:
    if isinstance(results, Tensor):
        if results.data_ptr() != again.data_ptr():
            results.copy_(again)
    elif isinstance(results, (tuple, list)):
        for old, new in zip(results, again, strict=True):
            _overwrite(old, new)
