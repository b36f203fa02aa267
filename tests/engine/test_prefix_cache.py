"""Prompts that are found again: the same tokens for less work, and what is found is counted."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from transformers import PreTrainedModel

from kvbench.config import Batching, Preemption, SchedulerConfig
from kvbench.request import Request, Sampling
from tests.engine.harness import Served, Setting, generate, serve
from tests.engine.scripted import VOCAB
from tests.engine.test_engine_laws import Run, check_pool, outputs, play
from tests.engine.test_prefix_tokens import llama
from tests.engine.test_same_tokens import check, check_conservation, name_of

FORCED = {"preemption": Preemption.recompute, "force_preemption_every": 2}
SETTINGS = [
    Setting("paged_prefix", options={"block_size": size}, **forced) for size in (1, 8, 16) for forced in ({}, FORCED)
]


@functools.cache
def repeated() -> tuple[PreTrainedModel, list[Request], tuple[int, ...], list, Served]:
    """The requests behind two prefixes; then those that are not sampled once more, and one that asks for more."""
    model, requests, eos, expected, _ = llama()
    again = [i for i, request in enumerate(requests) if request.sampling.mode != "sample"]
    longer = replace(requests[5], request_id=len(requests) + len(again), max_new_tokens=20)
    copies = [replace(requests[i], request_id=len(requests) + place) for place, i in enumerate(again)]
    served = [*requests, *copies, longer]
    wanted = [*expected, *(expected[i] for i in again), generate(model, longer, eos)]
    return model, served, eos, wanted, serve(model, served, Setting("paged"), eos)


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_tokens_are_those_of_whole_prompts(setting: Setting) -> None:
    model, requests, eos, expected, samples = repeated()
    served = serve(model, requests, setting, eos)
    check(model, served, expected, samples)
    check_conservation(served)
    found = [group.num_cached_tokens for group in served.groups]
    size = served.allocator.block_size
    assert all(tokens % size == 0 for tokens in found)
    assert sum(found[:9]) >= 16 * 2, "prompts behind a prefix find it"
    assert sum(found[9:]) > 0.6 * sum(len(request.prompt) for request in requests[9:]), "and prompts seen before"
    if setting.force_preemption_every:
        assert sum(group.num_preemptions > 0 for group in served.groups) > 4


def test_tokens_of_a_scarce_pool() -> None:
    """Content gives way to growth, and groups give way by need."""
    model, requests, eos, expected, samples = repeated()
    served = serve(model, requests, Setting("paged_prefix", num_slots=480, options={"block_size": 8}), eos)
    check(model, served, expected, samples)
    check_conservation(served)
    assert sum(group.num_preemptions for group in served.groups) > 0
    assert sum(group.num_cached_tokens for group in served.groups) > 0


def greedy(index: int, prompt: list[int], output: int = 2, arrival: float = 0.0, **sampling: int) -> Request:
    mode = Sampling("sample" if sampling else "greedy", ignore_eos=True, **sampling)
    return Request(index, np.array(prompt, np.int32) % VOCAB, arrival, output, mode)


def prefills(run: Run) -> list[int]:
    steps = run.recorder.steps(run.end_s)
    return steps.loc[steps["kind"] == "prefill", "num_new_tokens"].tolist()


def test_a_prompt_is_computed_behind_what_is_found() -> None:
    text = list(range(21))
    requests = [
        greedy(0, text),
        greedy(1, text, arrival=10),
        greedy(2, text[:16], arrival=20),
        greedy(3, [*text[:9], 15, *text], arrival=30),
        greedy(4, text[1:], arrival=40),
        greedy(5, text, arrival=50, n=3),
    ]
    run = play("paged_prefix", requests, 320, SchedulerConfig(), block_size=4)
    check_pool(run, 320)
    assert prefills(run) == [21, 21 - 20, 16 - 12, 31 - 8, 20, 21 - 20]
    assert run.recorder.requests()["num_cached_tokens"].tolist() == [0, 20, 12, 8, 0, 20]
    assert outputs(run) == outputs(play("paged", requests, 320, SchedulerConfig()))


def test_prompts_of_one_step_do_not_find_each_other() -> None:
    """Their KV is written by that very step."""
    run = play("paged_prefix", [greedy(i, list(range(9))) for i in range(3)], 160, SchedulerConfig(), block_size=4)
    assert prefills(run) == [27]


def test_the_limit_of_a_step_counts_what_is_computed() -> None:
    requests = [greedy(0, list(range(17)))] + [greedy(i, list(range(17)), arrival=9) for i in range(1, 5)]
    config = SchedulerConfig(max_batched_tokens=4)
    assert prefills(play("paged_prefix", requests, 320, config, block_size=4)) == [17, 4]
    assert prefills(play("paged", requests, 320, config, block_size=4)) == [17] * 5


def test_a_recomputation_finds_its_own_prompt() -> None:
    """Only what follows the prompt's full blocks is lost."""
    config = SchedulerConfig(preemption=Preemption.recompute, force_preemption_every=5)
    requests = [greedy(0, list(range(14)), 12)]
    run = play("paged_prefix", requests, 160, config, block_size=4)
    check_pool(run, 160)
    (group,) = run.groups
    # The KV of 14 + 4 tokens is dropped, then that of 19 + 4; 12 of them are found again.
    assert (group.num_preemptions, group.num_recomputed_tokens) == (2, (18 - 12) + (23 - 12))
    assert group.num_cached_tokens == 0, "what a request finds of itself is no hit"
    assert run.recorder.steps(run.end_s)["num_recomputed_tokens"].sum() == group.num_recomputed_tokens
    assert prefills(run) == [14, 19 - 12, 24 - 12]


def test_a_queue_that_was_refused_asks_again_when_content_is_written() -> None:
    """Of 9 blocks the first group takes 5; 5 more are 1 too many until 4 of them are known to be the same."""
    config = SchedulerConfig(batching=Batching.continuous)
    requests = [greedy(i, list(range(17)), 8) for i in range(2)]
    run = play("paged_prefix", requests, 36, config, block_size=4)
    check_pool(run, 36)
    steps = run.recorder.steps(run.end_s)
    assert steps["num_running"].tolist()[:2] == [1, 2]
    assert steps["refused"].tolist()[:2] == [True, False]
    assert not steps["stranded"].any()


def test_content_is_recorded_as_a_part_of_free() -> None:
    requests = [greedy(0, list(range(17))), greedy(1, [3], arrival=9)]
    steps = (run := play("paged_prefix", requests, 40, SchedulerConfig(), block_size=4)).recorder.steps(run.end_s)
    assert steps["cached"].tolist() == [0, 0, 16, 16, 16]
    assert steps["free"].tolist() == [20, 20, 40, 36, 36]
