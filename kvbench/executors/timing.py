"""Where a step's time goes, without making the device wait for the host or the host for the device."""

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch


class Stopwatch(Protocol):
    """Times one step from its creation on."""

    def lap(self, part: str) -> None:
        """What was issued since the last lap belongs to ``part``, which may come up again."""

    def seconds(self) -> dict[str, float]:
        """Seconds by part. All that was issued before the last lap is done when this returns."""


def stopwatch(device: torch.device) -> Stopwatch:
    """A stopwatch of what runs on ``device``."""
    if device.type == "cuda":
        return EventStopwatch(partial(torch.cuda.Event, enable_timing=True))
    return HostStopwatch()


class HostStopwatch:
    """For work that is done when the call that issues it returns."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        return self._seconds


class EventStopwatch:
    """For a CUDA stream: marks in it, read in the end, after one wait for the last of them.

    The stream is idle when a step begins, so a part's time includes what the host takes to issue it.

    new_event: makes an event that records times, as ``torch.cuda.Event(enable_timing=True)``.
    """

    def __init__(self, new_event: Callable[[], torch.cuda.Event]) -> None:
        self._new_event = new_event
        self._parts: list[str] = []
        self._events = [self._mark()]

    def _mark(self) -> torch.cuda.Event:
        event = self._new_event()
        event.record()
        return event

    def lap(self, part: str) -> None:
        self._parts.append(part)
        self._events.append(self._mark())

    def seconds(self) -> dict[str, float]:
        self._events[-1].synchronize()
        seconds = dict.fromkeys(self._parts, 0.0)
        for part, start, end in zip(self._parts, self._events[:-1], self._events[1:], strict=True):
            seconds[part] += start.elapsed_time(end) / 1000
        return seconds
