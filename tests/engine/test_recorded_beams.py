"""Recorded beams: they are those of ``transformers``, and replaying them does to memory what the real run did."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import GenerationConfig

from kvbench import config, job, models, recorded_beams
from kvbench.errors import ConfigError
from kvbench.record_beams import ObservedBeams, observe, record
from kvbench.recorded_beams import Recordings, ReplayedBeams, shipped_parents
from tests.composed import composed
from tests.engine.scripted import ScriptedExecutor

TINY = ("model=tiny", "device=cpu", "workload.chat_template=false", "workload.num_requests=5", "max_model_len=512")
WIDTHS = (2, 4, 6)

PROMPTS = ("Once", "A longer prompt, for a change", "Why?", "In the beginning", "Name three colours of the rainbow.")

# A slot takes 512 bytes: roomy pools, and pools so scarce that groups are preempted.
SETTINGS = {
    "paged": ("allocator=paged", "pool.size=1MiB"),
    "paged, block 4": ("allocator=paged", "allocator.make.block_size=4", "pool.size=1MiB"),
    "paged, scarce": ("allocator=paged", "allocator.make.block_size=4", "pool.size=170KiB"),
    "swap, scarce": ("allocator=paged_swap", "allocator.make.block_size=4", "pool.size=170KiB"),
    "buddy": ("allocator=buddy_oracle", "pool.size=1MiB"),
}


def beams_of(length: int, *, seed: int = 0, request_id: int = 0, recordings: np.ndarray | None = None) -> np.ndarray:
    """All parents that a replay of ``length`` tokens returns, ``[length - 1, width]``."""
    nothing = np.empty((1, 0), np.float32)
    recordings = shipped_parents(4) if recordings is None else recordings
    beams = ReplayedBeams(recordings, length, seed=seed, request_id=request_id)
    parents = []
    while True:
        step, tokens = beams.advance(nothing, nothing.astype(np.int64), nothing.astype(np.int64))
        if beams.done:
            return np.array(parents)
        assert tokens.tolist() == [0] * beams.width
        parents.append(step)


@pytest.mark.parametrize("width", WIDTHS)
def test_shipped_recordings(width: int) -> None:
    recordings = recorded_beams.shipped(width)
    parents = recordings.parents
    assert parents.dtype == np.int8
    assert parents.shape[1:] == (128, width)
    assert len(parents) == len(recordings.prompt_lengths) >= 32
    assert ((parents >= 0) & (parents < width)).all()
    assert (parents[:, 0] == 0).all(), "beams are born from one"
    assert (parents[:, 1:] > 0).any(axis=(1, 2)).all(), "no beam search follows its first beam alone"
    assert recordings.prompt_lengths.sum() == len(recordings.prompts)
    assert len({prompt.tobytes() for prompt in prompts_of(recordings)}) == len(parents), "every prompt is another"


@pytest.mark.parametrize("width", WIDTHS)
def test_shipped_recordings_say_where_they_come_from(width: int) -> None:
    provenance = recorded_beams.shipped(width).provenance
    assert provenance["config"]["workload"]["beam_width"] == width
    assert provenance["config"]["workload"]["ignore_eos"] is True
    assert provenance["config"]["model"]["source"] == "smollm2"
    assert len(provenance["model"]["weights_sha256"]) == 64
    assert len(provenance["env"]["commit"]) == 40
    assert provenance["env"]["dirty"] is False


def prompts_of(recordings: Recordings) -> list[np.ndarray]:
    return np.split(recordings.prompts, np.cumsum(recordings.prompt_lengths)[:-1])


def test_only_recorded_widths_can_be_replayed() -> None:
    assert recorded_beams.shipped_widths() == list(WIDTHS)
    with pytest.raises(ConfigError, match=r"workload\.beam_width: 3 .* 2, 4, 6"):
        shipped_parents(3)


def test_recordings_survive_a_file() -> None:
    recordings = recorded_beams.shipped(2)
    file = io.BytesIO()
    recordings.save(file)
    file.seek(0)
    loaded = Recordings.load(file)
    for name in ("parents", "prompts", "prompt_lengths"):
        assert np.array_equal(getattr(loaded, name), getattr(recordings, name))
    assert loaded.provenance == recordings.provenance


@pytest.mark.parametrize("length", [1, 2, 60, 129])
def test_a_replay_is_a_recording(length: int) -> None:
    played = beams_of(length, request_id=3)
    assert len(played) == length - 1
    assert any(np.array_equal(played, recording[: length - 1]) for recording in shipped_parents(4)) or length == 1


def test_a_long_replay_goes_on_with_other_recordings() -> None:
    recordings, played = shipped_parents(4), beams_of(300, request_id=3)
    assert len(played) == 299
    for part, start in (
        (recordings, 0),
        (recordings[:, 64:], 128),
        (recordings[:, 64:], 192),
        (recordings[:, 64:], 256),
    ):
        piece = played[start : start + part.shape[1]]
        assert (part[:, : len(piece)] == piece).all(axis=(1, 2)).any(), f"no recording goes on at step {start}"


def test_what_is_replayed_depends_on_seed_and_request_alone() -> None:
    numbered = np.zeros((5, 40, 2), np.int64) + np.arange(5)[:, None, None]
    chosen = {
        (seed, request): int(beams_of(9, seed=seed, request_id=request, recordings=numbered)[0, 0])
        for seed in range(2)
        for request in range(300)
    }
    again = int(beams_of(9, seed=1, request_id=17, recordings=numbered)[0, 0])
    assert again == chosen[1, 17]
    for seed in range(2):
        counts = np.bincount([chosen[seed, request] for request in range(300)], minlength=5)
        assert counts.min() > 30, "every recording is chosen about equally often"
    assert [chosen[0, request] for request in range(300)] != [chosen[1, request] for request in range(300)]


def test_hypotheses_are_full_length() -> None:
    beams = ReplayedBeams(shipped_parents(2), 2, seed=0, request_id=0)
    nothing = np.empty((2, 0), np.int64)
    beams.advance(nothing.astype(np.float32), nothing, nothing)
    assert not beams.done
    assert beams.hypotheses == []
    beams.advance(nothing.astype(np.float32), nothing, nothing)
    assert beams.done
    assert [hypothesis.tokens.tolist() for hypothesis in beams.hypotheses] == [[0, 0], [0, 0]]


def test_recorded_parents_are_those_of_transformers() -> None:
    """The final hypotheses' ancestors, as ``generate`` tells them, are those that the recording tells."""
    settings = [*TINY, "workload.output_tokens=20", "workload.beam_width=4", "pool.size=1MiB"]
    recordings = record(settings)
    assert recordings.parents.shape == (5, 19, 4)
    cfg = config.typed(composed(*settings))
    model = models.load(cfg.model, torch.float32).model
    model.set_attn_implementation("eager")
    model.generation_config = GenerationConfig()
    for prompt, parents in zip(prompts_of(recordings), recordings.parents, strict=True):
        for ancestors in beam_indices(model, prompt, num_beams=4, max_new_tokens=20):
            assert ancestors[:-1].tolist() == [parents[step, beam] for step, beam in enumerate(ancestors[1:])]


@torch.inference_mode()
def beam_indices(model: models.PreTrainedModel, prompt: np.ndarray, *, num_beams: int, max_new_tokens: int):
    """Of each final hypothesis, the beam that each of its tokens continued: ``[num_beams, max_new_tokens]``."""
    out = model.generate(
        torch.from_numpy(prompt.astype(np.int64))[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        generation_config=GenerationConfig(
            do_sample=False,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        ),
    )
    return out.beam_indices.numpy()


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_replay_uses_memory_as_the_real_run_did(setting: str, tmp_path: Path) -> None:
    """Step by step: batch, slots by part, sharing, and every kind of copy; also under preemption."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    settings = (f"workload.prompts={tmp_path / 'prompts.txt'}", *SETTINGS[setting])
    real, searches = run_tiny(*settings)
    played, _ = run_tiny(*settings, replay=searches)
    times = [column for column in real.columns if column.endswith("_s")]
    pd.testing.assert_frame_equal(real.drop(columns=times), played.drop(columns=times))
    assert (real["num_preemptions"].sum() > 0) == setting.endswith("scarce")
    assert real[["cow_slots", "fork_slots"]].to_numpy().sum() > 0


def run_tiny(*settings: str, replay: list[ObservedBeams] | None = None) -> tuple[pd.DataFrame, list[ObservedBeams]]:
    """Steps of a run of a tiny model, or of the replay of its beams without a model."""
    beams = ("workload=beam_search", "workload.ignore_eos=true", "workload.output_tokens={uniform: [20, 40]}")
    built = job.build(config.typed(composed(*beams, *TINY, "workload.num_requests=10", *settings)))
    searches = observe(built.groups)
    if replay is not None:
        pool = built.engine.allocator.pool
        built.engine.executor = ScriptedExecutor(pool.num_slots, pool.num_host_slots)
        for group, search in zip(built.groups, replay, strict=True):
            parents = np.array(search.parents)[None]
            group.beam = ReplayedBeams(parents, group.request.max_new_tokens, seed=0, request_id=0)
    return built.recorder.steps(built.engine.run(built.groups)), searches
