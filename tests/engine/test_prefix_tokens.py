"""A real model behind shared prefixes gives the tokens that it gives to whole prompts."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from transformers import PreTrainedModel

from kvbench.config import Preemption, Prefill
from kvbench.request import Request
from kvbench.workload import build
from kvbench.workload_config import PrefixConfig, WorkloadConfig
from tests.engine.harness import Served, Setting, generate, serve
from tests.engine.test_same_tokens import SETTINGS, check, check_conservation, family, name_of
from tests.smollm2 import needs_smollm2, smollm2

PREFIX_LENGTHS = (21, 16)
FORCED = {"force_preemption_every": 2}
FEW = [
    Setting("static", preemption=Preemption.recompute, **FORCED),
    *(Setting("paged", options={"block_size": size}) for size in (1, 16)),
    *(Setting("paged", options={"block_size": size}, preemption=Preemption.recompute, **FORCED) for size in (1, 16)),
    *(Setting("paged_swap", options={"block_size": size}, preemption=Preemption.swap, **FORCED) for size in (1, 16)),
]


def alone(request: Request) -> Request:
    return replace(request, prefix_id=None, num_prefix_tokens=0)


@functools.cache
def llama() -> tuple[PreTrainedModel, list[Request], tuple[int, ...], list, Served]:
    """Greedy, beam and sampled requests behind two prefixes, what transformers generates, and what is sampled."""
    model, plain, eos, _ = family("llama")
    rng = np.random.default_rng(1)
    prefixes = [rng.integers(3, model.config.vocab_size, length).astype(np.int32) for length in PREFIX_LENGTHS]
    requests = [
        replace(
            request,
            prompt=np.concatenate([prefixes[index % 2], request.prompt]),
            prefix_id=index % 2,
            num_prefix_tokens=PREFIX_LENGTHS[index % 2],
        )
        for index, request in enumerate(plain)
    ]
    expected = [generate(model, request, eos) if request.sampling.mode != "sample" else None for request in requests]
    return model, requests, eos, expected, serve(model, [alone(r) for r in requests], Setting("paged"), eos)


@pytest.mark.parametrize("setting", FEW, ids=name_of)
def test_llama(setting: Setting) -> None:
    model, requests, eos, expected, samples = llama()
    served = serve(model, requests, setting, eos)
    check(model, served, expected, samples)
    check_conservation(served)
    if setting.force_preemption_every:
        assert sum(group.num_preemptions > 0 for group in served.groups) > 4
    elif setting.allocator.startswith("paged") and setting.prefill is Prefill.separate:  # else decodes count, too
        steps = served.recorder.steps(served.end_s)
        prefilled = steps.loc[steps["kind"] == "prefill", "num_new_tokens"].sum()
        assert prefilled == sum(len(request.prompt) - request.num_prefix_tokens for request in requests)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_llama_in_every_setting(setting: Setting) -> None:
    test_llama(setting)


def test_a_scarce_pool() -> None:
    """Preemption by need: the pool holds the prefixes and hardly more than one group."""
    model, requests, eos, expected, samples = llama()
    for allocator in ("paged", "paged_swap"):
        served = serve(model, requests, Setting(allocator, num_slots=504, options={"block_size": 8}), eos)
        check(model, served, expected, samples)
        check_conservation(served)
        assert sum(group.num_preemptions for group in served.groups) > 0


@functools.cache
def on_smollm2() -> tuple[PreTrainedModel, list[Request], list]:
    """The shipped prompts behind two texts, as the workload makes them."""
    loaded = smollm2()
    assert loaded.tokenizer is not None
    cfg = WorkloadConfig(
        num_requests=3, output_tokens=4, chat_template=False, ignore_eos=True, prefix=PrefixConfig(37, num_prefixes=2)
    )
    requests = build(cfg, loaded.tokenizer, vocab_size=2**30, max_tokens=512, seed=0).requests
    assert {request.prefix_id for request in requests} == {0, 1}
    return loaded.model, requests, [generate(loaded.model, request) for request in requests]


@needs_smollm2
@pytest.mark.parametrize(
    "setting", [FEW[4], *(pytest.param(setting, marks=pytest.mark.slow) for setting in (FEW[2], FEW[6]))], ids=name_of
)
def test_smollm2(setting: Setting) -> None:
    model, requests, expected = on_smollm2()
    served = serve(model, requests, replace(setting, max_tokens=512), ())
    check(model, served, expected, None)
    check_conservation(served)
