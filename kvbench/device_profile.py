"""What the ``roofline`` executor knows of a device: ceilings, and how near a system comes to them."""

import math
from dataclasses import dataclass, field, fields
from itertools import pairwise

from kvbench.errors import ConfigError


@dataclass
class DeviceProfile:
    """Schema of ``device.profile``; the YAML files in ``conf/device/`` say where their figures come from.

    memory_bytes: capacity of one device. memory_bytes_per_s: its bandwidth.
    host_memory_bytes: of the host, for swap space.
    flops: matrix-product operations per second in the run's dtype.
    num_devices: tensor-parallel group; each holds 1/n of the weights and of every slot.
    interconnect_bytes_per_s, allreduce_s: of one device to the others, and the fixed cost of an all-reduce.
    host_bytes_per_s: one direction of the link to host memory. transfer_s: fixed cost of one transfer over it.
    transfers_per_layer: transfers that moving one contiguous slot range takes in each layer (K and V: 2);
        0: one transfer moves it through all layers.
    step_s, sequence_s: time of a step outside the model: fixed, and per running sequence.
    matmul_efficiency: share of ``flops`` and of the bandwidth that weights' products reach.
    attention_efficiency: share of the bandwidth that reading KV reaches.
    copy_efficiency, copy_s: share of the bandwidth that copies within the device reach, and the fixed cost of
        copying one slot range.
    product_s: ``[[rows, seconds], ...]``, the measured time of a product of that many rows with weights, in seconds
        per parameter; straight lines between, and on beyond the last. Where given, it stands for ``flops`` and
        the bandwidth in products with weights. Not for parallel groups: it is that of one device.
    """

    memory_bytes: int
    memory_bytes_per_s: float
    flops: float
    host_bytes_per_s: float
    host_memory_bytes: int = 2**38
    num_devices: int = 1
    interconnect_bytes_per_s: float = math.inf
    allreduce_s: float = 0.0
    transfer_s: float = 0.0
    transfers_per_layer: int = 2
    step_s: float = 0.0
    sequence_s: float = 0.0
    matmul_efficiency: float = 1.0
    attention_efficiency: float = 1.0
    copy_efficiency: float = 1.0
    copy_s: float = 0.0
    product_s: list[list[float]] = field(default_factory=list)

    def check(self) -> None:
        """Raises ConfigError naming a value without meaning."""
        may_be_zero = ("allreduce_s", "transfer_s", "transfers_per_layer", "step_s", "sequence_s", "copy_s")
        for name in (entry.name for entry in fields(self) if entry.name != "product_s"):
            value = getattr(self, name)
            if not (value > 0 or (value == 0 and name in may_be_zero)):
                raise ConfigError(f"device.profile.{name}: {value} is not a number > 0")
            if name.endswith("efficiency") and value > 1:
                raise ConfigError(f"device.profile.{name}: {value} exceeds 1, the ceiling itself")
        if self.product_s:
            self._check_products()

    def _check_products(self) -> None:
        setting, table = "device.profile.product_s", self.product_s
        if len(table) < 2 or any(len(point) != 2 for point in table):
            raise ConfigError(f"{setting}: it is not a list of two or more pairs [rows, seconds per parameter]")
        if any(not (a[0] < b[0] and a[1] <= b[1]) for a, b in pairwise(table)) or not min(table[0]) > 0:
            raise ConfigError(f"{setting}: its rows must rise from above 0, and its seconds must not fall")
        if self.num_devices > 1:
            raise ConfigError(f"{setting}: it is measured on one device; num_devices must be 1, not {self.num_devices}")
