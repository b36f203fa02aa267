"""How many tokens each request may generate."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import ConfigError
from kvbench.input_files import read_columns, token_count

SETTING = "workload.output_tokens"
LONGEST = 2**31 - 1
FORMS = "an integer from 1 to 2^31 - 1, {uniform: [low, high]}, {lognormal: {mean: ..., cv: ...}} or {from: file.csv}"


def output_lengths(spec: Any, num_requests: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Tokens per request, int64 ``[num_requests]``, each >= 1, as ``workload.output_tokens`` says.

    uniform: integers, both ends included. lognormal: mean and coefficient of variation of the
    distribution before rounding. from: drawn with replacement from the file's ``output_tokens``.
    Raises ConfigError on any other form.
    """
    if _is_count(spec):
        return np.full(num_requests, spec, dtype=np.int64)
    if not isinstance(spec, Mapping) or len(spec) != 1:
        raise _illegal(spec)
    ((form, value),) = spec.items()
    if form == "uniform":
        return _uniform(value, num_requests, rng)
    if form == "lognormal":
        return _lognormal(value, num_requests, rng)
    if form == "from" and isinstance(value, str):
        counts = read_columns(value, {"output_tokens": token_count}, SETTING)["output_tokens"]
        return rng.choice(np.array(counts, dtype=np.int64), num_requests)
    raise _illegal(spec)


def _uniform(bounds: Any, num_requests: int, rng: np.random.Generator) -> NDArray[np.int64]:
    if not isinstance(bounds, Sequence) or len(bounds) != 2 or not all(map(_is_count, bounds)):
        raise _illegal({"uniform": bounds})
    low, high = bounds
    if low > high:
        raise _illegal({"uniform": bounds})
    return rng.integers(low, high, num_requests, endpoint=True)


def _lognormal(moments: Any, num_requests: int, rng: np.random.Generator) -> NDArray[np.int64]:
    if not isinstance(moments, Mapping) or set(moments) != {"mean", "cv"}:
        raise _illegal({"lognormal": moments})
    mean, cv = moments["mean"], moments["cv"]
    if not all(isinstance(number, int | float) and 0 < number <= LONGEST for number in (mean, cv)):
        raise _illegal({"lognormal": moments})
    variance = np.log1p(cv**2)
    lengths = rng.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), num_requests)
    return np.clip(np.rint(lengths), 1, LONGEST).astype(np.int64)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LONGEST


def _illegal(spec: Any) -> ConfigError:
    return ConfigError(f"{SETTING}: {spec!r} is not legal; it must be {FORMS}")
