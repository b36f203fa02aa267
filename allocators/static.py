"""Static allocation: every row gets a region of the model's maximum length, as before paging."""

import numpy as np

from allocators.contiguous import ContiguousAllocator
from kvbench.allocator import AllocatorConfigError, AllocatorMisuse, IntArray, Pool


class StaticAllocator(ContiguousAllocator):
    """The pool is cut into regions of ``pool.max_tokens`` slots; a row takes one, whatever it needs.

    The region is handed to its row whole: there is no rounding. The remainder of the pool, smaller
    than a region, counts as free and is never usable.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._num_regions = pool.num_slots // pool.max_tokens
        if self._num_regions == 0:
            raise AllocatorConfigError(
                f"pool.size holds {pool.num_slots} slots, less than one static region of max_model_len="
                f"{pool.max_tokens}: raise pool.size or lower max_model_len to at most {pool.num_slots}"
            )
        # A stack: region 0 is taken first.
        self._free = [region * pool.max_tokens for region in reversed(range(self._num_regions))]

    def max_admissible_tokens(self, num_rows: int) -> int:
        if num_rows < 1:
            raise AllocatorMisuse(f"a group has at least one row, got {num_rows}")
        return self.pool.max_tokens if num_rows <= min(self._num_regions, self.pool.max_rows) else 0

    def _reservation(self, max_tokens: int) -> int:
        return self.pool.max_tokens

    def _take_regions(self, capacities: IntArray) -> IntArray | None:
        if capacities.size > len(self._free):
            return None
        return np.array([self._free.pop() for _ in capacities], dtype=np.int64)

    def _return_regions(self, bases: IntArray, capacities: IntArray) -> None:
        self._free.extend(bases.tolist())

    def _region_size(self, capacity: int) -> int:
        return capacity

    def _free_regions(self) -> list[tuple[int, int]]:
        usable = self._num_regions * self.pool.max_tokens
        regions = [(base, self.pool.max_tokens) for base in self._free]
        return [*regions, (usable, self.pool.num_slots - usable)]
