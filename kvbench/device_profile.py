"""What the ``roofline`` executor knows of a device: ceilings, and how near a system comes to them."""

import math
from dataclasses import dataclass, fields

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

    def check(self) -> None:
        """Raises ConfigError naming a value without meaning."""
        may_be_zero = ("allreduce_s", "transfer_s", "transfers_per_layer", "step_s", "sequence_s")
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value > 0 or (value == 0 and field.name in may_be_zero)):
                raise ConfigError(f"device.profile.{field.name}: {value} is not a number > 0")
            if field.name.endswith("efficiency") and value > 1:
                raise ConfigError(f"device.profile.{field.name}: {value} exceeds 1, the ceiling itself")
