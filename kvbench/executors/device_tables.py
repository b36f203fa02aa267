"""Block tables on the device, kept up to date by what changed."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.allocator import IntArray


class DeviceTables:
    """The block tables of the rows that decode, by row of the engine.

    A decode step changes few tables: every ``block_size`` steps a row takes a block. So the host remembers what
    the device has, compares, and sends the rows that differ, whole, in one copy from page-locked memory.

    tables: int32 ``[max_rows, max_blocks]`` on the device; a row's entries beyond its last block mean nothing.
    """

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._sent = np.zeros((max_rows, max_blocks), np.int32)  # what ``tables`` holds
        # A row of the staging buffer is a row of the engine and its table.
        pinned = device.type == "cuda"
        self._staging = torch.empty(max_rows, 1 + max_blocks, dtype=torch.int32, pin_memory=pinned)

    def update(self, rows: IntArray, tables: NDArray[np.int32]) -> int:
        """Make the tables of ``rows`` those given, int32 ``[n, width]``; how many had to be sent.

        The staging buffer is written at once: the copy of an earlier update must have been waited for.
        """
        width = tables.shape[1]
        changed = (self._sent[rows, :width] != tables).any(axis=1)
        count = int(np.count_nonzero(changed))
        if count:
            rows = rows[changed]
            self._sent[rows] = 0
            self._sent[rows, :width] = tables[changed]
            staged = self._staging[:count]
            staged.numpy()[:, 0] = rows
            staged.numpy()[:, 1:] = self._sent[rows]
            self._scatter(staged)
        return count

    def _scatter(self, staged: Tensor) -> None:
        arrived = staged.to(self.tables.device, non_blocking=True)
        self.tables.index_copy_(0, arrived[:, 0].long(), arrived[:, 1:])
