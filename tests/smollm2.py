"""Tests on the real model: quick where its weights are cached, slow where they must be downloaded first."""

import functools
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from kvbench import models, weights

Test = TypeVar("Test", bound=Callable[..., object])

CACHED = any((weights.cache_root() / f"smollm2-{origin}").is_dir() for origin in weights.SOURCES)


def needs_smollm2(test: Test) -> Test:
    return test if CACHED else pytest.mark.slow(test)


@functools.cache
def smollm2() -> models.LoadedModel:
    """SmolLM2 in float32, loaded once for all tests; they may choose its attention function, nothing else."""
    return models.load(models.ModelConfig(), torch.float32)
