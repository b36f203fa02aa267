"""Decode steps as CUDA graphs, on a CUDA device: `pytest -m gpu`."""

import functools
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from kvbench.config import Preemption
from kvbench.executors.static_decode import CudaGraphs
from kvbench.executors.torch_executor import TorchExecutor
from kvbench.request import Request
from tests.cli import Cli
from tests.engine.harness import Served, Setting, serve
from tests.engine.scene import LAYOUTS, MAX_ROWS, Scene, every_kind_of_pick
from tests.engine.test_same_tokens import TIE, name_of, workload
from tests.tiny_models import FAMILIES, tiny_model

pytestmark = pytest.mark.gpu

SETTINGS = [
    Setting("static"),
    Setting("buddy_oracle", preemption=Preemption.recompute, force_preemption_every=2),
    Setting("paged", options={"block_size": 1}),
    Setting("paged", options={"block_size": 16}, preemption=Preemption.recompute, force_preemption_every=2),
    Setting("paged_swap", options={"block_size": 16}, preemption=Preemption.swap, force_preemption_every=2),
]


@functools.cache
def on_cuda(name: str) -> tuple[PreTrainedModel, list[Request]]:
    model = tiny_model(name).to("cuda")  # type: ignore[arg-type]
    return model, workload(model.config.vocab_size)


def assert_same(graphs: Served, eager: Served) -> None:
    for group, other in zip(graphs.groups, eager.groups, strict=True):
        np.testing.assert_allclose(group.scores, other.scores, atol=TIE)
        assert group.outputs.keys() == other.outputs.keys()
        for member, tokens in group.outputs.items():
            assert tokens.tolist() == other.outputs[member].tolist(), f"request {group.request.request_id}"


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_the_tokens_are_those_of_eager_steps(setting: Setting) -> None:
    """Greedy, sampled and beam requests together, also after preemptions."""
    model, requests = on_cuda("llama")
    setting = replace(setting, implementation="triton", max_rows=40)
    eager = serve(model, requests, setting, eos=(2,))
    graphs = serve(model, requests, replace(setting, record=CudaGraphs()), eos=(2,))
    assert_same(graphs, eager)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    model, requests = on_cuda(name)
    setting = Setting("paged", options={"block_size": 8}, implementation="triton", max_rows=40)
    eager = serve(model, requests, setting, eos=(2,))
    graphs = serve(model, requests, replace(setting, record=CudaGraphs()), eos=(2,))
    assert_same(graphs, eager)


@pytest.mark.parametrize("allocator", LAYOUTS)
@torch.inference_mode()
def test_every_batch_size(allocator: str) -> None:
    """Logits, and the pool with its poisoned slots, are those of a planned step, whatever ran before."""
    scene = Scene(allocator, device="cuda")
    static = scene.static(CudaGraphs())
    for count in [*range(1, MAX_ROWS + 1), 3, 1]:
        plan = scene.step(count)
        expected, pool = scene.planned(plan)
        torch.testing.assert_close(static.logits(plan), expected)
        torch.testing.assert_close(scene.storage.kv, pool, equal_nan=True)


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("waiting_is_an_error")
@pytest.mark.parametrize("allocator", LAYOUTS)
def test_a_step_waits_for_its_end_alone(allocator: str) -> None:
    """The wait for an event, which ends a step, is the one that torch does not count as a synchronisation."""
    scene = Scene(allocator, device="cuda")
    executor = TorchExecutor(scene.model, scene.storage, scene.operations, scene.static(CudaGraphs()))
    executor.warm_up(scene.allocator.layout, scene.allocator.block_size)
    outputs = []
    for repeat in range(2):  # the first compiles what samples
        plan = scene.step(5)
        plan.sample = every_kind_of_pick()
        torch.cuda.set_sync_debug_mode("error" if repeat else "default")
        outputs.append(executor.run(plan))
    executor.warm_up(scene.allocator.layout, scene.allocator.block_size)  # a prefill, and a decode
    torch.cuda.set_sync_debug_mode("default")
    for output in outputs:
        assert output.tokens.shape == (3,)
        assert output.token_ids.shape == (2, 4)
        assert (output.log_probs <= 0).all()


def test_the_parts_of_a_step_sum_to_it() -> None:
    scene = Scene("paged", device="cuda")
    executor = TorchExecutor(scene.model, scene.storage, scene.operations, scene.static(CudaGraphs()))
    for _ in range(3):
        plan = scene.step(7)
        start = time.perf_counter()
        seconds = executor.run(plan).seconds
        elapsed = time.perf_counter() - start
    assert min(seconds["model"], seconds["sample"]) > 0
    assert 0.3 * elapsed < sum(seconds.values()) <= elapsed


def test_the_command_records_what_it_used(run: Cli) -> None:
    common = ("model=tiny", "device=cuda", "workload.num_requests=6", "workload.chat_template=false")
    common += ("workload.output_tokens=8", "pool.size=4MiB", "measure.progress=false", "-m", "debug.audit=true")
    code, out, err = run(*common, "executor.decode=eager,auto")
    assert code == 0, err
    assert "identical in all 2 runs" in out
    assert {record.record["decode"] for record in run.runs()} == {"eager", "graphs"}
