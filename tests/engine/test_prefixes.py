"""Prompts with a common beginning: the same tokens for less memory, and nothing else changes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocators.paged import PagedAllocator
from allocators.paged_swap import PagedSwapAllocator
from kvbench.allocator import Capability, Pool
from kvbench.config import Preemption, SchedulerConfig
from kvbench.errors import ConfigError
from kvbench.group import Status
from kvbench.prefixes import ResidentPrefixes, resident
from kvbench.request import Request, Sampling
from kvbench.sequences import SequenceTable
from tests.engine.harness import ALLOCATORS
from tests.engine.scripted import VOCAB
from tests.engine.test_engine_laws import Run, check_pool, configs, outputs, play, samplings

PREFIXES = (np.arange(5) % VOCAB, np.arange(17) % VOCAB, np.arange(16)[::-1] % VOCAB)


def behind(request: Request, prefix_id: int) -> Request:
    prefix = PREFIXES[prefix_id]
    prompt = np.concatenate([prefix, request.prompt]).astype(np.int32)
    return replace(request, prompt=prompt, prefix_id=prefix_id, num_prefix_tokens=len(prefix))


def alone(request: Request) -> Request:
    return replace(request, prefix_id=None, num_prefix_tokens=0)


def greedy(index: int, prefix_id: int, prompt: int, output: int, arrival: float = 0.0) -> Request:
    tokens = np.full(prompt, index % VOCAB, np.int32)
    return behind(Request(index, tokens, arrival, output, Sampling("greedy", ignore_eos=True)), prefix_id)


drawn_requests = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 14), st.integers(0, 30), samplings, st.sampled_from([None, 0, 1, 2])),
    min_size=1,
    max_size=8,
)


@given(drawn=drawn_requests, config=configs, spare=st.integers(0, 60), block_size=st.sampled_from([1, 4, 16]))
def test_every_allocator_serves_the_tokens_of_prompts_that_share_nothing(
    drawn: list[tuple], config: SchedulerConfig, spare: int, block_size: int
) -> None:
    """Random work under a scarce pool, with and without a prefix, checked slot by slot at every step."""
    rng = np.random.default_rng(len(drawn))
    requests = []
    for index, (length, output, arrival, sampling, prefix_id) in enumerate(sorted(drawn, key=lambda entry: entry[2])):
        request = Request(index, rng.integers(0, VOCAB, length).astype(np.int32), float(arrival), output, sampling)
        requests.append(request if prefix_id is None else behind(request, prefix_id))
    reference = outputs(play("paged", [alone(request) for request in requests], 1024, SchedulerConfig()))
    for name in ALLOCATORS:
        paged = name.startswith("paged")
        # The prefixes, a group of four rows of 43 tokens, and the watermark: all in whole blocks.
        num_slots = 38 + 3 * 16 + 4 * (43 + 15) + 64 + spare if paged else 4 * 64 + spare
        run = play(name, requests, num_slots, config, **({"block_size": block_size} if paged else {}))
        assert all(group.status is Status.FINISHED for group in run.groups)
        assert outputs(run) == reference, name
        check_pool(run, num_slots)


def steps_of(run: Run, kind: str):
    steps = run.recorder.steps(run.end_s)
    return steps[steps["kind"] == kind]


def test_a_prefix_is_computed_once_and_held_from_start_to_end() -> None:
    """While nobody runs the pool holds the 17 tokens of a prefix, and the rest of its second block of 16 for ever."""
    requests = [greedy(i, 1, 3, 2, arrival=5.0 + 10 * i) for i in range(2)]
    run = play("paged", requests, 160, SchedulerConfig(), block_size=16)
    idle = steps_of(run, "idle")
    assert (idle["token_states"] == 17).all()
    assert (idle["internal_fragmentation"] == 15).all()
    assert (idle["reservation"] == 0).all()
    assert idle["start_s"].iloc[0] == 0
    prefills = steps_of(run, "prefill")
    assert prefills["num_new_tokens"].tolist() == [3, 3]
    assert prefills["cow_slots"].tolist() == [16, 16]
    assert prefills["token_states"].tolist() == [17 + 1 + 3, 17 + 1 + 3]
    assert prefills["mapped"].tolist() == [2 * 16 + 2 * 16, 2 * 16 + 2 * 16]


def test_a_prefix_of_whole_blocks_is_never_copied() -> None:
    requests = [greedy(i, 2, 3, 2) for i in range(4)]
    run = play("paged", requests, 160, SchedulerConfig(), block_size=16)
    steps = run.recorder.steps(run.end_s)
    assert steps["cow_slots"].sum() == 0
    assert steps["token_states"].tolist() == [16 + 4 * 3, 16 + 4 * 4]
    assert steps["mapped"].tolist() == [16 + 4 * 32, 16 + 4 * 32]


@pytest.mark.parametrize("name", ["static", "buddy_oracle"])
def test_allocators_that_cannot_share_compute_the_whole_prompt(name: str) -> None:
    requests = [greedy(i, 1, 3, 2) for i in range(2)]
    run = play(name, requests, 160, SchedulerConfig())
    assert run.recorder.steps(run.end_s)["num_new_tokens"].tolist() == [40, 2]


def test_a_recomputation_starts_behind_the_prefix() -> None:
    """Only what follows the prefix is lost, and computed again."""
    config = SchedulerConfig(preemption=Preemption.recompute)
    requests = [greedy(i, 2, 4, 24) for i in range(5)]
    run = play("paged", requests, 16 + 72, config, block_size=4)
    check_pool(run, 16 + 72)
    preempted = [group for group in run.groups if group.num_preemptions]
    assert preempted
    assert outputs(run) == outputs(play("paged", [alone(r) for r in requests], 1024, SchedulerConfig()))
    steps = run.recorder.steps(run.end_s)
    prefilled = steps.loc[steps["kind"] == "prefill", "num_new_tokens"].sum()
    # A preempted group has one token more than KV: it is known, and computed with the rest.
    again = sum(group.num_preemptions + group.num_recomputed_tokens for group in preempted)
    assert prefilled == 5 * 4 + again


def test_a_swapped_group_takes_a_copy_along_and_leaves_the_prefix() -> None:
    config = SchedulerConfig(preemption=Preemption.swap)
    requests = [greedy(i, 2, 4, 24) for i in range(5)]
    run = play("paged_swap", requests, 16 + 72, config, block_size=4)
    check_pool(run, 16 + 72)
    preempted = [group for group in run.groups if group.num_preemptions]
    assert preempted
    assert any(group.num_swapped_slots for group in preempted)
    assert all(group.num_swapped_slots == 0 or group.num_swapped_slots >= 2 * (16 + 4) for group in preempted)
    assert outputs(run) == outputs(play("paged", [alone(r) for r in requests], 1024, SchedulerConfig()))
    assert (run.recorder.steps(run.end_s)["token_states"] >= 16).all()


@pytest.mark.parametrize(("num_new", "num_running"), [(28, [2]), (29, [1, 1])])
def test_the_watermark_is_kept(num_new: int, num_running: list[int]) -> None:
    """Of 20 blocks the prefix holds 4 and two stay free: two admissions of 7 blocks fit at once, of 8 they do not."""
    run = play(
        "paged", [greedy(i, 2, num_new, 1) for i in range(2)], 80, SchedulerConfig(), block_size=4, watermark=0.1
    )
    steps = run.recorder.steps(run.end_s)
    assert steps["num_running"].tolist() == num_running
    assert steps["refused"].tolist() == [False] if len(num_running) == 1 else [True, False]
    assert (steps["stranded"] == 0).all(), "29 slots were asked for, 24 were not withheld"


def test_slots_that_cannot_hold_the_copied_block_are_not_stranded() -> None:
    """Of 11 blocks the prefix holds 5 and one is withheld: of two requests that take 3, 2 are left for the second."""
    run = play("paged", [greedy(i, 1, 8, 1) for i in range(2)], 44, SchedulerConfig(), block_size=4)
    steps = run.recorder.steps(run.end_s)
    assert steps["refused"].tolist() == [True, False]
    assert (steps["stranded"] == 0).all(), "8 tokens and the copy of 1 were asked for, 8 slots were not withheld"


def placed(allocator, num_rows: int = 8) -> tuple[ResidentPrefixes, SequenceTable]:
    table = SequenceTable(num_rows, 48)
    prefixes = ResidentPrefixes(allocator, table)
    prefixes.add(1, PREFIXES[1])
    return prefixes, table


@pytest.mark.parametrize("kind", [PagedAllocator, PagedSwapAllocator])
@pytest.mark.parametrize("num_blocks", range(5, 12))
@pytest.mark.parametrize("num_new", [1, 3, 4, 9, 20])
def test_admission_takes_what_an_ordinary_one_would_or_nothing(kind, num_blocks: int, num_new: int) -> None:
    """Behind 17 tokens in blocks of 4 a group needs a copy of the fifth block, and new ones; one block is withheld."""
    allocator = kind(Pool(4 * num_blocks, 8, 48, 64), block_size=4)
    prefixes, _ = placed(allocator)
    before, rows = allocator.usage(), np.array([5, 3, 6])
    request = greedy(0, 1, num_new, 1)
    grant = prefixes.extend(request, rows, num_new)
    allocator.check_integrity()
    num_blocks_needed = -(-(1 + num_new) // 4)
    assert (grant is not None) == (num_blocks_needed <= num_blocks - 5 - 1)
    if grant is None:
        assert allocator.usage() == before
        assert (allocator.num_tokens(rows) == 0).all()
        return
    assert allocator.num_tokens(rows).tolist() == [17 + num_new] * 3
    assert allocator.usage().free == before.free - 4 * num_blocks_needed
    own = allocator.slots(np.repeat(5, num_new), 17 + np.arange(num_new))
    assert grant.slots.tolist() == own.tolist()
    assert grant.num_copied_slots == 4
    allocator.free(rows)
    assert allocator.usage() == before
    prefixes.free()
    assert allocator.usage().free == 4 * num_blocks


def test_who_can_keep_prefixes() -> None:
    requests = [greedy(0, 1, 3, 2), alone(greedy(1, 2, 3, 2)), greedy(2, 1, 9, 2)]
    kept = resident(requests, frozenset({Capability.FORK_SHARES}))
    assert {key: tokens.tolist() for key, tokens in kept.items()} == {1: PREFIXES[1].tolist()}
    assert resident(requests, frozenset({Capability.SWAP})) == {}
    assert resident(requests, frozenset({Capability.FORK_SHARES, Capability.RESERVES_GROWTH})) == {}


@pytest.mark.parametrize(("prefix_id", "num_tokens"), [(0, 0), (0, 3), (0, -1), (None, 1)])
def test_a_prefix_is_a_proper_part_of_its_prompt(prefix_id: int | None, num_tokens: int) -> None:
    with pytest.raises(
        ConfigError, match=r"^workload\.prefix: -?\d is not legal; it must be 1 to 2 tokens of this prompt"
    ):
        Request(0, np.ones(3, np.int32), 0.0, 1, Sampling(), (), prefix_id, num_tokens)
