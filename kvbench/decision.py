"""What a scheduler decides for one step."""

from dataclasses import dataclass, field

from kvbench.allocator import Copies, Grant, IntArray
from kvbench.group import Group


@dataclass(slots=True)
class Decision:
    """What the next step does.

    decodes, prefills: groups that go on, and groups whose prompt (or what was lost) is computed, by one row each.
    rows: int64 ``[n]`` rows that run, num_new: int64 ``[n]`` their new tokens, slots: int64 ``[sum(num_new)]`` those
        tokens' slots.
    num_new_tokens: the sum of ``num_new``.
    copied_slots: slots copied, by cause (``cow``, ``fork``, ``prompt``, ``swap_out``, ``swap_in``).
    refused: the queue's head was refused; stranded: although enough free slots existed.
    """

    decodes: list[Group] = field(default_factory=list)
    prefills: list[Group] = field(default_factory=list)
    rows: list[IntArray] = field(default_factory=list)
    num_new: list[IntArray] = field(default_factory=list)
    slots: list[IntArray] = field(default_factory=list)
    copies: list[Copies] = field(default_factory=list)
    late_copies: list[Copies] = field(default_factory=list)
    copied_slots: dict[str, int] = field(default_factory=dict)
    num_new_tokens: int = 0
    refused: bool = False
    stranded: bool = False
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0

    @property
    def groups(self) -> list[Group]:
        """All that run."""
        return self.decodes + self.prefills

    @property
    def kind(self) -> str:
        """What the step's record calls it."""
        if not self.prefills:
            return "decode"
        return "mixed" if self.decodes else "prefill"

    def run(self, rows: IntArray, num_new: IntArray, num_new_tokens: int) -> None:
        """Have these rows run; ``num_new_tokens``: the sum of ``num_new``."""
        self.rows.append(rows)
        self.num_new.append(num_new)
        self.num_new_tokens += num_new_tokens

    def take(self, grant: Grant, cause: str, *, late: bool = False) -> None:
        self.slots.append(grant.slots)
        if grant.copies:
            (self.late_copies if late else self.copies).extend(grant.copies)
            self.copied_slots[cause] = self.copied_slots.get(cause, 0) + grant.num_copied_slots
