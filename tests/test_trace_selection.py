"""What is taken of a trace: window, filter, number and rate, in that order."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvbench import traces
from kvbench.errors import ConfigError
from kvbench.length_filter import FilterConfig
from kvbench.traces import Trace, TraceConfig

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
NO_FILTER = FilterConfig()
in_tmp_path = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def steady(n: int) -> Trace:
    return Trace(np.arange(1, n + 1), np.arange(1, n + 1)[::-1].copy(), np.arange(n, dtype=np.float64))


def test_a_window_is_half_open_and_starts_at_zero():
    window, counts = traces.select(steady(10), TraceConfig(window_s=[3, 6]), NO_FILTER)
    assert window.input_tokens.tolist() == [4, 5, 6]
    assert window.arrival_s.tolist() == [0, 1, 2]
    assert counts == {"rows_filtered": 0}
    later, _ = traces.select(steady(10), TraceConfig(window_s=[2.5, 4]), NO_FILTER)
    assert later.arrival_s.tolist() == [0.5]


@given(
    scale=st.floats(1e-3, 1e3),
    arrivals=hnp.arrays(np.float64, 9, elements=st.integers(0, 10**12).map(lambda us: us / 1e6)).map(np.sort),
)
def test_rate_scale_divides_every_arrival_exactly(scale, arrivals):
    trace = Trace(np.ones(9, np.int64), np.ones(9, np.int64), arrivals)
    scaled, _ = traces.select(trace, TraceConfig(rate_scale=scale), NO_FILTER)
    np.testing.assert_array_equal(scaled.arrival_s, arrivals / scale)
    np.testing.assert_array_equal(scaled.input_tokens, trace.input_tokens)
    twice, _ = traces.select(trace, TraceConfig(rate_scale=2.0), NO_FILTER)
    np.testing.assert_array_equal(2 * np.diff(twice.arrival_s), np.diff(arrivals))


def test_selection_goes_window_filter_number_rate():
    cfg = TraceConfig(window_s=[2, 9], max_requests=3, rate_scale=0.5)
    chosen, counts = traces.select(steady(10), cfg, FilterConfig(min_input=5))
    assert chosen.input_tokens.tolist() == [5, 6, 7]
    assert chosen.arrival_s.tolist() == [4, 6, 8]
    assert counts == {"rows_filtered": 2}


@given(
    keep=st.builds(FilterConfig, *[st.none() | st.integers(1, 12)] * 4),
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=9),
)
def test_the_filter_keeps_what_its_bounds_say(keep, lengths):
    expected = [
        (i, o)
        for i, o in lengths
        if (keep.min_input or 0) <= i <= (keep.max_input or 99)
        and (keep.min_output or 0) <= o
        and i + o <= (keep.max_total or 99)
    ]
    inputs, outputs = (np.array(column) for column in zip(*lengths, strict=True))
    if not expected:
        with pytest.raises(ConfigError, match=r"^workload\.filter: none of the \d+ rows passes"):
            traces.select(Trace(inputs, outputs), TraceConfig(), keep)
        return
    chosen, counts = traces.select(Trace(inputs, outputs), TraceConfig(), keep)
    assert list(zip(chosen.input_tokens, chosen.output_tokens, strict=True)) == expected
    assert counts["rows_filtered"] == len(lengths) - len(expected)


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"window_s": [5, 5]}, "window_s"), ({"window_s": [-1, 5]}, "window_s"), ({"window_s": [1]}, "window_s"),
     ({"window_s": [20, 30]}, "window_s"), ({"rate_scale": 0.0}, "rate_scale"), ({"max_requests": 0}, "max_requests"),
     ({"rate_scale": float("inf")}, "rate_scale")],
)  # fmt: skip
def test_illegal_selections_are_named(changes, key):
    with pytest.raises(ConfigError, match=rf"^workload\.trace\.{key}: "):
        traces.select(steady(10), TraceConfig(**changes), NO_FILTER)


def test_a_window_needs_arrivals():
    with pytest.raises(ConfigError, match=r"^workload\.trace\.window_s: must be null"):
        traces.select(Trace(np.ones(1, np.int64), np.ones(1, np.int64)), TraceConfig(window_s=[0, 1]), NO_FILTER)
