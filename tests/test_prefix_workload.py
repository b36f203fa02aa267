"""Workloads with shared prefixes, of conversations, and of prompt lengths drawn from distributions."""

from dataclasses import replace

import numpy as np
import pytest

from kvbench import config, job
from kvbench.allocator import Capability
from kvbench.arrivals import ArrivalConfig
from kvbench.byte_tokenizer import ByteTokenizer
from kvbench.chat import ChatConfig
from kvbench.errors import ConfigError
from kvbench.group import Status
from kvbench.length_filter import FilterConfig
from kvbench.prompts import read_prompts
from kvbench.workload import build
from kvbench.workload_config import PrefixConfig, WorkloadConfig
from tests.composed import composed

LENGTHS = WorkloadConfig(
    input_tokens={"uniform": [3, 40]}, output_tokens={"uniform": [1, 9]}, num_requests=200, chat_template=False
)
CHAT = WorkloadConfig(
    histogram="sharegpt",
    num_requests=4000,
    arrival=ArrivalConfig("poisson", rate=1.0),
    chat=ChatConfig(3.5, max_input=1024, max_output=500),
    output_tokens=None,
    chat_template=False,
)


def requests_of(cfg: WorkloadConfig, tokenizer: ByteTokenizer | None = None, seed: int = 0, max_tokens: int = 2**20):
    return build(cfg, tokenizer, vocab_size=257, max_tokens=max_tokens, seed=seed).requests


def test_input_tokens_are_drawn_as_output_tokens_are() -> None:
    """Without a tokenizer and with one; independent of each other; filtered by drawing again."""
    for tokenizer in (None, ByteTokenizer()):
        requests = requests_of(LENGTHS, tokenizer)
        assert {len(r.prompt) for r in requests} == set(range(3, 41))
        assert {r.max_new_tokens for r in requests} == set(range(1, 10))
        assert len({r.max_new_tokens for r in requests if len(r.prompt) < 8}) > 5
        kept = requests_of(replace(LENGTHS, filter=FilterConfig(min_input=30)), tokenizer)
        assert len(kept) == 200
        assert {len(r.prompt) for r in kept} == set(range(30, 41))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"output_tokens": None}, "workload.output_tokens: None is not legal"),
     ({"input_tokens": 0}, "workload.input_tokens: 0 is not legal"),
     ({"histogram": "alpaca"}, "workload.input_tokens: must be null with workload.histogram"),
     ({"chat_template": True}, "workload.chat_template: must be false with workload.input_tokens"),
     ({"prefix": PrefixConfig(0)}, "workload.prefix.tokens: 0 is not an integer >= 1, or null"),
     ({"prefix": PrefixConfig(1, 0)}, "workload.prefix.num_prefixes: 0 is not an integer >= 1"),
     ({"chat": ChatConfig(2)}, "workload.chat.mean_rounds: must be null without workload.histogram"),
     ({"chat": ChatConfig(0.5)}, "workload.chat.mean_rounds: 0.5 is not a finite number >= 1"),
     ({"chat": ChatConfig(max_input=0)}, "workload.chat.max_input: 0 is not an integer >= 1")],
)  # fmt: skip
def test_illegal_settings_are_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        requests_of(replace(LENGTHS, **change))


# Prefixes


def test_a_prefix_stands_before_what_the_prompt_was() -> None:
    """Text of exact length from the shipped prompts, equal for equal ids; nothing else of the workload moves."""
    before = requests_of(LENGTHS, ByteTokenizer())
    after = requests_of(replace(LENGTHS, prefix=PrefixConfig(50, num_prefixes=3)), ByteTokenizer())
    prefixes = {r.prefix_id: r.prompt[:50].tobytes() for r in after}
    assert set(prefixes) == {0, 1, 2}
    assert len(set(prefixes.values())) == 3
    for plain, request in zip(before, after, strict=True):
        assert request.num_prefix_tokens == 50
        assert request.prompt[:50].tobytes() == prefixes[request.prefix_id]
        assert request.prompt[50:].tolist() == plain.prompt.tolist()
        assert request.prompt.dtype == np.int32
        assert (request.arrival_s, request.max_new_tokens) == (plain.arrival_s, plain.max_new_tokens)
    text = bytes(after[0].prompt[:20].tolist()).decode()
    assert any(text in prompt for prompt in read_prompts(None))
    assert all(r.prefix_id is None and r.num_prefix_tokens == 0 for r in before)


def test_without_a_tokenizer_prompts_grow_by_the_prefix() -> None:
    before = requests_of(LENGTHS)
    after = requests_of(replace(LENGTHS, prefix=PrefixConfig(50)))
    assert [len(r.prompt) for r in after] == [len(r.prompt) + 50 for r in before]
    assert {(r.prefix_id, r.num_prefix_tokens) for r in after} == {(0, 50)}
    assert after[0].prompt.strides == (0,), "one number, however many tokens"


def test_a_truncated_prompt_has_lost_its_prefix() -> None:
    cfg = replace(LENGTHS, prefix=PrefixConfig(50), too_long="truncate")
    whole, fitted = requests_of(cfg), requests_of(cfg, max_tokens=70)
    was_cut = [len(after.prompt) < len(before.prompt) for before, after in zip(whole, fitted, strict=True)]
    assert set(was_cut) == {True, False}
    expected = [(None, 0) if cut else (0, 50) for cut in was_cut]
    assert [(request.prefix_id, request.num_prefix_tokens) for request in fitted] == expected


# Conversations


def test_a_chat_prompt_is_the_conversation_so_far() -> None:
    """Uncut, a prompt is the sum of 2 r - 1 lengths, with r geometric; of one round, what it was without chat."""
    cfg = replace(CHAT, chat=ChatConfig(3.5, max_input=2**20, max_output=2**20))
    single = requests_of(replace(CHAT, chat=ChatConfig()))
    inputs, outputs = (np.mean([f(r) for r in single]) for f in (lambda r: len(r.prompt), lambda r: r.max_new_tokens))
    chat = requests_of(cfg)
    mean = np.mean([len(r.prompt) for r in chat])
    assert mean == pytest.approx(inputs + 2.5 * (inputs + outputs), rel=0.08)
    assert np.mean([r.max_new_tokens for r in chat]) == pytest.approx(outputs, rel=0.08)
    one = requests_of(replace(cfg, chat=ChatConfig(1, max_input=2**20, max_output=2**20)))
    assert [(len(r.prompt), r.max_new_tokens) for r in one] == [(len(r.prompt), r.max_new_tokens) for r in single]


def test_a_conversation_is_cut_to_its_end() -> None:
    whole = requests_of(replace(CHAT, chat=ChatConfig(3.5, max_input=2**20, max_output=2**20)))
    for cut, request in zip(requests_of(CHAT), whole, strict=True):
        assert len(cut.prompt) == min(len(request.prompt), 1024)
        assert cut.max_new_tokens == min(request.max_new_tokens, 500)


def test_a_longer_run_of_conversations_begins_like_a_shorter_one() -> None:
    few, many = requests_of(replace(CHAT, num_requests=50)), requests_of(CHAT)
    assert [len(r.prompt) for r in few] == [len(r.prompt) for r in many[:50]]


# Runs

ROOFLINE = (
    "+setup=paper_llama_13b", "workload=translation", "workload.duration_s=null", "workload.num_requests=40",
    "workload.arrival.rate=20", "workload.prefix.tokens=53",
)  # fmt: skip


def built(*settings: str) -> job.Job:
    return job.build(config.typed(composed(*ROOFLINE, *settings)))


@pytest.mark.parametrize("allocator", ["paged", "buddy_oracle"])
def test_who_shares_is_what_differs(allocator: str) -> None:
    run = built(f"allocator={allocator}", "workload.prefix.num_prefixes=2")
    shares = Capability.FORK_SHARES in run.engine.allocator.supports
    assert run.engine.allocator.pool.max_rows == 256 + 2 * shares
    steps = run.recorder.steps(run.engine.run(run.groups))
    prefills = steps.loc[steps["kind"] == "prefill", "num_new_tokens"].sum()
    assert prefills == sum(group.prompt_length - 53 * shares for group in run.groups)
    assert all(group.status is Status.FINISHED for group in run.groups)


def test_prefixes_that_fill_the_pool_are_refused() -> None:
    """53 tokens take four blocks of 16; a block of the watermark, and none is left."""
    for num_blocks in (4, 5):
        with pytest.raises(ConfigError, match=r"workload\.prefix: 1 prefixes of 53 tokens in all leave no room"):
            built("allocator=paged", f"pool.size={num_blocks * 16 * 819200}", "max_model_len=200")


@pytest.mark.parametrize(("num_blocks", "fits"), [(17, False), (18, True)])
def test_a_request_must_fit_beside_the_prefixes(num_blocks: int, fits: bool) -> None:
    """53 + 100 + 50 tokens, the last without KV, take 13 blocks of 16; the prefix four and the watermark one."""
    settings = (
        "allocator=paged", "scheduler.oversized=reject", f"pool.size={num_blocks * 16 * 819200}",
        "workload.input_tokens=100", "workload.output_tokens=50",
    )  # fmt: skip
    run = built(*settings)
    run.engine.run(run.groups)
    assert all(group.status is (Status.FINISHED if fits else Status.REJECTED) for group in run.groups)
    if not fits:
        assert "more than the 192 slots of the pool can hold beside the prefixes of workload.prefix" in str(
            run.groups[0].error
        )
        with pytest.raises(ConfigError, match=r"pool\.size: request 0 needs 1 x 202 slots"):
            built(*settings, "scheduler.oversized=error")
