"""The parts of a step sum to it, and the device is waited for once."""

import time

import pytest
import torch

from kvbench.executors.timing import EventStopwatch, HostStopwatch, stopwatch


class Stream:
    """Events of a device that lags behind: marks are times of the device, readable once it was waited for."""

    def __init__(self) -> None:
        self.clock_ms = 0.0
        self.waits: list[float] = []

    def new_event(self) -> "Event":
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def record(self) -> None:
        self.time_ms = self.stream.clock_ms

    def synchronize(self) -> None:
        self.stream.waits.append(self.time_ms)

    def elapsed_time(self, end: "Event") -> float:
        assert self.stream.waits
        assert end.time_ms <= max(self.stream.waits), "read before the device got there"
        return end.time_ms - self.time_ms


def test_events_are_read_after_one_wait_for_the_last() -> None:
    stream = Stream()
    watch = EventStopwatch(stream.new_event)  # type: ignore[arg-type]
    for part, milliseconds in (("copy", 1), ("model", 20), ("sample", 3), ("copy", 4)):
        stream.clock_ms += milliseconds
        watch.lap(part)
    assert not stream.waits
    assert watch.seconds() == pytest.approx({"copy": 0.005, "model": 0.02, "sample": 0.003})
    assert stream.waits == [28]


def test_host_parts_sum_to_the_step() -> None:
    start = time.perf_counter()
    watch = stopwatch(torch.device("cpu"))
    assert isinstance(watch, HostStopwatch)
    for part in ("copy", "model", "copy"):
        time.sleep(0.002)
        watch.lap(part)
    elapsed = time.perf_counter() - start
    seconds = watch.seconds()
    assert seconds["copy"] >= 0.004
    assert seconds["model"] >= 0.002
    assert 0.006 <= sum(seconds.values()) <= elapsed
