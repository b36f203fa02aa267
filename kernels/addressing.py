"""Where a sequence's tokens lie in the pool: the only thing that differs between cache layouts."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockTables:
    """Paged: token ``t`` of sequence ``i`` lies in block ``tables[i, t // block_size]``.

    Block ``b`` is the slots ``[b * block_size, (b + 1) * block_size)``.

    tables: int32 ``[num_sequences, max_blocks]``; entries beyond a sequence's last block are never read.
    block_size: tokens per block, >= 1.
    """

    tables: Tensor
    block_size: int

    def slots(self, sequence: int, num_tokens: int) -> Tensor:
        """Slots of the first ``num_tokens`` tokens of one sequence, int64 ``[num_tokens]``."""
        positions = torch.arange(num_tokens, device=self.tables.device)
        blocks = self.tables[sequence, positions // self.block_size].long()
        return blocks * self.block_size + positions % self.block_size


@dataclass(frozen=True)
class BaseSlots:
    """Contiguous: token ``t`` of sequence ``i`` is slot ``bases[i] + t``.

    bases: int64 ``[num_sequences]``.
    """

    bases: Tensor

    def slots(self, sequence: int, num_tokens: int) -> Tensor:
        """Slots of the first ``num_tokens`` tokens of one sequence, int64 ``[num_tokens]``."""
        return self.bases[sequence] + torch.arange(num_tokens, device=self.bases.device)
