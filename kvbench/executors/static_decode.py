"""Decode steps on tensors that stay where they are, so that a step is one copy and one launch.

A decoder issues hundreds of kernels per step, each a few microseconds of the host's time: for small batches more
than the device needs to run them. A CUDA graph is issued as one. It replays exactly the launches that were
recorded, so whatever differs between steps must lie in memory: here it is five numbers per row, and the block
tables. The batch is padded to one of a few sizes, with a graph for each.
"""

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernels import BaseSlots, BlockTables, Kernels
from kvbench.allocator import Layout
from kvbench.executors.attention import DecodeStep, forward
from kvbench.executors.device_tables import DeviceTables
from kvbench.plan import StepPlan

Action = Callable[[], object]
TOKEN, POSITION, SLOT, LENGTH, PLACE = range(5)  # a row's place: its engine row (paged), or its base slot
# What a padding row brings: a token that sees nothing, and whose KV is written nowhere.
PADDING = np.array([[0], [0], [-1], [0], [0]])


class CudaGraphs:
    """Records actions on the current CUDA device. Their graphs share memory: one's results go with another's replay."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, action: Action) -> Action:
        """Run ``action`` once, for what is set up at a first run, and record it: the replay of the record."""
        action()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            action()
        return graph.replay


def bucket_sizes(max_rows: int) -> list[int]:
    """Batch sizes to pad to, ascending: less than 16 rows of padding hardly cost time, nor do this many graphs."""
    return sorted({size for size in (1, 2, 4, 8, *range(16, max_rows, 16)) if size < max_rows} | {max_rows})


class StaticDecode:
    """Runs the decode steps of batches up to ``max_rows``.

    layout, block_size, max_rows, max_tokens: of the allocator and its pool.
    record: turns an action on fixed tensors into one of the same effect: :class:`CudaGraphs`, or on a device without
        graphs the identity.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kv: Tensor,
        kernels: Kernels,
        *,
        layout: Layout,
        block_size: int,
        max_rows: int,
        max_tokens: int,
        record: Callable[[Action], Action],
    ) -> None:
        device = model.device
        self._model = model
        self._kv = kv
        self._kernels = kernels
        self._block_size = block_size
        self._tables: DeviceTables | None = None
        if layout is Layout.PAGED:
            self._tables = DeviceTables(max_rows, -(-max_tokens // block_size), device)
        padded = torch.from_numpy(np.tile(PADDING, max_rows))
        self._staging = padded.pin_memory() if device.type == "cuda" else padded
        self._inputs = padded.to(device, copy=True)
        self.bucket_sizes = bucket_sizes(max_rows)
        with torch.inference_mode():
            self._logits = torch.empty_like(self._forward(max_rows))
            # The largest first: the others fit into the memory that it takes.
            self._steps = {size: record(self._step(size)) for size in reversed(self.bucket_sizes)}

    def logits(self, plan: StepPlan) -> Tensor:
        """Logits of every row, ``[rows, vocab]``, valid until the next step. The plan has decode rows alone.

        Whatever the step before sent must have arrived: the caller waits for each step's end.
        """
        count = len(plan.rows)
        size = self.bucket_sizes[bisect_left(self.bucket_sizes, count)]
        self._stage(plan, count)
        if self._tables is not None:
            assert plan.block_tables is not None
            self._tables.update(plan.rows, plan.block_tables)
        self._inputs.copy_(self._staging, non_blocking=True)
        self._steps[size]()
        return self._logits[:count]

    def _stage(self, plan: StepPlan, count: int) -> None:
        staging = self._staging.numpy()
        staging[TOKEN, :count] = plan.tokens
        staging[POSITION, :count] = plan.positions
        staging[SLOT, :count] = plan.slots
        staging[LENGTH, :count] = plan.lengths
        staging[PLACE, :count] = plan.rows if plan.base_slots is None else plan.base_slots
        staging[:, count:] = PADDING

    def _step(self, size: int) -> Action:
        return lambda: self._logits[:size].copy_(self._forward(size))

    def _forward(self, size: int) -> Tensor:
        """Logits of the first ``size`` rows of the inputs."""
        inputs = self._inputs[:, :size]
        step = DecodeStep(
            kernels=self._kernels,
            kv=self._kv,
            slots=inputs[SLOT],
            where=self._where(inputs[PLACE]),
            lengths=inputs[LENGTH].int(),
        )
        return forward(self._model, inputs[TOKEN], inputs[POSITION], 0, step)

    def _where(self, places: Tensor) -> BlockTables | BaseSlots:
        if self._tables is None:
            return BaseSlots(places)
        return BlockTables(self._tables.tables.index_select(0, places), self._block_size)
