"""Real decoding: a Hugging Face model on packed tokens, with KV in our pool."""

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from kernels import BaseSlots, BlockTables, Kernels
from kvbench.allocator import Layout
from kvbench.executors.attention import PooledStep
from kvbench.executors.storage import KVStorage
from kvbench.plan import SampleSpec, StepOutput, StepPlan
from kvbench.sampling import best_candidates, choose


class TorchExecutor:
    """Runs step plans on ``model``'s device; the clock is the wall clock."""

    draws_tokens = True

    def __init__(self, model: PreTrainedModel, storage: KVStorage, kernels: Kernels) -> None:
        self.model = model
        self.storage = storage
        self.kernels = kernels
        self.device = model.device
        self._start = time.perf_counter()

    def warm_up(self, layout: Layout, block_size: int) -> None:
        """Compile and page in what a run uses: a prefill and a decode in the empty pool's first slots."""
        for num_tokens, num_new in ((2, 2), (3, 1)):
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
                    block_tables=np.arange(4, dtype=np.int32)[None] if layout is Layout.PAGED else None,
                    block_size=block_size,
                    base_slots=None if layout is Layout.PAGED else np.zeros(1, np.int64),
                )
            )

    def start(self) -> None:
        """Set the clock to zero."""
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def wait_until(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - self.now()))

    def foresee(self, num_rows: int, kv_tokens: int, num_steps: int) -> None:
        """Wall-clock time is measured."""

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        watch = _Stopwatch(self.device)
        for copies in plan.copies:
            self.storage.copy(copies)
        watch.lap("copy")
        logits = self._forward(plan)
        watch.lap("model")
        output = self._sample(logits, plan.sample)
        watch.lap("sample")
        for copies in plan.late_copies:
            self.storage.copy(copies)
        watch.lap("copy")
        output.seconds = watch.seconds
        return output

    def _forward(self, plan: StepPlan) -> Tensor:
        """Logits of every row's last token, ``[rows, vocab]``."""
        ends = np.cumsum(plan.num_new)
        return self.model(
            self._upload(plan.tokens.astype(np.int64))[None],
            position_ids=self._upload(plan.positions)[None],
            use_cache=False,
            logits_to_keep=self._upload(ends - 1),
            kv_step=self._step(plan, ends),
        ).logits[0]

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

    def _sample(self, logits: Tensor, spec: SampleSpec) -> StepOutput:
        tokens = np.empty(0, np.int64)
        log_probs, token_ids = np.empty((0, 0), np.float32), np.empty((0, 0), np.int64)
        if len(spec.rows):
            picked = choose(
                logits[self._upload(spec.rows)],
                self._upload(spec.temperature),
                self._upload(spec.top_p),
                self._upload(spec.uniforms),
            )
            tokens = picked.cpu().numpy()
        if len(spec.beam_rows):
            best, ids = best_candidates(logits[self._upload(spec.beam_rows)], spec.num_candidates)
            log_probs, token_ids = best.cpu().numpy(), ids.cpu().numpy()
        return StepOutput(tokens, log_probs, token_ids)

    def _upload(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


class _Stopwatch:
    """Seconds by part; waits for the device at each lap, so that parts are truly separate."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}
        self._last = self._read()

    def _read(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def lap(self, part: str) -> None:
        now = self._read()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now
