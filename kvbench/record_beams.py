"""Record real beams for replay: ``python -m kvbench.record_beams FILE.npz [key=value ...]``.

Settings are those of ``python -m kvbench`` with ``workload=beam_search``; generation runs on past EOS and
``workload.output_tokens`` must be one number, so that all recordings have the same length.
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hydra import compose, initialize_config_dir

from kvbench import config, job, results
from kvbench.allocator import IntArray
from kvbench.beam import BeamSearch, FloatArray, Generated
from kvbench.group import Group
from kvbench.main import CONFIG_DIR
from kvbench.recorded_beams import Recordings


@dataclass
class ObservedBeams(BeamSearch):
    """A beam search that keeps every step's ``parents``."""

    parents: list[IntArray] = field(default_factory=list, init=False)

    @classmethod
    def of(cls, beam: BeamSearch) -> "ObservedBeams":
        """The same search, before its first step."""
        return cls(beam.width, beam.max_new_tokens, beam.eos, beam.length_penalty, beam.early_stopping)

    def advance(self, log_probs: FloatArray, token_ids: IntArray, generated: Generated) -> tuple[IntArray, IntArray]:
        parents, tokens = super().advance(log_probs, token_ids, generated)
        if not self.done:
            self.parents.append(parents)
        return parents, tokens


def record(overrides: list[str]) -> Recordings:
    """Run the workload and keep its beams. Raises ConfigError."""
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        composed = compose("config", ["workload=beam_search", "workload.ignore_eos=true", *overrides])
    built = job.build(config.typed(composed))
    provenance = {"config": config.plain(composed), "env": results.environment(built.backend.device)} | built.record
    observed = observe(built.groups)
    built.engine.run(built.groups)
    prompts = [group.request.prompt for group in built.groups]
    return Recordings(
        parents=np.array([beam.parents for beam in observed], np.int8),
        prompts=np.concatenate(prompts),
        prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
        provenance=provenance,
    )


def observe(groups: list[Group]) -> list[ObservedBeams]:
    """Have the beams of groups that are yet to run observed."""
    observed = [ObservedBeams.of(group.beam) for group in groups if isinstance(group.beam, BeamSearch)]
    for group, beam in zip(groups, observed, strict=True):
        group.beam = beam
    return observed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    recordings = record(arguments.overrides)
    with arguments.file.open("wb") as file:
        recordings.save(file)
    print(f"{arguments.file}: {' x '.join(map(str, recordings.parents.shape))} (requests, steps, width)")


if __name__ == "__main__":
    main()
