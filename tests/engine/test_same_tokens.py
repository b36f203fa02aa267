"""Every allocator, block size and preemption gives the tokens of ``transformers``' ``generate``."""

import functools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from kvbench.config import Preemption, Prefill
from kvbench.request import Request, Sampling
from tests import tiny_models
from tests.engine.harness import Served, Setting, generate, serve
from tests.smollm2 import needs_smollm2, smollm2

SCORE_TOLERANCE = 1e-4
TIE = 1e-5


def settings() -> Iterator[Setting]:
    """Allocator x block size x {no preemption, forced recompute, forced swap}, and prefills beside decodes."""
    recompute = {"preemption": Preemption.recompute, "force_preemption_every": 2}
    swap = {"preemption": Preemption.swap, "force_preemption_every": 2}
    for allocator in ("static", "buddy_max", "buddy_pow2", "buddy_oracle"):
        yield Setting(allocator)
        yield Setting(allocator, **recompute)
    for block_size in (1, 8, 16, 64):
        options = {"block_size": block_size}
        for allocator in ("paged", "paged_swap"):
            yield Setting(allocator, options=options)
            yield Setting(allocator, options=options, **recompute)
        yield Setting("paged_swap", options=options, **swap)
    mixed = {"prefill": Prefill.mixed, "max_batched_tokens": 48}  # prompts come in over several steps
    for allocator in ("static", "buddy_oracle"):
        yield Setting(allocator, **mixed)
        yield Setting(allocator, **recompute, **mixed)
    for preempts in ({}, recompute, swap):
        yield Setting("paged_swap", options={"block_size": 8}, **preempts, **mixed)


def name_of(setting: Setting) -> str:
    forced = setting.preemption.value if setting.force_preemption_every else "undisturbed"
    mixed = ["mixed"] if setting.prefill is Prefill.mixed else []
    return "-".join([setting.allocator, *map(str, (setting.options or {}).values()), forced, *mixed])


SETTINGS = list(settings())
FEW = [
    setting
    for setting in SETTINGS
    if name_of(setting)
    in {"buddy_oracle-recompute", "paged-8-recompute", "paged_swap-16-swap", "paged_swap-8-recompute-mixed"}
]


def workload(vocab_size: int, *, new_tokens: int = 14, seed: int = 7) -> list[Request]:
    """Greedy, beam and sampled requests, together in one batch; even ids stop at EOS."""
    rng = np.random.default_rng(seed)
    modes = [
        Sampling("greedy"),
        Sampling("beam", beam_width=2),
        Sampling("beam", beam_width=4, length_penalty=0.6),
        Sampling("beam", beam_width=6, early_stopping=True),
        Sampling("sample", n=3, temperature=0.9, top_p=0.95, seed=11),
        Sampling("greedy"),
        Sampling("beam", beam_width=4, early_stopping="never", length_penalty=-0.5),
        Sampling("sample", n=3, seed=12),
        Sampling("greedy"),
    ]
    lengths = (5, 17, 32, 1, 24, 40, 9, 16, 33)
    return [
        Request(
            index,
            rng.integers(3, vocab_size, length).astype(np.int32),
            0.0,
            new_tokens + index % 3,
            Sampling(**{**vars(sampling), "ignore_eos": index % 2 == 1}),
        )
        for index, (sampling, length) in enumerate(zip(modes, lengths, strict=True))
    ]


@functools.cache
def family(name: str) -> tuple[PreTrainedModel, list[Request], tuple[int, ...], list]:
    """A tiny model, its workload, an EOS that beams do meet, and what transformers generates."""
    model = tiny_models.tiny_model(name)
    requests = workload(model.config.vocab_size)
    first, _ = generate(model, requests[0])
    eos = (first[0][6], 2)
    expected = [generate(model, request, eos) if request.sampling.mode != "sample" else None for request in requests]
    return model, requests, eos, expected


@functools.cache
def undisturbed(name: str) -> Served:
    model, requests, eos, _ = family(name)
    return serve(model, requests, Setting("paged"), eos)


def check(model: PreTrainedModel, served: Served, expected: list, samples: Served | None) -> None:
    for index, group in enumerate(served.groups):
        outputs = [group.outputs[i].tolist() for i in sorted(group.outputs)]
        if expected[index] is None:
            assert samples is not None
            reference = samples.groups[index].outputs
            assert outputs == [reference[i].tolist() for i in sorted(reference)]
            continue
        tokens, scores = expected[index]
        assert len(group.scores) == len(scores)
        np.testing.assert_allclose(group.scores, scores, atol=SCORE_TOLERANCE)
        if scores:
            assert_same_beams(outputs, tokens, scores)
        else:
            assert_same_greedy(model, group.request, outputs[0], tokens[0])


def assert_same_beams(outputs: list[list[int]], tokens: list[list[int]], scores: list[float]) -> None:
    """Equal hypotheses; those whose scores tie may stand in another order."""
    for i, (got, wanted) in enumerate(zip(outputs, tokens, strict=True)):
        ties = [tokens[j] for j in range(len(tokens)) if abs(scores[j] - scores[i]) <= TIE]
        assert got == wanted or got in ties, f"hypothesis {i}: {got} instead of {wanted}"


@torch.inference_mode()
def assert_same_greedy(model: PreTrainedModel, request: Request, got: list[int], wanted: list[int]) -> None:
    if got == wanted:
        return
    i = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b)
    model.set_attn_implementation("eager")
    ids = torch.tensor([*request.prompt.tolist(), *wanted[:i]])[None]
    logits = model(ids, use_cache=False).logits[0, -1]
    assert abs(float(logits[got[i]] - logits[wanted[i]])) <= TIE, f"token {i}: {got[i]} instead of {wanted[i]}"


def check_conservation(served: Served) -> None:
    """The parts sum to the pool at every step, and after the run everything is free."""
    steps = served.recorder.steps(served.end_s)
    parts = steps[["token_states", "reservation", "internal_fragmentation", "rounding", "free"]]
    usage = served.allocator.usage()
    assert (parts.sum(axis=1) == usage.num_slots).all()
    assert (parts >= 0).all(axis=None)
    assert usage.held == usage.host_held == 0
    assert usage.free + usage.rounding == usage.num_slots


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_llama(setting: Setting) -> None:
    model, requests, eos, expected = family("llama")
    served = serve(model, requests, setting, eos)
    check(model, served, expected, undisturbed("llama"))
    check_conservation(served)
    if setting.force_preemption_every:
        assert sum(group.num_preemptions > 0 for group in served.groups) > 4
    if setting.prefill is Prefill.mixed:
        assert (served.recorder.steps(served.end_s)["kind"] == "mixed").sum() > 1


@pytest.mark.parametrize("setting", FEW, ids=name_of)
@pytest.mark.parametrize("name", [name for name in tiny_models.FAMILIES if name != "llama"])
def test_families(name: str, setting: Setting) -> None:
    model, requests, eos, expected = family(name)
    served = serve(model, requests, setting, eos)
    check(model, served, expected, undisturbed(name))
    check_conservation(served)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting not in FEW], ids=name_of)
@pytest.mark.parametrize("name", [name for name in tiny_models.FAMILIES if name != "llama"])
def test_families_in_every_setting(name: str, setting: Setting) -> None:
    test_families(name, setting)


def test_a_scarce_pool_preempts_and_still_gives_the_same_tokens() -> None:
    """Preemption by need, not by force: the pool holds hardly more than one group."""
    model, requests, eos, expected = family("llama")
    for allocator in ("paged", "paged_swap"):
        served = serve(model, requests, Setting(allocator, num_slots=304, options={"block_size": 8}), eos)
        check(model, served, expected, undisturbed("llama"))
        check_conservation(served)
        assert sum(group.num_preemptions for group in served.groups) > 0


def test_the_host_tier_may_be_too_small() -> None:
    """A swap that the host cannot take becomes a recomputation."""
    model, requests, eos, expected = family("llama")
    setting = Setting("paged_swap", num_slots=304, num_host_slots=24, options={"block_size": 8})
    served = serve(model, requests, setting, eos)
    check(model, served, expected, undisturbed("llama"))
    assert sum(group.num_recomputed_tokens for group in served.groups) > 0


def test_samples_do_not_depend_on_the_batch() -> None:
    model, requests, eos, _ = family("llama")
    together = undisturbed("llama")
    for index in (4, 7):
        alone = serve(model, [requests[index]], Setting("static"), eos)
        for member, tokens in together.groups[index].outputs.items():
            assert alone.groups[0].outputs[member].tolist() == tokens.tolist()


@functools.cache
def on_smollm2() -> tuple[PreTrainedModel, list[Request], list]:
    loaded = smollm2()
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    texts = (
        "The capital of France is",
        "Translate to German: Good morning, my friend.",
        "def fibonacci(n):\n    ",
        "List three uses of a paper clip:\n1.",
        "Q: Why is the sky blue?\nA:",
        "Once upon a time, in a village by the sea, there lived a clockmaker who",
        "Dear team, thank you all for",
        "The three primary colours are red,",
    )
    sampling = [Sampling("greedy", ignore_eos=True), Sampling("beam", beam_width=4, ignore_eos=True)]
    requests = [
        Request(i, np.array(tokenizer.encode(text), np.int32), 0.0, 10, sampling[i % 2]) for i, text in enumerate(texts)
    ]
    return loaded.model, requests, [generate(loaded.model, request) for request in requests]


@needs_smollm2
@pytest.mark.parametrize("setting", FEW, ids=name_of)
def test_smollm2(setting: Setting) -> None:
    model, requests, expected = on_smollm2()
    setting = Setting(**{**vars(setting), "num_slots": 2048, "num_host_slots": 2048})
    served = serve(model, requests, setting)
    check(model, served, expected, None)
    check_conservation(served)


@pytest.mark.slow
@needs_smollm2
@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting not in FEW], ids=name_of)
def test_smollm2_in_every_setting(setting: Setting) -> None:
    test_smollm2(setting)
