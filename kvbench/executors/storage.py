"""The KV tensors of both tiers and the copies between their slots."""

import torch
from torch import Tensor

from kernels import Kernels
from kernels.memory import advise_huge_pages
from kvbench.allocator import Copies, Tier
from kvbench.geometry import Geometry


class KVStorage:
    """One pool tensor per tier, ``[num_layers, 2, num_slots, num_kv_heads, head_dim]``.

    The host tier is pinned where the device is a GPU. Pages are touched here, not during the run.
    """

    def __init__(
        self,
        geometry: Geometry,
        num_slots: int,
        num_host_slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        self.kernels = kernels
        inner = (geometry.num_kv_heads, geometry.head_dim)
        shape = (geometry.num_layers, 2, num_slots, *inner)
        self.kv = advise_huge_pages(torch.empty(shape, dtype=dtype, device=device)).fill_(float("nan"))
        host_shape = (geometry.num_layers, 2, num_host_slots, *inner)
        self.host_kv = torch.empty(host_shape, dtype=dtype, pin_memory=device.type == "cuda").fill_(float("nan"))

    def copy(self, copies: Copies) -> None:
        """Run slot-range copies in order, all layers."""
        ranges = torch.from_numpy(copies.ranges)
        source, destination = self._pool(copies.source), self._pool(copies.destination)
        if source is destination:
            self.kernels.copy_slots(source, ranges)
        else:
            self.kernels.transfer_slots(source, destination, ranges)

    def _pool(self, tier: Tier) -> Tensor:
        return self.kv if tier is Tier.DEVICE else self.host_kv
