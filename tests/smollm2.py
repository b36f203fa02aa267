"""Tests on the real model: quick where its weights are cached, slow where they must be downloaded first."""

from collections.abc import Callable
from typing import TypeVar

import pytest

from kvbench import weights

Test = TypeVar("Test", bound=Callable[..., object])

CACHED = any((weights.cache_root() / f"smollm2-{origin}").is_dir() for origin in weights.SOURCES)


def needs_smollm2(test: Test) -> Test:
    return test if CACHED else pytest.mark.slow(test)
