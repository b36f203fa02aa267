"""Rows in the middle of their decoding, in a pool where every other slot is poisoned."""

import functools

import numpy as np
import torch
from transformers import PreTrainedModel

import kernels
from kvbench.allocator import Allocator, Layout, Pool
from kvbench.executors.inspection import inspect
from kvbench.executors.static_decode import StaticDecode
from kvbench.executors.storage import KVStorage
from kvbench.executors.torch_executor import TorchExecutor
from kvbench.geometry import Geometry
from kvbench.plan import SampleSpec, StepPlan
from tests.engine.harness import ALLOCATORS, Record, as_it_is, static_decode
from tests.tiny_models import tiny_model

MAX_ROWS, MAX_TOKENS = 20, 48
LAYOUTS = {"paged": {"block_size": 4}, "static": {}}


@functools.cache
def inspected(name: str, device: str) -> tuple[PreTrainedModel, Geometry]:
    model = tiny_model(name).to(device)  # type: ignore[arg-type]
    return model, inspect(model)


class Scene:
    """An allocator with rows of random lengths in random places, and a pool that is NaN but where they have KV."""

    def __init__(self, allocator: str, seed: int = 0, model: str = "llama", device: str = "cpu") -> None:
        self.rng = np.random.default_rng(seed)
        self.model, self.geometry = inspected(model, device)
        pool = Pool(MAX_ROWS * MAX_TOKENS, MAX_ROWS, MAX_TOKENS, 0)
        self.allocator: Allocator = ALLOCATORS[allocator][0](pool, **LAYOUTS[allocator])
        self.operations = kernels.load("triton" if device == "cuda" else "cpu")
        self.storage = self._storage()
        for row in self.rng.permutation(MAX_ROWS):
            self.allocator.allocate([row], int(self.rng.integers(1, 32)), max_tokens=MAX_TOKENS)
        self._write(np.arange(MAX_ROWS))

    def _storage(self) -> KVStorage:
        return KVStorage(
            self.geometry,
            self.allocator.pool.num_slots,
            0,
            dtype=torch.float32,
            device=self.model.device,
            kernels=self.operations,
        )

    def _write(self, rows: np.ndarray) -> None:
        for row in rows:
            count = int(self.allocator.num_tokens([row])[0])
            slots = self.allocator.slots(np.full(count, row), np.arange(count))
            shape = (*self.storage.kv.shape[:2], count, *self.storage.kv.shape[3:])
            written = torch.from_numpy(self.rng.normal(size=shape).astype(np.float32))
            self.storage.kv[:, :, slots] = written.to(self.model.device)

    def replace_rows(self, count: int) -> None:
        """Some rows end, others begin in their places."""
        rows = self.rng.choice(MAX_ROWS, count, replace=False)
        self.allocator.free(rows)
        for row in rows:
            self.allocator.allocate([row], int(self.rng.integers(1, 32)), max_tokens=MAX_TOKENS)
        self.storage.kv[:, :, self.allocator.slots(*self._all())] = 0.5  # whatever lay there
        self._write(rows)

    def _all(self) -> tuple[np.ndarray, np.ndarray]:
        counts = self.allocator.num_tokens(np.arange(MAX_ROWS))
        return np.repeat(np.arange(MAX_ROWS), counts), np.concatenate([np.arange(n) for n in counts])

    def step(self, count: int) -> StepPlan:
        """The plan in which ``count`` random rows bring a random token each."""
        rows = self.rng.choice(MAX_ROWS, count, replace=False)
        grant = self.allocator.append(rows)
        assert grant is not None
        assert grant.slots is not None
        lengths = self.allocator.num_tokens(rows)
        paged = self.allocator.layout is Layout.PAGED
        return StepPlan(
            copies=(),
            late_copies=(),
            rows=rows,
            num_new=np.ones(count, np.int64),
            num_decode=count,
            lengths=lengths,
            sample=SampleSpec.greedy(count),
            tokens=self.rng.integers(3, 100, count).astype(np.int32),
            positions=lengths - 1,
            slots=grant.slots,
            block_tables=self.allocator.block_tables(rows) if paged else None,
            block_size=self.allocator.block_size,
            base_slots=None if paged else self.allocator.base_slots(rows),
        )

    def static(self, record: Record = as_it_is) -> StaticDecode:
        return static_decode(self.model, self.storage, self.allocator, record)

    def planned(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the step as a plan of its own, and the pool after it; this scene's pool stays as it is."""
        copy = self._storage()
        copy.kv.copy_(self.storage.kv)
        with torch.inference_mode():
            logits = TorchExecutor(self.model, copy, self.operations)._logits(plan)
        return logits, copy.kv


def every_kind_of_pick() -> SampleSpec:
    """Of a step of five rows: a greedy token, two drawn ones, and two beams."""
    return SampleSpec(
        rows=np.array([0, 1, 4]),
        temperature=np.array([0.0, 0.8, 1.0], np.float32),
        top_p=np.array([1.0, 1.0, 0.9], np.float32),
        uniforms=np.array([0.0, 0.3, 0.6]),
        beam_rows=np.array([2, 3]),
        num_candidates=4,
    )
