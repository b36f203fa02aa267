"""Decoding on fixed tensors: the bits, and the tokens, of steps that are planned anew each time."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import kernels
from kvbench import torch_backend
from kvbench.allocator import Layout
from kvbench.config import Config, Decode
from kvbench.errors import ConfigError
from kvbench.executors.attention import NAME
from kvbench.executors.static_decode import Action, bucket_sizes
from kvbench.executors.torch_executor import TorchExecutor
from tests import tiny_models
from tests.cli import Cli
from tests.engine.harness import Setting, as_it_is, serve
from tests.engine.scene import LAYOUTS, MAX_ROWS, Scene, every_kind_of_pick
from tests.engine.tape import NoReads, Tape
from tests.engine.test_same_tokens import check, check_conservation, family, name_of, undisturbed
from tests.test_cli import TINY
from tests.tiny_models import FAMILIES

SETTINGS = [
    Setting("static"),
    Setting("buddy_pow2", force_preemption_every=2),
    Setting("paged", options={"block_size": 1}, force_preemption_every=2),
    Setting("paged", options={"block_size": 16}, max_rows=33),
    Setting("paged_swap", options={"block_size": 8}, force_preemption_every=2),
    Setting("paged", options={"block_size": 16}, lean=True),
]


class NoKernels:
    """Attention of a test that is about everything else."""

    def store_kv(self, *args: Tensor) -> None:
        pass

    def decode_attention(self, query: Tensor, *args: Any, **options: Any) -> Tensor:
        return query.clone()


@pytest.mark.parametrize("model", ["llama", "gemma2", "opt"])
@pytest.mark.parametrize("allocator", LAYOUTS)
@torch.inference_mode()
def test_logits_and_pool_are_those_of_a_planned_step(allocator: str, model: str) -> None:
    """Every batch size, padded or not; equal bits where the batch needs no padding."""
    scene = Scene(allocator, model=model)
    static = scene.static()
    for count in (20, 1, 2, 3, 4, 7, 8, 9, 16, 17):
        plan = scene.step(count)
        expected, pool = scene.planned(plan)
        logits = static.logits(plan)
        assert logits.shape == expected.shape
        torch.testing.assert_close(logits, expected)
        torch.testing.assert_close(scene.storage.kv, pool, equal_nan=True)
        if count in static.bucket_sizes:
            assert torch.equal(logits, expected)
            assert torch.equal(scene.storage.kv.nan_to_num(7.0), pool.nan_to_num(7.0))


@pytest.mark.parametrize("allocator", LAYOUTS)
@given(seed=st.integers(0, 2**32 - 1), counts=st.lists(st.integers(1, MAX_ROWS), min_size=1, max_size=4))
@settings(max_examples=8, deadline=None)
@torch.inference_mode()
def test_earlier_steps_leave_no_trace(allocator: str, seed: int, counts: list[int]) -> None:
    """After steps of any size and rows that came and went: the bits of a runner that starts now."""
    scene = Scene(allocator, seed)
    static = scene.static()
    for count in counts:
        static.logits(scene.step(count))
        scene.replace_rows(count // 2)
    plan = scene.step(counts[0])
    before = scene.storage.kv.clone()
    used = static.logits(plan).clone()
    scene.storage.kv.copy_(before)
    assert torch.equal(used, scene.static().logits(plan))
    assert not used.isnan().any()


def test_no_kv_is_written_for_padding() -> None:
    """A runner that starts changes no slot, three rows in a bucket of four change three."""
    for allocator in LAYOUTS:
        scene = Scene(allocator)
        before = scene.storage.kv.clone()
        static = scene.static()
        plan = scene.step(3)
        with torch.inference_mode():
            static.logits(plan)
        changed = (scene.storage.kv.nan_to_num(7.0) != before.nan_to_num(7.0)).flatten(3).any(-1).flatten(0, 1)
        assert changed.all(0).nonzero().squeeze(-1).tolist() == sorted(plan.slots.tolist())
        assert torch.equal(changed.any(0), changed.all(0))


@given(st.integers(1, 2000))
def test_padding_is_small(max_rows: int) -> None:
    sizes = bucket_sizes(max_rows)
    assert sizes[-1] == max_rows
    for below, size in zip([0, *sizes], sizes, strict=False):
        assert below < size <= max(2 * below, below + 16)
        assert size - below <= 16


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_engine_gives_the_same_tokens(setting: Setting) -> None:
    model, requests, eos, expected = family("llama")
    served = serve(model, requests, replace(setting, record=as_it_is), eos)
    check(model, served, expected, undisturbed("llama"))
    check_conservation(served)


@pytest.mark.parametrize(
    ("name", "allocator"),
    [
        ("llama", "static"),
        ("llama", "paged"),
        ("gemma2", "paged"),
        *(pytest.param(name, "paged", marks=pytest.mark.slow) for name in FAMILIES if name not in ("llama", "gemma2")),
    ],
)
def test_what_is_recorded_holds_for_later_steps(name: str, allocator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed from a tape, which bakes in all but the contents of fixed tensors, steps give the same tokens."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # as in a recording
    model, requests, eos, expected = family(name)
    tape = Tape(kernels.load("cpu"))
    served = serve(model, requests, Setting(allocator, max_rows=33, record=tape), eos, audit=False)
    check(model, served, expected, undisturbed(name))
    assert tape.num_replays > 10


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_reads_nothing_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the model, in a recorded step, nor any kind of sampling makes the host wait for the device."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    scene = Scene("paged", model=name)
    scene.operations = scene.storage.kernels = NoKernels()
    executor = TorchExecutor(scene.model, scene.storage, scene.operations, scene.static())
    plan = scene.step(5)
    plan.sample = every_kind_of_pick()
    with NoReads():
        output = executor.run(plan)
    assert output.tokens.shape == (3,)
    assert output.log_probs.shape == output.token_ids.shape == (2, 4)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt2"])
def test_a_prefill_reads_nothing_back(name: str) -> None:
    """GPT-2 of transformers looks for padding among its tokens whenever it is not recorded."""
    scene = Scene("paged", model=name)
    with NoReads():
        TorchExecutor(scene.model, scene.storage, scene.operations).warm_up(Layout.PAGED, 4)


def test_a_model_that_reads_back_is_noticed() -> None:
    """RoPE whose frequencies follow the longest position looks at it in every step."""
    dynamic = LlamaConfig(
        **tiny_models.GROUPED, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    scene = Scene("paged")
    scene.model = AutoModelForCausalLM.from_config(dynamic, attn_implementation=NAME).eval()
    with pytest.raises(AssertionError, match="makes the host wait"):
        scene.static(Tape(scene.operations))


def test_a_model_that_cannot_be_recorded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(action: Action) -> Action:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch_backend, "CudaGraphs", lambda: refuse)
    scene = Scene("paged")
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM cannot be recorded .*: operation not .*decode=eager"):
        torch_backend._record(scene.model, scene.storage, scene.allocator.pool, scene.allocator)


def test_the_command_decodes_on_fixed_tensors(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the setting changes but the recording itself."""
    monkeypatch.setattr(torch_backend, "CudaGraphs", lambda: as_it_is)
    monkeypatch.setattr(torch_backend, "_decode", lambda cfg, device: cfg.executor.decode)
    code, out, err = run(*TINY, "-m", "executor.kernels=cpu", "executor.decode=eager,graphs", "allocator=static,paged")
    assert code == 0, err
    assert "identical in all 4 runs" in out
    assert sorted(record.record["decode"] for record in run.runs()) == ["eager", "eager", "graphs", "graphs"]


def test_choice() -> None:
    cfg = Config()
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert torch_backend._decode(cfg, cpu) is Decode.eager
    assert torch_backend._decode(cfg, cuda) is Decode.graphs
    cfg.executor.decode = Decode.graphs
    assert torch_backend._decode(cfg, cuda) is Decode.graphs
    with pytest.raises(
        ConfigError, match=r"executor.decode: graphs cannot be had: the device is cpu.*; use auto or eager"
    ):
        torch_backend._decode(cfg, cpu)
    cfg.executor.kernels = "reference"
    with pytest.raises(ConfigError, match=r"kernels are reference, not triton \(executor.kernels\)"):
        torch_backend._decode(cfg, cuda)
    cfg.executor.decode = Decode.eager
    assert torch_backend._decode(cfg, cuda) is Decode.eager
