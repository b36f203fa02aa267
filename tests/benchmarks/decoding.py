"""Decoding speed of the engine, interleaved over settings.

``python -m tests.benchmarks.decoding [--rounds N] [--vary KEY=A,B] KEY=VALUE ...``

Every round runs each varied setting once, in turn, in one process; medians and the ratio to the first are
printed, with the parts of a step's time. The settings are those of ``python -m kvbench``. Aims, on two
cores and with nothing else running (SmolLM2, ``allocator=paged``):

* 32 requests, 160 prompt and 200 output tokens on average, all at once, greedy:
  ``workload=lengths workload.lengths=FILE dtype=bfloat16 device.num_threads=1``: 180 output tokens/s,
  256 with two threads.
* 4 prompts of 160, 127, 255 and 157 tokens, 4 beams, 64 tokens:
  ``workload=lengths workload.lengths=FILE workload.num_requests=4 workload.mode=beam workload.beam_width=4``:
  7.5 s with one thread in bfloat16.

Where a decode step's time goes, in ms of one thread's processor time (medians, on a machine with other work), at
batches of 1, 4, 16 and 32 and context 260: the layers' program 24.4, 27.9, 53.9, 93.6; what describes it 0.5 to 0.7;
output layer 5.9, 6.4, 10.7, 17.6; embedding, angles and last norm 0.4; sampling 0.4, 0.6, 0.9, 1.3.
"""

import argparse
import os
import statistics
from typing import Any

from hydra import compose, initialize_config_dir

from kvbench import config, job, metrics
from kvbench.main import CONFIG_DIR

PARTS = ("schedule_s", "copy_s", "model_s", "sample_s")


def measure(overrides: list[str]) -> dict[str, float]:
    """One run's wall time, tokens/s and the parts of its steps, in seconds."""
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        cfg = config.typed(compose("config", overrides))
    built = job.build(cfg)
    end_s = built.engine.run(built.groups)
    steps, requests = built.recorder.steps(end_s), built.recorder.requests()
    scalars = metrics.summarize(steps, requests, bytes_per_slot=built.backend.bytes_per_slot, block_size=16)
    names = ("duration_s", "output_tokens_per_s", "num_steps", *PARTS)
    return {name: float(scalars[name][0]) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vary", default="", metavar="KEY=A,B", help="settings to interleave")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    key, _, values = arguments.vary.partition("=")
    settings = [f"{key}={value}" for value in values.split(",")] if key else [""]
    samples: dict[str, list[dict[str, Any]]] = {setting: [] for setting in settings}
    print(f"load average before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    for _ in range(arguments.rounds):
        for setting in settings:
            samples[setting].append(measure([*arguments.overrides, *([setting] if setting else [])]))
    first = None
    for setting, runs in samples.items():
        median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        first = first or median["duration_s"]
        parts = "  ".join(f"{name.removesuffix('_s')} {1e3 * median[name] / median['num_steps']:.2f}" for name in PARTS)
        print(
            f"{setting or 'as given'}: {median['output_tokens_per_s']:.1f} tokens/s, {median['duration_s']:.2f} s "
            f"({median['duration_s'] / first:.2f} of the first), {median['num_steps']:.0f} steps; ms per step: {parts}"
        )


if __name__ == "__main__":
    main()
