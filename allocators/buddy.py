"""Buddy allocation: contiguous reservations in power-of-two regions that split and merge."""

from collections import Counter

import numpy as np

from allocators.contiguous import ContiguousAllocator
from kvbench.allocator import AllocatorMisuse, IntArray, Pool


class BuddyAllocator(ContiguousAllocator):
    """A row that may reach ``max_tokens`` takes a region of ``2**order >= max_tokens`` slots.

    The row is handed ``max_tokens`` of them; the rest is rounding. A pool of any size starts as the
    maximal aligned power-of-two regions of its binary expansion; regions split in halves on demand
    and a freed region merges with its buddy, the other half, whenever that is free.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        # Free regions by order, as base -> None: ordered, so that runs repeat, with O(1) removal.
        self._free: list[dict[int, None]] = [{} for _ in range(pool.num_slots.bit_length())]
        self._rounded = 0
        base = 0
        for order in reversed(range(len(self._free))):
            if pool.num_slots >> order & 1:
                self._free[order][base] = None
                base += 1 << order

    def max_admissible_tokens(self, num_rows: int) -> int:
        if num_rows < 1:
            raise AllocatorMisuse(f"a group has at least one row, got {num_rows}")
        if num_rows > self.pool.max_rows:
            return 0
        # The pool's high bits count the regions of an order that an empty pool can be split into.
        order = (self.pool.num_slots // num_rows).bit_length() - 1
        return min(1 << order, self.pool.max_tokens) if order >= 0 else 0

    def check_integrity(self) -> None:
        super().check_integrity()
        for order, regions in enumerate(self._free):
            for base in regions:
                assert base % (1 << order) == 0, f"free region {base} is not aligned to {1 << order}"
                assert base ^ (1 << order) not in regions, f"free buddies at {base} were not merged"

    def _reservation(self, max_tokens: int) -> int:
        return max_tokens

    def _take_regions(self, capacities: IntArray) -> IntArray | None:
        orders = [_order(capacity) for capacity in capacities.tolist()]
        if not self._fits(orders):
            return None
        self._rounded += sum(1 << order for order in orders) - int(capacities.sum())
        bases = np.empty(len(orders), dtype=np.int64)
        # Largest first: then a split never cuts up a region that a later one needs whole.
        for i in sorted(range(len(orders)), key=lambda i: -orders[i]):
            bases[i] = self._split(orders[i])
        return bases

    def _return_regions(self, bases: IntArray, capacities: IntArray) -> None:
        orders = [_order(capacity) for capacity in capacities.tolist()]
        self._rounded -= sum(1 << order for order in orders) - int(capacities.sum())
        for base, order in zip(bases.tolist(), orders, strict=True):
            self._merge(base, order)

    def _region_size(self, capacity: int) -> int:
        return 1 << _order(capacity)

    def _free_regions(self) -> list[tuple[int, int]]:
        return [(base, 1 << order) for order, bases in enumerate(self._free) for base in bases]

    def _rounding(self) -> int:
        return self._rounded

    def _fits(self, orders: list[int]) -> bool:
        """Whether regions of these orders can all be taken at once."""
        wanted = Counter(orders)
        available = 0
        for order in reversed(range(len(self._free))):
            available = 2 * available + len(self._free[order]) - wanted[order]
            if available < 0:
                return False
        return all(order < len(self._free) for order in wanted)

    def _split(self, order: int) -> int:
        """Base of a region of this order, cut from the smallest free one; the caller knows it fits."""
        larger = next(k for k in range(order, len(self._free)) if self._free[k])
        base, _ = self._free[larger].popitem()
        for k in reversed(range(order, larger)):
            self._free[k][base + (1 << k)] = None
        return base

    def _merge(self, base: int, order: int) -> None:
        # The buddy of a region at the pool's ragged end would lie outside it and is never free.
        while base ^ (1 << order) in self._free[order]:
            del self._free[order][base ^ (1 << order)]
            base &= ~(1 << order)
            order += 1
        self._free[order][base] = None


def _order(capacity: int) -> int:
    """Smallest ``order`` with ``2**order >= capacity``."""
    return (capacity - 1).bit_length()
