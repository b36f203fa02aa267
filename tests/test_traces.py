"""Traces: every public format, what is malformed in each, windows, rates, and Parquet that reads back equal."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvbench import traces
from kvbench.byte_tokenizer import ByteTokenizer
from kvbench.errors import ConfigError
from kvbench.length_filter import FilterConfig
from kvbench.traces import Trace, TraceConfig

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
NO_FILTER = FilterConfig()
in_tmp_path = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def save(tmp_path: Path, text: str | bytes, name: str = "trace") -> str:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def mooncake(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def conversation(*turns: tuple[str, object]) -> dict:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


def assert_equal(left: Trace, right: Trace) -> None:
    for name in ("input_tokens", "output_tokens", "arrival_s"):
        ours, theirs = getattr(left, name), getattr(right, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            np.testing.assert_array_equal(ours, theirs, strict=True)
    ids = [None if trace.hash_ids is None else trace.hash_ids.tolist() for trace in (left, right)]
    assert ids[0] == ids[1]


# Formats: each file holds the same requests, and `auto` knows it

EXPECTED = {
    "azure": AZURE + "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
    "2023-11-16 18:15:51.2224670,879,55\n",
    "azure 2024": AZURE + "2024-05-10 00:00:01+00:00,374,44\n"
    "2024-05-10 01:00:05.314579+01:00,396,109\n"
    "2024-05-10T00:00:05.541877Z,879,55\n",
    "burstgpt": BURSTGPT + "7,ChatGPT,374,44,418,Conversation log\n"
    "11.314579,GPT-4,396,109,505,API log\n"
    "11.541877,GPT-4,879,55,934,API log\n",
    "csv": "arrival_s,note,output_tokens,input_tokens\r\n0,,44,374\r\n4.314579,,109,396\r\n\r\n4.541877,,55,879\r\n",
    "mooncake": mooncake(
        {"timestamp": 27482, "input_length": 374, "output_length": 44, "hash_ids": [46]},
        {"timestamp": 31796.579, "input_length": 396, "output_length": 109, "hash_ids": [46]},
        {"timestamp": 32023.877, "input_length": 879, "output_length": 55, "hash_ids": [46, 47]},
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_formats_are_known_by_their_content(tmp_path, name):
    file = save(tmp_path, EXPECTED[name])
    trace, provenance = traces.read(file)
    assert trace.input_tokens.tolist() == [374, 396, 879]
    assert trace.output_tokens.tolist() == [44, 109, 55]
    assert trace.arrival_s.tolist() == pytest.approx([0, 4.314579, 4.541877], abs=1e-9)
    assert (trace.hash_ids is None) == (name != "mooncake")
    if name == "mooncake":
        assert trace.hash_ids.tolist() == [(46,), (46,), (46, 47)]
    assert provenance == {
        "file": "trace",
        "sha256": hashlib.sha256(EXPECTED[name].encode()).hexdigest(),
        "format": name.split()[0],
        "rows_read": 3,
        "rows_skipped": 0,
    }
    named, _ = traces.read(file, format=name.split()[0])
    assert_equal(trace, named)


def test_azure_arrivals_are_exact_to_the_microsecond(tmp_path):
    trace, _ = traces.read(save(tmp_path, EXPECTED["azure"]))
    assert trace.arrival_s.tolist() == [0.0, 4.314579, 4.541877]


def test_rows_are_put_in_order_of_arrival_and_ties_stay_in_file_order(tmp_path):
    rows = [(2 + i * 7 % 3, i + 1) for i in range(300)]
    text = "arrival_s,input_tokens,output_tokens\n" + "".join(f"{at},{tokens},1\n" for at, tokens in rows)
    trace, _ = traces.read(save(tmp_path, text))
    expected = sorted(rows, key=lambda row: row[0])
    assert list(zip(trace.arrival_s, trace.input_tokens, strict=True)) == expected  # a plain file's times stand
    trace, _ = traces.read(save(tmp_path, AZURE + "2023-01-01 00:00:02,1,1\n2023-01-01 00:00:00,2,2\n"))
    assert trace.arrival_s.tolist() == [0, 2]


def test_arrivals_are_optional_in_plain_files_only(tmp_path):
    trace, _ = traces.read(save(tmp_path, '\ufeff"input_tokens",output_tokens\n"3",4\n'))
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist(), trace.arrival_s) == ([3], [4], None)
    with pytest.raises(ConfigError, match=r"workload\.trace\.file: .*:1: no column 'TIMESTAMP'; needed: TIMESTAMP"):
        traces.read(save(tmp_path, "ContextTokens,GeneratedTokens\n1,2\n"), format="azure")


def test_sharegpt_takes_the_first_human_turn_that_is_answered(tmp_path):
    items = [
        conversation(("gpt", "hello"), ("human", "ab"), ("gpt", "cde"), ("human", "later"), ("gpt", "more")),
        conversation(("human", "only")),
        conversation(("user", "é"), ("assistant", "x")),
        conversation(("human", ""), ("gpt", "refused")),
    ]
    trace, provenance = traces.read(save(tmp_path, json.dumps(items)), tokenizer=ByteTokenizer())
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([2, 2], [3, 1])
    assert trace.arrival_s is None
    counts = {key: provenance[key] for key in ("format", "rows_read", "rows_skipped", "rows_without_pair")}
    assert counts == {"format": "sharegpt", "rows_read": 4, "rows_skipped": 0, "rows_without_pair": 2}
    with pytest.raises(ConfigError, match=r"workload\.trace\.tokenizer: .*no tokenizer.*name one: smollm2, bytes"):
        traces.read(save(tmp_path, json.dumps(items)))


# Malformed rows

BAD = {
    "azure": {
        "2023-11-16 18:15:46,5,0": "GeneratedTokens is '0'",
        "2023-11-16 18:15:46,,5": "ContextTokens is ''",
        "2023-11-16 18:15:46,5": "GeneratedTokens is None",
        "2023-02-30 18:15:46,5,5": "TIMESTAMP is '2023-02-30 18:15:46'",
        "yesterday,5,5": "TIMESTAMP is 'yesterday'",
        '"2023-11-16 18:15:46,5,5': "TIMESTAMP is ",  # a stray quote
    },
    "burstgpt": {
        "1,m,5,0,5,x": "Response tokens is '0'",
        "-1,m,5,5,5,x": "Timestamp is '-1'",
        "1,m,5.0,5,5,x": "Request tokens is '5.0'",
        "1,m": "Request tokens is None",
    },
    "csv": {
        "nan,5,5": "arrival_s is 'nan'",
        "inf,5,5": "arrival_s is 'inf'",
        "1,5,1_0": "output_tokens is '1_0'",
        "1,-5,5": "input_tokens is '-5'",
        "1,99999999999,5": "input_tokens is '99999999999'",
    },
    "mooncake": {
        "{broken": "timestamp is '{broken'",
        "[1, 5, 5]": "timestamp is '[1, 5, 5]'",
        '{"timestamp": 1, "input_length": 5}': "output_length is None",
        '{"timestamp": 1, "input_length": "5", "output_length": 5}': "input_length is '5'",
        '{"timestamp": 1, "input_length": 5, "output_length": true}': "output_length is True",
        '{"timestamp": true, "input_length": 5, "output_length": 5}': "timestamp is True",
        '{"timestamp": NaN, "input_length": 5, "output_length": 5}': "timestamp is nan",
        '{"timestamp": 1%s, "input_length": 5, "output_length": 5}' % ("0" * 400): "timestamp is 1000",
        '{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [1.5]}': "hash_ids is [1.5]",
    },
}
GOOD = {
    "azure": (AZURE, "2023-11-16 18:15:46,5,6"),
    "burstgpt": (BURSTGPT, "1,m,5,6,11,x"),
    "csv": ("arrival_s,input_tokens,output_tokens\n", "1,5,6"),
    "mooncake": ("", '{"timestamp": 1, "input_length": 5, "output_length": 6}'),
}


@pytest.mark.parametrize(
    ("name", "bad", "what"), [(name, *case) for name, cases in BAD.items() for case in cases.items()]
)
def test_a_malformed_row_is_an_error_with_its_line_or_skipped_and_counted(tmp_path, name, bad, what):
    header, good = GOOD[name]
    file = save(tmp_path, f"{header}{good}\n\n{bad}\n{good}\n")
    line = 3 + (header != "")
    message = rf"^workload\.trace\.file: {re.escape(file)}:{line}: {re.escape(what)}.*on_bad_row=skip"
    with pytest.raises(ConfigError, match=message):
        traces.read(file)
    trace, provenance = traces.read(file, on_bad_row="skip")
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([5, 5], [6, 6])
    assert (provenance["rows_read"], provenance["rows_skipped"]) == (3, 1)


@pytest.mark.parametrize(
    "bad",
    [
        [],
        {},
        "text",
        {"conversations": {}},
        {"conversations": ["hi"]},
        conversation(("human", 3), ("gpt", "x")),
        conversation(("human", "\ud800"), ("gpt", "x")),
    ],
)
def test_malformed_conversations(tmp_path, bad):
    good = conversation(("human", "ab"), ("gpt", "c"))
    file = save(tmp_path, "[\n" + ",\n".join(json.dumps(item) for item in (good, bad, good)) + "\n]")
    with pytest.raises(ConfigError, match=rf"^workload\.trace\.file: {re.escape(file)}:3: human turn is "):
        traces.read(file, tokenizer=ByteTokenizer())
    trace, provenance = traces.read(file, tokenizer=ByteTokenizer(), on_bad_row="skip")
    assert (len(trace), provenance["rows_skipped"]) == (2, 1)


def test_malformed_parquet_rows_are_named_by_row(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for column, values in {"arrival_s": [0.0, None], "input_tokens": [1, 0], "output_tokens": [1, None]}.items():
        columns = {"arrival_s": [0.0, 1.0], "input_tokens": [1, 1], "output_tokens": [1, 1]} | {column: values}
        pq.write_table(pa.table(columns), tmp_path / "t.parquet")
        with pytest.raises(ConfigError, match=rf"t\.parquet:2: {column} is (None|0), not"):
            traces.read(str(tmp_path / "t.parquet"))
        trace, provenance = traces.read(str(tmp_path / "t.parquet"), on_bad_row="skip")
        assert (len(trace), provenance["rows_skipped"]) == (1, 1)


@pytest.mark.parametrize(
    ("content", "what"),
    [("", r":1: none of the formats azure,.*sharegpt"), ("a,b\n1,2\n", r":1: none of the formats.*'a, b'"),
     (AZURE, r":1: no rows"), (AZURE + "x,1,1\n", r":2: TIMESTAMP"), (b"PAR1 but no more", "cannot be read as auto"),
     ("[{]", r":1: not JSON"), ("[3", r":1: ")],
)  # fmt: skip
def test_files_that_are_no_trace(tmp_path, content, what):
    file = save(tmp_path, content)
    with pytest.raises(ConfigError, match=rf"^workload\.trace\.file: {re.escape(file)}.*{what}"):
        traces.read(file, tokenizer=ByteTokenizer())


def test_nothing_but_malformed_rows_is_an_error_even_when_skipped(tmp_path):
    with pytest.raises(ConfigError, match="no usable row among 2"):
        traces.read(save(tmp_path, AZURE + "x,1,1\nx,1,1\n"), on_bad_row="skip")


@pytest.mark.parametrize(("options", "key"), [({"format": "xml"}, "format"), ({"on_bad_row": "drop"}, "on_bad_row")])
def test_illegal_options_are_named(tmp_path, options, key):
    with pytest.raises(ConfigError, match=rf"^workload\.trace\.{key}: .* is not one of "):
        traces.read(save(tmp_path, EXPECTED["csv"]), **options)
    with pytest.raises(ConfigError, match=r"^workload\.trace\.file: .*nowhere: cannot be read.*No such file"):
        traces.read(str(tmp_path / "nowhere"))


@in_tmp_path
@given(cells=st.lists(st.tuples(*[st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=8)] * 3)))
def test_whatever_stands_in_a_csv_is_read_skipped_or_named(tmp_path, cells):
    rows = [",".join(row) for row in cells] + ["1,5,6"]
    file = save(tmp_path, "arrival_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    trace, provenance = traces.read(file, on_bad_row="skip")
    num_rows = sum(not row.isspace() and row != "" for row in rows)
    assert provenance["rows_read"] == num_rows == len(trace) + provenance["rows_skipped"]
    assert min(trace.input_tokens.min(), trace.output_tokens.min()) >= 1
    if provenance["rows_skipped"]:
        with pytest.raises(ConfigError, match=r"trace:\d+: (arrival_s|input_tokens|output_tokens) is "):
            traces.read(file)


# Parquet


@st.composite
def a_trace(draw: st.DrawFn) -> Trace:
    n = draw(st.integers(1, 12))
    counts = hnp.arrays(np.int64, n, elements=st.integers(1, 2**31 - 1))
    arrivals = hnp.arrays(np.float64, n, elements=st.floats(0, 1e9)).map(np.sort)
    ids = st.lists(st.lists(st.integers(0, 2**62), max_size=3).map(tuple), min_size=n, max_size=n)
    hash_ids = draw(st.none() | ids.filter(any).map(lambda rows: np.fromiter(rows, object, n)))
    return Trace(draw(counts), draw(counts), draw(st.none() | arrivals), hash_ids)


@in_tmp_path
@given(trace=a_trace())
def test_a_written_trace_reads_back_equal(tmp_path, trace):
    traces.write(tmp_path / "t.parquet", trace)
    again, provenance = traces.read(str(tmp_path / "t.parquet"))
    assert_equal(trace, again)
    assert (provenance["format"], provenance["rows_read"]) == ("parquet", len(trace))


@pytest.mark.parametrize("name", EXPECTED)
def test_every_format_and_a_window_of_it_survive_parquet(tmp_path, name):
    trace, _ = traces.read(save(tmp_path, EXPECTED[name]))
    window, _ = traces.select(trace, TraceConfig(window_s=[4.0, 4.5]), NO_FILTER)
    assert window.arrival_s[0] > 0  # a reader that moved the first arrival to 0 would be found out
    for original in (trace, window):
        traces.write(tmp_path / "t.parquet", original)
        assert_equal(original, traces.read(str(tmp_path / "t.parquet"))[0])


# Selection
