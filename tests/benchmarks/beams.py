"""What beams cost the engine: ``python -m tests.benchmarks.beams [--rounds N] [--profile]``.

30 beam searches of width 4, 20 prompt and 64 output tokens each, paged allocator, no model: candidates are
random (``search``) or the beams replayed (``replay``). Median microseconds per step, and of a replay's
``advance`` alone; --profile lists the functions where the time of a replay goes.
"""

import argparse
import cProfile
import pstats
import statistics
from time import perf_counter

import numpy as np

from allocators.paged import PagedAllocator
from kvbench.allocator import Pool
from kvbench.beam import Beams, BeamSearch
from kvbench.config import SchedulerConfig
from kvbench.engine import Engine
from kvbench.group import Group
from kvbench.plan import StepOutput, StepPlan
from kvbench.recorded_beams import ReplayedBeams, shipped_parents
from kvbench.recorder import Recorder
from kvbench.request import Request, Sampling
from kvbench.scheduler import Scheduler
from kvbench.sequences import SequenceTable

NUM_GROUPS, WIDTH, PROMPT, OUTPUT, MAX_TOKENS = 30, 4, 20, 64, 2048


class NoModel:
    """Random candidates, drawn beforehand, at no time."""

    draws_tokens = True

    def __init__(self) -> None:
        count = NUM_GROUPS * WIDTH, 2 * WIDTH
        self._log_probs = -np.sort(np.random.default_rng(0).exponential(size=count), axis=1).astype(np.float32)
        self._token_ids = np.zeros(count, np.int64)
        self._steps = 0

    def start(self) -> None: ...

    def now(self) -> float:
        return float(self._steps)

    def wait_until(self, time_s: float) -> None: ...

    def foresee(self, num_rows: int, kv_tokens: int, num_steps: int, until_s: float) -> None: ...

    def run(self, plan: StepPlan) -> StepOutput:
        self._steps += 1
        rows, k = len(plan.sample.beam_rows), plan.sample.num_candidates
        return StepOutput(np.zeros(0, np.int64), self._log_probs[:rows, :k], self._token_ids[:rows, :k])


def beams(kind: str, request_id: int) -> Beams:
    if kind == "search":
        return BeamSearch(WIDTH, OUTPUT)
    return ReplayedBeams(shipped_parents(WIDTH), OUTPUT, seed=0, request_id=request_id)


def run(kind: str) -> float:
    """Microseconds per step."""
    sampling = Sampling("beam", beam_width=WIDTH, ignore_eos=True)
    prompt = np.zeros(PROMPT, np.int32)
    requests = [Request(index, prompt, 0.0, OUTPUT, sampling) for index in range(NUM_GROUPS)]
    allocator = PagedAllocator(Pool(2**15, 256, MAX_TOKENS))
    table = SequenceTable(256, MAX_TOKENS)
    scheduler = Scheduler(allocator, table, SchedulerConfig())
    engine = Engine(scheduler, NoModel(), Recorder(allocator, scheduler, table))
    groups = [Group(request, PROMPT + OUTPUT, beams(kind, request.request_id)) for request in requests]
    start = perf_counter()
    num_steps = engine.run(groups)
    return 1e6 * (perf_counter() - start) / num_steps


def advance() -> float:
    """Microseconds per ``ReplayedBeams.advance``."""
    nothing = np.empty((WIDTH, 0), np.int64)
    replay = ReplayedBeams(shipped_parents(WIDTH), OUTPUT, seed=0, request_id=0)
    start = perf_counter()
    while not replay.done:
        replay.advance(nothing, nothing, nothing)
    return 1e6 * (perf_counter() - start) / OUTPUT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    measures = {"search": lambda: run("search"), "replay": lambda: run("replay"), "advance": advance}
    samples = [{name: measure() for name, measure in measures.items()} for _ in range(arguments.rounds)]
    for name in measures:
        print(f"{name}: {statistics.median(sample[name] for sample in samples):.2f} us")
    if arguments.profile:
        profile = cProfile.Profile()
        profile.runcall(run, "replay")
        pstats.Stats(profile).sort_stats("cumulative").print_stats(30)


if __name__ == "__main__":
    main()
