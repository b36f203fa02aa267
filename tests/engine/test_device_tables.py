"""The device's block tables follow the allocator's, and cost what changed."""

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from allocators.paged_swap import PagedSwapAllocator
from kvbench.allocator import Pool
from kvbench.executors.device_tables import DeviceTables

MAX_ROWS, MAX_TOKENS = 6, 40
CPU = torch.device("cpu")


class Tables(RuleBasedStateMachine):
    """Any verbs in any order; now and then some rows decode, and their tables are brought up to date."""

    @initialize(block_size=st.sampled_from([1, 3, 8]))
    def start(self, block_size: int) -> None:
        pool = Pool(160, MAX_ROWS, MAX_TOKENS, 160)
        self.allocator = PagedSwapAllocator(pool, block_size=block_size)
        self.device = DeviceTables(MAX_ROWS, -(-MAX_TOKENS // block_size), CPU)
        self.swapped: set[int] = set()

    def live(self, *, most: int = MAX_TOKENS) -> list[int]:
        """Rows on the device that hold up to ``most`` tokens."""
        counts = self.allocator.num_tokens(np.arange(MAX_ROWS))
        return [row for row in range(MAX_ROWS) if 0 < counts[row] <= most and row not in self.swapped]

    def idle(self) -> list[int]:
        counts = self.allocator.num_tokens(np.arange(MAX_ROWS))
        return [row for row in range(MAX_ROWS) if not counts[row] and row not in self.swapped]

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), num_tokens=st.integers(1, 20))
    def allocate(self, data: st.DataObject, num_tokens: int) -> None:
        self.allocator.allocate([data.draw(st.sampled_from(self.idle()))], num_tokens, max_tokens=MAX_TOKENS)

    @precondition(lambda self: self.live() and self.idle())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = data.draw(st.sampled_from(self.live())), data.draw(st.sampled_from(self.idle()))
        self.allocator.fork([parent], [child])

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.allocator.free([data.draw(st.sampled_from(self.live()))])

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.live()))
        assert self.allocator.swap_out([row]) is not None
        self.swapped.add(row)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_back(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.swapped)))
        if self.allocator.swap_in([row]) is not None:
            self.swapped.remove(row)

    @precondition(lambda self: self.live(most=MAX_TOKENS - 1))
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        candidates = st.sampled_from(self.live(most=MAX_TOKENS - 1))
        rows = np.array(data.draw(st.lists(candidates, min_size=1, unique=True)))
        if self.allocator.append(rows) is None:
            return
        tables = self.allocator.block_tables(rows)
        self.device.update(rows, tables)
        counts = -(-self.allocator.num_tokens(rows) // self.allocator.block_size)
        for row, table, count in zip(rows, tables, counts, strict=True):
            assert self.device.tables[row, :count].tolist() == table[:count].tolist()
        assert self.device.update(rows, tables) == 0, "what is known is sent again"


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_a_row_is_sent_when_it_takes_a_block() -> None:
    """Rows that decode side by side, each out of step with the others: as many sends as blocks."""
    block_size, num_steps = 4, 21
    allocator = PagedSwapAllocator(Pool(400, MAX_ROWS, MAX_TOKENS, 400), block_size=block_size)
    device = DeviceTables(MAX_ROWS, MAX_TOKENS // block_size, CPU)
    rows = np.arange(MAX_ROWS)
    for row in rows:
        allocator.allocate([row], 1 + int(row), max_tokens=MAX_TOKENS)
    device.update(rows, allocator.block_tables(rows))
    held = allocator.usage().held
    sent = []
    for _ in range(num_steps):
        assert allocator.append(rows) is not None
        sent.append(device.update(rows, allocator.block_tables(rows)))
    assert sum(sent) == (allocator.usage().held - held) // block_size
    assert max(sent) < MAX_ROWS


def test_a_row_that_leaves_and_another_that_grows_are_told_apart() -> None:
    """Rows that stay are not sent again because others come, end or grow longer than they are."""
    device = DeviceTables(4, 8, CPU)
    assert device.update(np.array([0, 2]), np.array([[5, 0], [6, 7]], np.int32)) == 2
    assert device.update(np.array([2]), np.array([[6, 7]], np.int32)) == 0
    wider = np.array([[1, 2, 3, 4], [6, 7, 0, 0], [5, 0, 0, 0]], np.int32)
    assert device.update(np.array([3, 2, 0]), wider) == 1
    assert device.update(np.array([3]), np.array([[1, 2]], np.int32)) == 0, "its table begins as before"
    assert device.update(np.array([3]), np.array([[9, 2]], np.int32)) == 1
    assert device.tables[3].tolist() == [9, 2, 0, 0, 0, 0, 0, 0]
