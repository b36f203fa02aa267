"""Prompt files: each format reads back what was written; errors name file and line; the shipped set."""

import json
import re
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.errors import ConfigError
from kvbench.prompts import SHIPPED, read_prompts
from kvbench.workload import WorkloadConfig, build
from tests.smollm2 import needs_smollm2, smollm2

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(str.strip)
ONE_LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\ufeff"), min_size=1).filter(
    str.strip
)
file_per_example = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@file_per_example
@given(prompts=st.lists(TEXT, min_size=1, max_size=6), form=st.sampled_from(["prompt", "text", None]))
def test_json_lines_round_trip(tmp_path, prompts, form):
    items = [prompt if form is None else {form: prompt, "category": "x"} for prompt in prompts]
    text = "\n\n".join(json.dumps(item, ensure_ascii=False) for item in items)
    assert read_prompts(write(tmp_path, "p.jsonl", text)) == prompts


@file_per_example
@given(prompts=st.lists(TEXT, min_size=1, max_size=6), indent=st.sampled_from([None, 2]))
def test_sharegpt_round_trip(tmp_path, prompts, indent):
    def turns(prompt):
        human, model = {"from": "human", "value": prompt}, {"from": "gpt", "value": "no"}
        return {"id": "a", "conversations": [{"from": "gpt", "value": "hello"}, human, model, human]}

    text = json.dumps([turns(prompt) for prompt in prompts], indent=indent)
    assert read_prompts(write(tmp_path, "p.json", text + "\n")) == prompts


@file_per_example
@given(prompts=st.lists(ONE_LINE, min_size=1, max_size=6), newline=st.sampled_from(["\n", "\r\n", "\n\n"]))
def test_plain_text_round_trip(tmp_path, prompts, newline):
    (tmp_path / "p.txt").write_bytes(newline.join(prompts).encode())
    assert read_prompts(str(tmp_path / "p.txt")) == prompts


def test_conversations_without_a_human_turn_are_skipped(tmp_path, caplog):
    items = [{"conversations": []}, {"conversations": [{"from": "user", "value": "hi"}]}]
    assert read_prompts(write(tmp_path, "p.json", json.dumps(items))) == ["hi"]
    assert "skipped 1 of 2" in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("p.jsonl", '"a"\n\n{"prompt": "b"\n', 3),
        ("p.jsonl", '"a"\n{"question": "b"}\n', 2),
        ("p.jsonl", '"a"\n""\n', 2),
        ("p.jsonl", '"a"\n7\n', 2),
        ("p.jsonl", '"a"\n"\\ud800"\n', 2),
        ("p.json", '{"prompt": "a"}', 1),
        ("p.json", '["a",\n\n"b"', 3),
        ("p.json", '["a",\n"b"\n"c"]', 3),
        ("p.json", '["a",\n{"x": 1}]', 2),
        ("p.json", '["a",\n "b",\n {"conversations": [{"from": "human"}]}\n]', 3),
        ("p.json", '[\n"a",\n{"conversations": "hi"}]', 3),
        ("p.json", '[\n {"text":\n  "a"},\n b]', 4),
        ("p.json", '[\n {"text":\n  "a"},\n {"x": 1}]', 4),
        ("p.json", '[\n {"text":\n  "a"}\n "c"]', 4),
    ],
)
def test_malformed_prompts_name_file_and_line(tmp_path, name, text, line):
    path = write(tmp_path, name, text)
    with pytest.raises(ConfigError, match=rf"^workload\.prompts: {re.escape(path)}:{line}: "):
        read_prompts(path)


def test_unreadable_prompt_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"workload\.prompts: cannot read .*nowhere\.txt: No such file"):
        read_prompts(str(tmp_path / "nowhere.txt"))
    (tmp_path / "latin.txt").write_bytes("fine\nna\xefve\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.txt:2: not UTF-8"):
        read_prompts(str(tmp_path / "latin.txt"))
    with pytest.raises(ConfigError, match=r"blank\.txt holds no prompt"):
        read_prompts(write(tmp_path, "blank.txt", "\n \n"))


def test_shipped_prompts_are_96_distinct_texts_of_eight_categories():
    items = [json.loads(line) for line in SHIPPED.read_text(encoding="utf-8").splitlines()]
    assert read_prompts(None) == [item["prompt"] for item in items]
    assert len({item["prompt"] for item in items}) == 96
    assert set(Counter(item["category"] for item in items).values()) == {12}
    assert len({item["category"] for item in items}) == 8


@needs_smollm2
def test_shipped_prompts_have_5_to_400_tokens():
    tokenizer = smollm2().tokenizer
    lengths = [len(tokenizer.encode(prompt)) for prompt in read_prompts(None)]
    assert 5 <= min(lengths) < 10
    assert 300 < max(lengths) <= 400
    assert len(set(lengths)) > 48  # varied


@needs_smollm2
def test_lengths_are_exact_in_smollm2_tokens(tmp_path):
    loaded = smollm2()
    file = write(tmp_path, "l.csv", "input_tokens,output_tokens\n160,106\n490,1\n1,576\n")
    cfg = WorkloadConfig(lengths=file, chat_template=False, output_tokens=None)
    vocab_size = loaded.model.config.vocab_size
    built = build(cfg, loaded.tokenizer, vocab_size=vocab_size, max_tokens=loaded.max_tokens, seed=0)
    requests = built.requests
    assert [(len(r.prompt), r.max_new_tokens) for r in requests] == [(160, 106), (490, 1), (1, 576)]
    assert " the " in loaded.tokenizer.decode(requests[1].prompt)
