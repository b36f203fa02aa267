"""``executor=roofline`` as its users meet it: shapes, bad combinations, records that repeat byte for byte."""

import math
from itertools import accumulate

import numpy as np
import pandas as pd
import pytest
import torch

from kvbench.device_profile import DeviceProfile
from kvbench.errors import ConfigError
from kvbench.executors.cost_model import CostModel
from kvbench.geometry import ModelShape, read_config, shape_of
from tests.cli import Cli, refusal

PAPER = ("+setup=paper_13b", "workload=alpaca_paper", "workload.duration_s=2", "measure.progress=false")
BEAMS = ("workload.mode=beam", "workload.beam_width=6")


@pytest.mark.parametrize(
    ("model", "slot_bytes", "pool_gib", "slots", "weight_gb"),
    [
        ("opt_13b", 819_200, 12, 15_728, 26),
        ("opt_66b", 2_359_296, 21, 9_557, 132),
        ("opt_175b", 4_718_592, 264, 60_074, 346),
    ],
)
def test_shapes_are_those_of_the_papers_table_1(
    model: str, slot_bytes: int, pool_gib: int, slots: int, weight_gb: int
) -> None:
    shape = shape_of(read_config(model))
    assert shape.bytes_per_slot(torch.float16) == slot_bytes
    assert pool_gib * 2**30 // slot_bytes == slots
    assert 2 * shape.num_parameters / 1e9 == pytest.approx(weight_gb, rel=0.02)


def test_a_step_takes_at_least_what_each_ceiling_asks() -> None:
    """Weights and KV over the bandwidth, operations over the peak; more tokens never take less time."""
    shape = ModelShape(4, 8, 8, 64, 512, 10_000_000, 1_000_000, 12_000_000)
    device = DeviceProfile(2**34, 1e12, 1e14, 1e10)
    cost = CostModel(shape, device, 2)
    slot = shape.bytes_per_slot(torch.float16)
    times = [cost.step_s(tokens, tokens, 100.0 * tokens, 100.0 * tokens) for tokens in (1, 8, 64, 512)]
    assert times == sorted(times)
    assert times[0] == pytest.approx((22e6 + 100 * slot) / 1e12)
    assert cost.step_s(10**6, 0, 0.0, 0.0) == pytest.approx(2 * 10**13 / 1e14)
    half = CostModel(shape, DeviceProfile(2**34, 1e12, 1e14, 1e10, num_devices=2), 2)
    assert half.step_s(8, 8, 800.0, 800.0) == pytest.approx(times[1] / 2)


def test_foreseen_steps_are_those_taken_one_by_one_up_to_the_next_arrival() -> None:
    """A step that would start just as somebody arrives is not foreseen: whoever arrives is served before it."""
    shape = ModelShape(4, 8, 8, 64, 512, 10_000_000, 1_000_000, 12_000_000)
    cost = CostModel(shape, DeviceProfile(2**34, 1e12, 1e14, 1e10), 2)
    times, seconds = cost.decodes_s(3, 100, 6, 0.25, math.inf)
    assert seconds.tolist() == [cost.step_s(3, 3, kv, kv) for kv in (100.0, 103.0, 106.0, 109.0, 112.0, 115.0)]
    assert times.tolist() == list(accumulate([0.25, *seconds]))
    for i in range(1, 6):
        assert [len(part) for part in cost.decodes_s(3, 100, 6, 0.25, times[i])] == [i + 1, i]
        assert [len(part) for part in cost.decodes_s(3, 100, 6, 0.25, np.nextafter(times[i], 1))] == [i + 2, i + 1]


def test_equal_seeds_give_equal_records(run: Cli) -> None:
    for _ in range(2):
        code, _, err = run(*PAPER, "allocator=paged")
        assert code == 0, err
    first, second = run.runs()
    pd.testing.assert_frame_equal(first.steps(), second.steps(), check_exact=True)
    pd.testing.assert_frame_equal(first.requests(), second.requests(), check_exact=True)
    assert first.record["metrics"] == second.record["metrics"]
    gaps = [gap for times in first.requests()["token_times_s"] for gap in np.diff(times)]
    assert first.record["metrics"]["itl_mean_s"]["value"] == pytest.approx(np.mean(gaps))
    assert first.record["metrics"]["itl_p99_s"]["value"] == pytest.approx(np.percentile(gaps, 99))
    assert first.record["tokens_sha256"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("device=cpu",), "device: executor=roofline needs the profile of a device"),
        (("workload.ignore_eos=false",), "workload.ignore_eos: executor=roofline draws no tokens"),
        (("workload=prompts", "workload.ignore_eos=true"), "workload: executor=roofline serves lengths, not texts"),
        (("workload.mode=beam", "workload.beam_width=3"), "workload.beam_width: 3 has no recorded beams"),
        (("workload.recording=0",), "workload.recording: must be null with workload.mode=greedy"),
        ((*BEAMS, "workload.recording=-1"), "workload.recording: -1 is not an integer from 0 to 47"),
        (("executor=torch", "device=cpu"), "model: opt_13b is a shape without weights"),
        (("executor=torch",), "device: a100_40gb_vllm2023 is a profile for executor=roofline"),
        (("device.profile.flops=0",), "device.profile.flops: 0.0 is not a number > 0"),
        (("device.profile.matmul_efficiency=1.5",), "device.profile.matmul_efficiency: 1.5 exceeds 1"),
        (("model.path=nowhere",), "model.path: nowhere is no config.json"),
        (("pool.size=30GiB",), "pool.size: 32,212,254,720 bytes asked for"),
        (("executor.name=magic",), "executor.name: 'magic' is not one of torch, roofline"),
    ],
)
def test_bad_combinations_name_the_setting(arguments: tuple[str, ...], message: str) -> None:
    assert message in refusal(*PAPER, *arguments)


def test_a_configuration_that_transformers_does_not_know_is_named(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ConfigError, match=r"^model\.path: config\.json describes no model"):
        read_config(str(tmp_path))
