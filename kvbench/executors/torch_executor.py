"""Real decoding: a Hugging Face model on packed tokens, with KV in our pool."""

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from kernels import BaseSlots, BlockTables, Kernels
from kernels.memory import upload
from kvbench.allocator import Layout
from kvbench.executors.attention import PooledStep, forward
from kvbench.executors.choice import best_candidates, choose
from kvbench.executors.static_decode import StaticDecode
from kvbench.executors.storage import KVStorage
from kvbench.executors.timing import stopwatch
from kvbench.plan import SampleSpec, StepOutput, StepPlan


class TorchExecutor:
    """Runs step plans on ``model``'s device; the clock is the wall clock.

    A step waits for the device once, at its end; swaps to the host wait as well, since the host moves their blocks.

    decode: runs the steps in which every row decodes; None: they are run as prefills are.
    """

    draws_tokens = True

    def __init__(
        self, model: PreTrainedModel, storage: KVStorage, kernels: Kernels, decode: StaticDecode | None = None
    ) -> None:
        self.model = model
        self.storage = storage
        self.kernels = kernels
        self.device = model.device
        self._decode = decode
        self._start = time.perf_counter()

    def warm_up(self, layout: Layout, block_size: int) -> None:
        """Compile and page in what a run uses: a prefill and a decode in the empty pool's first slots."""
        paged = layout is Layout.PAGED
        for num_tokens, num_new in ((2, 2), (2, 1)):
            start = num_tokens - num_new
            self.run(
                StepPlan(
                    copies=(),
                    late_copies=(),
                    rows=np.zeros(1, np.int64),
                    num_new=np.array([num_new]),
                    num_decode=int(num_new == 1),
                    tokens=np.ones(num_new, np.int32),
                    positions=np.arange(start, num_tokens),
                    slots=np.arange(start, num_tokens),
                    lengths=np.array([num_tokens]),
                    sample=SampleSpec.greedy(1),
                    block_tables=np.array([[0, 1]], np.int32)[:, : -(-2 // block_size)] if paged else None,
                    block_size=block_size,
                    base_slots=None if paged else np.zeros(1, np.int64),
                )
            )

    def start(self) -> None:
        """Set the clock to zero."""
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def wait_until(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - self.now()))

    def foresee(self, num_rows: int, kv_tokens: int, num_steps: int, until_s: float) -> None:
        """Wall-clock time is measured."""

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        watch = stopwatch(self.device)
        for copies in plan.copies:
            self.storage.copy(copies)
        watch.lap("copy")
        logits = self._logits(plan)
        watch.lap("model")
        tokens, log_probs, token_ids = self._sample(logits, plan.sample)
        watch.lap("sample")
        for copies in plan.late_copies:
            self.storage.copy(copies)
        watch.lap("copy")
        seconds = watch.seconds()  # waits for the device: only now have the results arrived
        return StepOutput(tokens.numpy(), log_probs.numpy(), token_ids.numpy(), seconds)

    def _logits(self, plan: StepPlan) -> Tensor:
        """Logits of every row's last token, ``[rows, vocab]``."""
        if self._decode is not None and plan.num_decode == len(plan.rows):
            return self._decode.logits(plan)
        ends = np.cumsum(plan.num_new)
        tokens = self._upload(plan.tokens.astype(np.int64))
        return forward(self.model, tokens, self._upload(plan.positions), self._upload(ends - 1), self._step(plan, ends))

    def _step(self, plan: StepPlan, ends: NDArray[np.int64]) -> PooledStep:
        split = plan.num_decode
        lengths = self._upload(plan.lengths.astype(np.int32))
        starts = np.concatenate([[0], ends[split:] - split]).astype(np.int32)
        return PooledStep(
            kernels=self.kernels,
            kv=self.storage.kv,
            slots=self._upload(plan.slots),
            num_decode=split,
            decode_where=self._where(plan, slice(0, split)),
            decode_lengths=lengths[:split],
            prefill_where=self._where(plan, slice(split, None)),
            prefill_lengths=lengths[split:],
            query_starts=self._upload(starts),
        )

    def _where(self, plan: StepPlan, rows: slice) -> BlockTables | BaseSlots:
        if plan.block_tables is not None:
            return BlockTables(self._upload(plan.block_tables[rows]), plan.block_size)
        assert plan.base_slots is not None
        return BaseSlots(self._upload(plan.base_slots[rows]))

    def _sample(self, logits: Tensor, spec: SampleSpec) -> tuple[Tensor, Tensor, Tensor]:
        """The step's tokens, log probabilities and token ids (see StepOutput), on their way to the host."""
        tokens, token_ids = torch.empty(0, dtype=torch.int64), torch.empty(0, 0, dtype=torch.int64)
        log_probs = torch.empty(0, 0)
        if len(spec.rows):
            tokens = choose(self._select(logits, spec.rows), spec.temperature, spec.top_p, spec.uniforms)
        if len(spec.beam_rows):
            log_probs, token_ids = best_candidates(self._select(logits, spec.beam_rows), spec.num_candidates)
        return _fetch(tokens), _fetch(log_probs), _fetch(token_ids)

    def _select(self, logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
        if np.array_equal(rows, np.arange(len(logits))):
            return logits
        return logits[self._upload(rows)]

    def _upload(self, array: NDArray[Any]) -> Tensor:
        return upload(torch.from_numpy(np.ascontiguousarray(array)), self.device)


def _fetch(results: Tensor) -> Tensor:
    """Begin a copy to page-locked memory of the host."""
    return results.to("cpu", non_blocking=True)
