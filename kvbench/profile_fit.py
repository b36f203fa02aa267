"""From timed steps and copies to a device profile, by non-negative least squares.

Every time is a sum of features with unknown, non-negative costs, as :mod:`kvbench.executors.cost_model` adds them
up. Errors are relative: a decode of one row counts as much as a prefill of a thousand tokens.
"""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvbench.allocator import Copies, Tier
from kvbench.device_profile import DeviceProfile
from kvbench.executors.cost_model import CostModel
from kvbench.geometry import ModelShape
from kvbench.nnls import Floats, nnls

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # rows of a product: the points of ``product_s``
LEAST_S = 1e-15  # stands for a cost that came out as zero, so that rates stay finite
STEPS, COPIES, MOVES = ("prefill", "decode"), ("copy",), ("swap_out", "swap_in")


@dataclass(frozen=True)
class _StepCosts:
    """product_s: see ``DeviceProfile``. sequence_s: per sampled row. pair_s, read_s: per query-key pair, KV token."""

    product_s: list[list[float]]
    sequence_s: float
    pair_s: float
    read_s: float


def fit(
    observations: pd.DataFrame, shape: ModelShape, itemsize: int, *, memory_bytes: int, host_memory_bytes: int
) -> DeviceProfile:
    """The profile under which a :class:`CostModel` of ``shape`` comes closest to the observed times.

    observations: columns ``kind``, ``num_tokens``, ``num_sequences`` (as many rows are sampled from), ``kv_tokens``,
    ``pairs``, ``num_ranges``, ``num_slots``, ``seconds``. ``itemsize``: bytes of a KV element.
    Of the profile, ``flops`` is what attention's arithmetic reaches, the memory bandwidth the higher of those that
    attention and copies reach.
    """
    steps, copies, moves = (observations[observations["kind"].isin(kinds)] for kinds in (STEPS, COPIES, MOVES))
    cost = _step_costs(steps, shape)
    (copy_range_s, copy_slot_s), (move_range_s, move_slot_s) = (
        _costs(part[["num_ranges", "num_slots"]], part["seconds"]) for part in (copies, moves)
    )
    slot_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * itemsize
    read_rate, copy_rate = slot_bytes / max(cost.read_s, LEAST_S), 2 * slot_bytes / max(copy_slot_s, LEAST_S)
    bandwidth = max(read_rate, copy_rate)
    return DeviceProfile(
        memory_bytes=memory_bytes,
        host_memory_bytes=host_memory_bytes,
        memory_bytes_per_s=bandwidth,
        flops=4 * shape.num_layers * shape.num_query_heads * shape.head_dim / max(cost.pair_s, LEAST_S),
        host_bytes_per_s=slot_bytes / max(move_slot_s, LEAST_S),
        transfer_s=move_range_s / (2 * shape.num_layers),
        transfers_per_layer=2,
        sequence_s=cost.sequence_s,
        attention_efficiency=read_rate / bandwidth,
        copy_efficiency=copy_rate / bandwidth,
        copy_s=copy_range_s,
        product_s=cost.product_s,
    )


def add_outside(profile: DeviceProfile, steps: pd.DataFrame) -> DeviceProfile:
    """``profile`` with the time of a step outside the executor: columns ``num_sequences`` and ``seconds`` of steps."""
    features = pd.DataFrame({"step": 1.0, "sequence": steps["num_sequences"]})
    step_s, sequence_s = _costs(features, steps["seconds"])
    return replace(profile, step_s=profile.step_s + step_s, sequence_s=profile.sequence_s + sequence_s)


def predict(observations: pd.DataFrame, shape: ModelShape, itemsize: int, profile: DeviceProfile) -> Floats:
    """Seconds of each observation by the cost model."""
    cost = CostModel(shape, profile, itemsize)

    def seconds(case: pd.Series) -> float:
        if case["kind"] in STEPS:
            features = case["num_tokens"], case["num_sequences"], float(case["kv_tokens"]), float(case["pairs"])
            return float(cost.step_s(*features))
        ranges = np.zeros((int(case["num_ranges"]), 3), np.int64)
        ranges[:, 2] = case["num_slots"] // case["num_ranges"]
        return cost.copy_s(Copies(Tier.DEVICE, Tier.DEVICE if case["kind"] in COPIES else Tier.HOST, ranges))

    return np.array([seconds(case) for _, case in observations.iterrows()])


def _step_costs(steps: pd.DataFrame, shape: ModelShape) -> _StepCosts:
    """Attention takes the longer of arithmetic and reading; which one is settled in turns with the costs."""
    names = ("num_tokens", "num_sequences", "kv_tokens", "pairs")
    tokens, rows, kv, pairs = (steps[name].to_numpy(float) for name in names)
    knots = np.array([knot for knot in KNOTS if knot <= tokens.max()], float)
    products = shape.layer_parameters * _ramps(tokens, knots) + shape.head_parameters * _ramps(rows, knots)
    computes: NDArray[np.bool_] = pairs > kv
    for _ in range(10):
        attention = [np.where(computes, pairs, 0.0), np.where(computes, 0.0, kv)]
        columns = pd.DataFrame(np.column_stack([products, rows, *attention]))
        *rises, sequence_s, pair_s, read_s = _costs(columns, steps["seconds"])
        now = pair_s * pairs > read_s * kv
        if (computes == now).all():
            break
        computes = now
    return _StepCosts(np.column_stack([knots, np.cumsum(rises)]).tolist(), sequence_s, pair_s, read_s)


def _ramps(rows: Floats, knots: Floats) -> Floats:
    """``[m, knots]``: what each knot's rise over the one before contributes at ``rows``; so no table can fall."""
    before, after = knots[:-1], knots[1:]
    ramps = ((rows[:, None] - before) / (after - before)).clip(min=0.0)
    ramps[:, :-1] = ramps[:, :-1].clip(max=1.0)
    return np.column_stack([np.ones_like(rows), ramps])


def _costs(features: pd.DataFrame, seconds: pd.Series) -> list[float]:
    """A non-negative cost per feature, with the least sum of squared relative errors."""
    target = seconds.to_numpy(float)
    return nnls(features.to_numpy(float) / target[:, None], np.ones(len(target))).tolist()
