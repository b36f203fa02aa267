"""How many tokens each request has, in its prompt or to generate, by a number, a distribution or a file."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import ConfigError
from kvbench.input_files import read_columns, token_count

LONGEST = 2**31 - 1
FORMS = "an integer from 1 to 2^31 - 1, {uniform: [low, high]}, {lognormal: {mean: ..., cv: ...}} or {from: file.csv}"


def draw_lengths(spec: Any, num_requests: int, rng: np.random.Generator, *, key: str) -> NDArray[np.int64]:
    """Tokens per request, int64 ``[num_requests]``, each >= 1, as ``workload.<key>`` says.

    uniform: integers, both ends included. lognormal: mean and coefficient of variation of the
    distribution before rounding. from: drawn with replacement from the file's column ``<key>``.
    Raises ConfigError on any other form.
    """
    drawn = _draw(spec, num_requests, rng, key)
    if drawn is None:
        raise ConfigError(f"workload.{key}: {spec!r} is not legal; it must be {FORMS}")
    return drawn


def _draw(spec: Any, num_requests: int, rng: np.random.Generator, key: str) -> NDArray[np.int64] | None:
    """None where ``spec`` is illegal."""
    if _is_count(spec):
        return np.full(num_requests, spec, dtype=np.int64)
    if not isinstance(spec, Mapping) or len(spec) != 1:
        return None
    ((form, value),) = spec.items()
    if form == "uniform":
        return _uniform(value, num_requests, rng)
    if form == "lognormal":
        return _lognormal(value, num_requests, rng)
    if form == "from" and isinstance(value, str):
        counts = read_columns(value, {key: token_count}, f"workload.{key}")[key]
        return rng.choice(np.array(counts, dtype=np.int64), num_requests)
    return None


def _uniform(bounds: Any, num_requests: int, rng: np.random.Generator) -> NDArray[np.int64] | None:
    if not isinstance(bounds, Sequence) or len(bounds) != 2 or not all(map(_is_count, bounds)):
        return None
    low, high = bounds
    return rng.integers(low, high, num_requests, endpoint=True) if low <= high else None


def _lognormal(moments: Any, num_requests: int, rng: np.random.Generator) -> NDArray[np.int64] | None:
    if not isinstance(moments, Mapping) or set(moments) != {"mean", "cv"}:
        return None
    mean, cv = moments["mean"], moments["cv"]
    if not all(isinstance(number, int | float) and 0 < number <= LONGEST for number in (mean, cv)):
        return None
    variance = np.log1p(cv**2)
    lengths = rng.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), num_requests)
    return np.clip(np.rint(lengths), 1, LONGEST).astype(np.int64)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LONGEST
