"""Laws of the engine over random workloads, pools and allocators, on an executor that checks every read."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.allocator import Capability, Pool
from kvbench.config import Preemption, Prefill, SchedulerConfig
from kvbench.decision import Decision
from kvbench.engine import Engine
from kvbench.group import Group, Status
from kvbench.recorder import PARTS, Recorder
from kvbench.request import Request, Sampling
from kvbench.scheduler import Scheduler
from kvbench.sequences import SequenceTable
from tests.engine.harness import ALLOCATORS, make_group
from tests.engine.scripted import VOCAB, ScriptedExecutor

MAX_TOKENS = 48
EOS = (3,)


@dataclass
class Run:
    groups: list[Group]
    engine: Engine
    recorder: Recorder
    end_s: float


class Watched(Scheduler):
    """Checks of every step that it mixes as it should."""

    def admit(self) -> Decision:
        self._before = [(group, group.num_preemptions) for group in self.running]
        return super().admit()

    def complete(self, decision: Decision) -> None:
        super().complete(decision)
        went_on = [group for group, preemptions in self._before if group.num_preemptions == preemptions]
        if self.config.prefill is Prefill.mixed:
            assert all(group in decision.groups for group in went_on), "nobody waits for the prefills of others"
        else:
            assert decision.kind != "mixed"
        if len(decision.prefills) > 1:
            assert decision.num_new_tokens <= self.config.max_batched_tokens


def play(allocator_name: str, requests: list[Request], num_slots: int, config: SchedulerConfig, **options: int) -> Run:
    kind, policy = ALLOCATORS[allocator_name]
    swaps = Capability.SWAP in kind.supports
    allocator = kind(Pool(num_slots, 12, MAX_TOKENS, 96 if swaps else 0), **options)
    groups = [make_group(request, allocator, policy, MAX_TOKENS, EOS) for request in requests]
    table = SequenceTable(12, MAX_TOKENS)
    scheduler = Watched(allocator, table, config)
    recorder = Recorder(allocator, scheduler, table)
    executor = ScriptedExecutor(num_slots, 96)
    engine = Engine(scheduler, executor, recorder, eos=EOS, audit=True)
    return Run(groups, engine, recorder, engine.run(groups))


samplings = st.one_of(
    st.just(Sampling("greedy")),
    st.builds(Sampling, st.just("sample"), n=st.integers(2, 3), ignore_eos=st.booleans(), seed=st.integers(0, 99)),
    st.builds(Sampling, st.just("beam"), beam_width=st.integers(2, 4), ignore_eos=st.booleans()),
)
requests_strategy = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 14), st.integers(0, 30), samplings), min_size=1, max_size=8
)
configs = st.builds(
    SchedulerConfig,
    max_batched_tokens=st.sampled_from([8, 64]),
    preemption=st.sampled_from([Preemption.auto, Preemption.recompute]),
    force_preemption_every=st.sampled_from([0, 0, 2, 5]),
    prefill=st.sampled_from(Prefill),
)


def build(drawn: list[tuple[int, int, int, Sampling]]) -> list[Request]:
    rng = np.random.default_rng(len(drawn))
    drawn = sorted(drawn, key=lambda entry: entry[2])
    return [
        Request(index, rng.integers(0, VOCAB, length).astype(np.int32), float(arrival), output, sampling)
        for index, (length, output, arrival, sampling) in enumerate(drawn)
    ]


def outputs(run: Run) -> list[list[list[int]]]:
    return [[group.outputs[i].tolist() for i in sorted(group.outputs)] for group in run.groups]


@given(drawn=requests_strategy, config=configs, spare=st.integers(0, 60), block_size=st.sampled_from([1, 4, 16]))
def test_every_allocator_serves_the_same_tokens_and_leaves_the_pool_empty(
    drawn: list[tuple[int, int, int, Sampling]], config: SchedulerConfig, spare: int, block_size: int
) -> None:
    """Random work under a scarce pool: all finish, all agree, nothing leaks, the parts always sum to the pool."""
    requests = build(drawn)
    reference = None
    for name in ALLOCATORS:
        paged = name.startswith("paged")
        num_slots = (34 + 15) * 4 + spare if paged else 4 * 64 + spare
        run = play(name, requests, num_slots, config, **({"block_size": block_size} if paged else {}))
        assert all(group.status is Status.FINISHED for group in run.groups)
        reference = reference or outputs(run)
        assert outputs(run) == reference, name
        check_pool(run, num_slots)


def check_pool(run: Run, num_slots: int) -> None:
    steps = run.recorder.steps(run.end_s)
    assert (steps[list(PARTS)].sum(axis=1) == num_slots).all()
    assert (steps[list(PARTS)] >= 0).all(axis=None)
    assert (steps["duration_s"] >= 0).all()
    usage = run.engine.allocator.usage()
    assert usage.held == usage.host_held == usage.mapped == 0
    assert usage.free + usage.rounding == num_slots
    assert run.engine.table.num_free == 12


def greedy(index: int, prompt: int, output: int, arrival: float = 0.0) -> Request:
    tokens = (np.arange(prompt) + index) % VOCAB
    return Request(index, tokens.astype(np.int32), arrival, output, Sampling("greedy", ignore_eos=True))


def test_internal_fragmentation_is_what_a_sequence_never_writes() -> None:
    """Static regions of 48: a sequence that writes 9 slots in all wastes 39 for as long as it runs."""
    run = play("static", [greedy(0, 5, 5), greedy(1, 10, 3)], 2 * MAX_TOKENS + 7, SchedulerConfig())
    steps = run.recorder.steps(run.end_s)
    assert steps["internal_fragmentation"].tolist() == [39 + 36, 39 + 36, 39 + 36, 39, 39]
    assert steps["reservation"].tolist() == [4 + 2, 3 + 1, 2 + 0, 1, 0]
    assert steps["free"].tolist() == [7, 7, 7, 7 + MAX_TOKENS, 7 + MAX_TOKENS]


def test_eos_turns_the_rest_of_a_reservation_into_internal_fragmentation() -> None:
    """The end is known only afterwards, and then attributed to every step before it."""
    stopping = Request(0, np.arange(6, dtype=np.int32), 0.0, 40, Sampling("greedy"))
    run = play("buddy_max", [stopping], 64, SchedulerConfig())
    output = run.groups[0].outputs[0]
    assert output[-1] == EOS[0]
    assert 1 < len(output) < 40
    steps = run.recorder.steps(run.end_s)
    written = 6 + len(output) - 1
    assert (steps["internal_fragmentation"] == MAX_TOKENS - written).all()
    assert steps["reservation"].iloc[-1] == 0
    assert (steps["rounding"] == 16).all()


def test_stranded_slots_are_free_ones_that_no_request_could_use() -> None:
    """Three static regions leave 40 slots over: the fourth request waits although it needs only 20."""
    requests = [greedy(i, 10, 11) for i in range(4)]
    run = play("static", requests, 3 * MAX_TOKENS + 40, SchedulerConfig())
    steps = run.recorder.steps(run.end_s)
    refused = steps[steps["refused"]]
    assert len(refused) == 11
    assert (refused["stranded"] == 0).all(), "48 slots were asked for, 40 were free"
    run = play("buddy_oracle", requests, 3 * 32 + 31, SchedulerConfig())
    steps = run.recorder.steps(run.end_s)
    refused = steps[steps["refused"]]
    assert len(refused) > 0
    assert (refused["stranded"] == refused["free"]).all(), "20 slots were asked for, 31 were free in pieces"


@pytest.mark.parametrize("name", ["paged", "paged_swap"])
def test_the_latest_arrival_yields_and_nobody_overtakes(name: str) -> None:
    requests = [greedy(i, 12, 30, arrival=float(i)) for i in range(5)]
    run = play(name, requests, 96, SchedulerConfig(), block_size=4)
    preemptions = [group.num_preemptions for group in run.groups]
    assert preemptions[0] == 0
    assert sum(preemptions) > 0
    admitted = [group.admitted_s for group in run.groups]
    finished = [group.finished_s for group in run.groups]
    assert admitted == sorted(admitted)
    assert finished == sorted(finished)
    steps = run.recorder.steps(run.end_s)
    newly = steps["num_running"].diff().fillna(0) > 0
    waiting_before = steps["num_preempted"].shift(fill_value=0) > 0
    admissions = steps[newly & waiting_before]
    assert (admissions["num_waiting"].diff().fillna(0) == 0).all(), "no admission while a preempted group waits"


def test_a_swap_keeps_what_a_recomputation_repeats() -> None:
    requests = [greedy(i, 12, 30) for i in range(4)]
    swapped = play("paged_swap", requests, 96, SchedulerConfig(preemption=Preemption.swap), block_size=4)
    repeated = play("paged_swap", requests, 96, SchedulerConfig(preemption=Preemption.recompute), block_size=4)
    assert outputs(swapped) == outputs(repeated)
    for run, kept in ((swapped, True), (repeated, False)):
        preempted = [group for group in run.groups if group.num_preemptions]
        assert preempted
        assert all((group.num_recomputed_tokens == 0) == kept for group in preempted)
        assert all((group.num_swapped_slots > 0) == kept for group in preempted)


def test_idle_time_is_recorded() -> None:
    """A gap between arrivals counts as time in which the pool was free."""
    run = play("paged", [greedy(0, 4, 3), greedy(1, 4, 3, arrival=100.0)], 64, SchedulerConfig())
    steps = run.recorder.steps(run.end_s)
    idle = steps[steps["kind"] == "idle"]
    assert idle["duration_s"].tolist() == [97.0]
    assert idle["free"].tolist() == [64]
