"""Seconds of a step from bytes and operations over a device's ceilings (the roofline model of Williams et al., 2009).

A phase takes the longer of its arithmetic and its memory traffic; phases follow one another:

* products with weights: ``2 x parameters`` operations per token, against reading the weights once; or, where the
  device's products were measured, ``parameters`` times the interpolated time of a product of so many rows (near
  a CPU's ridge neither ceiling is reached, and small batches fall between the rows that a kernel takes at once);
* attention: ``4 x heads x head_dim`` operations per query and key, against reading K and V once per sequence;
* with n devices, two all-reduces of the activations per layer (ring: each moves 2 (n-1)/n of them);
* outside the model: a fixed time per step, and one per sequence.

Activations and the writing of new KV are left out: they are below 1 % of the weights' traffic.
"""

import numba
import numpy as np
from numba import types

from kvbench.allocator import Copies, Tier
from kvbench.device_profile import DeviceProfile
from kvbench.geometry import ModelShape
from kvbench.plan import Seconds


class CostModel:
    """Times for one model on one device group; ``itemsize``: bytes of a weight and of a KV element."""

    def __init__(self, shape: ModelShape, device: DeviceProfile, itemsize: int) -> None:
        self._device = device
        layers, peers = shape.num_layers, device.num_devices - 1
        flops = device.flops * device.num_devices * device.matmul_efficiency
        bytes_per_s = device.memory_bytes_per_s * device.num_devices
        slot_bytes = 2 * layers * shape.num_kv_heads * shape.head_dim * itemsize
        self._layer_s, self._head_s = 2 * shape.layer_parameters / flops, 2 * shape.head_parameters / flops
        weight_bytes = (shape.layer_parameters + shape.head_parameters) * itemsize
        self._weights_s = weight_bytes / (bytes_per_s * device.matmul_efficiency)
        self._pair_s = 4 * layers * shape.num_query_heads * shape.head_dim / flops
        self._read_s = slot_bytes / (bytes_per_s * device.attention_efficiency)
        self._reduce_s = 2 * layers * device.allreduce_s if peers else 0.0
        reduced = 2 * layers * shape.hidden_size * itemsize * 2 * peers / device.num_devices
        self._reduce_token_s = reduced / device.interconnect_bytes_per_s
        self._parameters = float(shape.layer_parameters), float(shape.head_parameters)
        self._rows, self._row_s = np.array([[0.0, 0.0], *device.product_s]).T
        self._copy_slot_s = 2 * slot_bytes / (bytes_per_s * device.copy_efficiency)
        self._move_slot_s = slot_bytes / (device.host_bytes_per_s * device.num_devices)
        self._move_range_s = device.transfer_s * max(1, layers * device.transfers_per_layer)

    def step_s(self, num_tokens: int, num_sampled: int, kv_tokens: float, pairs: float) -> float:
        """num_tokens: new tokens of all sequences. num_sampled: sequences that yield a token.

        kv_tokens: tokens whose K and V are read, summed over sequences. pairs: query-key pairs.
        """
        attention = max(self._pair_s * pairs, self._read_s * kv_tokens)
        return attention + self._beside_attention_s(num_tokens, num_sampled)

    def decodes_s(
        self, num_rows: int, kv_tokens: int, num_steps: int, start_s: float, until_s: float
    ) -> tuple[Seconds, Seconds]:
        """Steps in which ``num_rows`` rows decode a token each, the first at ``start_s``, at most ``num_steps`` and
        none that would start at ``until_s`` or later. kv_tokens: read by the first of them.

        When each of the n steps starts, and the last one ends, ``[n + 1]``; the :meth:`step_s` of each, ``[n]``.
        """
        times, seconds = np.empty(num_steps + 1), np.empty(num_steps)
        fixed_s = self._beside_attention_s(num_rows, num_rows)
        count = _decodes(num_rows, kv_tokens, fixed_s, self._pair_s, self._read_s, start_s, until_s, times, seconds)
        return times[: count + 1], seconds[:count]

    def _beside_attention_s(self, num_tokens: int, num_sampled: int) -> float:
        products = self._products_s(num_tokens, num_sampled)
        reductions = self._reduce_s + self._reduce_token_s * num_tokens
        return products + reductions + (self._device.step_s + self._device.sequence_s * num_sampled)

    def _products_s(self, num_tokens: int, num_sampled: int) -> float:
        """Every layer's products for the new tokens, and the output layer's for those that are sampled from."""
        if len(self._rows) == 1:
            return max(self._layer_s * num_tokens + self._head_s * num_sampled, self._weights_s)
        layers, head = self._parameters
        return layers * self._product_s(num_tokens) + head * self._product_s(num_sampled)

    def _product_s(self, num_rows: int) -> float:
        """Seconds per parameter, by the device's table."""
        if num_rows <= self._rows[-1]:
            return float(np.interp(num_rows, self._rows, self._row_s))
        slope = (self._row_s[-1] - self._row_s[-2]) / (self._rows[-1] - self._rows[-2])
        return float(self._row_s[-1] + slope * (num_rows - self._rows[-1]))

    def copy_s(self, copies: Copies) -> float:
        """Copies within the device read and write its memory; between tiers they cross the host link."""
        num_slots = float(copies.ranges[:, 2].sum())
        if copies.source is copies.destination is Tier.DEVICE:
            return self._copy_slot_s * num_slots + self._device.copy_s * len(copies.ranges)
        return self._move_slot_s * num_slots + self._move_range_s * len(copies.ranges)


@numba.njit(
    types.int64(*[types.int64] * 2, *[types.float64] * 5, types.float64[::1], types.float64[::1]),
    cache=True,
)
def _decodes(num_rows, kv_tokens, fixed_s, pair_s, read_s, start_s, until_s, times, seconds):
    """How many steps start before ``until_s``; fills ``times`` and ``seconds`` as :meth:`CostModel.decodes_s` says.

    Compiled, since every leap over steps waits for it; adds up in the order of steps taken one by one.
    """
    times[0] = start_s
    for step in range(seconds.size):
        if times[step] >= until_s:
            return step
        read = float(kv_tokens + step * num_rows)
        seconds[step] = max(pair_s * read, read_s * read) + fixed_s
        times[step + 1] = times[step] + seconds[step]
    return seconds.size
