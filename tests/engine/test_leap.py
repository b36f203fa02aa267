"""Steps taken at once leave exactly the records of steps taken one by one."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbench.allocator import Capability, Pool
from kvbench.config import Batching, Preemption, Prefill, SchedulerConfig
from kvbench.device_profile import DeviceProfile
from kvbench.engine import Engine
from kvbench.executors.cost_model import CostModel
from kvbench.executors.roofline import RooflineExecutor
from kvbench.geometry import ModelShape
from kvbench.plan import StepOutput, StepPlan
from kvbench.recorder import Recorder
from kvbench.request import Request, Sampling
from kvbench.scheduler import Scheduler
from kvbench.sequences import SequenceTable
from tests.engine.harness import ALLOCATORS, make_group

SHAPE = ModelShape(2, 4, 2, 16, 64, 50_000, 10_000, 70_000)
DEVICE = DeviceProfile(10**9, 1e9, 1e11, 1e8, transfer_s=1e-6, step_s=1e-3, sequence_s=1e-5)
MEASURED = replace(DEVICE, product_s=[[1.0, 1e-8], [3.0, 1.7e-8], [8.0, 1.1e-7], [24.0, 3e-7]])
MAX_TOKENS, MAX_ROWS = 64, 12


class Stepping(RooflineExecutor):
    """The same clock, which cannot be leapt over."""

    def foresee(self, num_rows: int, kv_tokens: int, num_steps: int, until_s: float) -> None:  # type: ignore[override]
        return None


def play(
    name: str, requests: list[Request], num_slots: int, config: SchedulerConfig, executor: RooflineExecutor, **options
) -> tuple[pd.DataFrame, pd.DataFrame, int, dict[int, list[float]]]:
    """Records of steps and requests, how many steps were taken one by one, and when each request's tokens came in
    them.
    """
    kind, policy = ALLOCATORS[name]
    swaps = Capability.SWAP in kind.supports
    allocator = kind(Pool(num_slots, MAX_ROWS, MAX_TOKENS, 96 if swaps else 0), **options)
    table = SequenceTable(MAX_ROWS, MAX_TOKENS)
    scheduler = Scheduler(allocator, table, config)
    recorder = Recorder(allocator, scheduler, table, keep_tokens=False)
    engine = Engine(scheduler, executor, recorder, audit=True)
    calls, came = 0, defaultdict[int, list[float]](list)
    run = executor.run

    def observed(plan: StepPlan) -> StepOutput:
        nonlocal calls
        calls += 1
        output = run(plan)
        rows = plan.rows[np.concatenate([plan.sample.rows, plan.sample.beam_rows])]
        for request_id in set(table.request_id[rows].tolist()):
            came[request_id].append(executor.now())
        return output

    executor.run = observed  # type: ignore[method-assign]
    end_s = engine.run([make_group(request, allocator, policy, MAX_TOKENS, ()) for request in requests])
    return recorder.steps(end_s), recorder.requests(), calls, came


GREEDY, SAMPLED = Sampling("greedy", ignore_eos=True), Sampling("sample", n=3, ignore_eos=True)
samplings = st.sampled_from([GREEDY, GREEDY, SAMPLED, Sampling("beam", beam_width=2, ignore_eos=True)])
drawn_requests = st.lists(
    st.tuples(
        st.integers(1, 20), st.integers(1, 40), st.integers(0, 60), samplings, st.sampled_from([None, None, 0, 1])
    ),
    min_size=1,
    max_size=9,
)
PREFIX_LENGTHS = (3, 16)
configs = st.builds(
    SchedulerConfig,
    max_batched_tokens=st.sampled_from([8, 64]),
    preemption=st.sampled_from([Preemption.auto, Preemption.recompute]),
    batching=st.sampled_from(Batching),
    prefill=st.sampled_from(Prefill),
    force_preemption_every=st.sampled_from([0, 0, 0, 5]),
)


def requests_from(drawn: list[tuple[int, int, int, Sampling, int | None]]) -> list[Request]:
    drawn = sorted(drawn, key=lambda entry: entry[2])
    requests = []
    for i, (prompt, output, arrival, sampling, prefix_id) in enumerate(drawn):
        shared = 0 if prefix_id is None else PREFIX_LENGTHS[prefix_id]
        tokens = np.broadcast_to(np.int32(0), shared + min(prompt, 40 - shared))
        requests.append(
            Request(i, tokens, arrival / 1000, min(output, 62 - len(tokens)), sampling, (), prefix_id, shared)
        )
    return requests


# Blocks run out in steps that are taken at once while the head of the queue stands refused.
SCARCE = [
    *(4 * [(1, 1, 0, GREEDY, None)] + [(1, 1, 0, GREEDY, 1)]),
    *((1, 17, 13, SAMPLED, 0), (1, 22, 12, GREEDY, None), (1, 25, 7, SAMPLED, None), (3, 31, 0, SAMPLED, None)),
]


@example(drawn=SCARCE, config=SchedulerConfig(max_batched_tokens=8), spare=9, block_size=16, device=DEVICE)
@pytest.mark.parametrize("name", ALLOCATORS)
@settings(max_examples=settings().max_examples // 3)  # of each of six allocators
@given(
    drawn=drawn_requests,
    config=configs,
    spare=st.integers(0, 60),
    block_size=st.sampled_from([1, 4, 16]),
    device=st.sampled_from([DEVICE, MEASURED]),
)
def test_leaping_equals_stepping_record_for_record(
    name: str,
    drawn: list[tuple[int, int, int, Sampling, int | None]],
    config: SchedulerConfig,
    spare: int,
    block_size: int,
    device: DeviceProfile,
) -> None:
    paged = name.startswith("paged")
    # What is resident and withheld, in whole blocks, beside the largest group.
    num_slots = 3 * (60 + block_size) + 5 * 16 + 19 + spare if paged else 4 * MAX_TOKENS + spare
    options = {"block_size": block_size} if paged else {}
    requests, cost = requests_from(drawn), CostModel(SHAPE, device, 2)
    leapt = play(name, requests, num_slots, config, RooflineExecutor(cost), **options)
    stepped = play(name, requests, num_slots, config, Stepping(cost), **options)
    pd.testing.assert_frame_equal(leapt[0], stepped[0], check_exact=True)
    pd.testing.assert_frame_equal(leapt[1], stepped[1], check_exact=True)
    assert leapt[2] <= stepped[2]
    for request in stepped[1].to_dict("records"):
        assert request["token_times_s"].tolist() == stepped[3][request["request_id"]]


@pytest.mark.parametrize("prefill", Prefill)
@pytest.mark.parametrize("name", ALLOCATORS)
def test_leaps_are_taken(name: str, prefill: Prefill) -> None:
    """Four requests that run undisturbed need one prefill and no decision after it."""
    requests = [Request(i, np.broadcast_to(np.int32(0), 5), 0.0, 40, Sampling(ignore_eos=True)) for i in range(4)]
    cost = CostModel(SHAPE, DEVICE, 2)
    steps, _, calls, _ = play(name, requests, 600, SchedulerConfig(prefill=prefill), RooflineExecutor(cost))
    assert len(steps) == 40
    assert calls == 1
    assert (np.diff(steps["start_s"]) > 0).all()
