"""Keys of a prompt's blocks: equal exactly where the prompts are equal up to there."""

import json
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocators.paged_prefix import PagedPrefixAllocator
from kvbench.allocator import Pool
from kvbench.byte_tokenizer import ByteTokenizer
from kvbench.config import SchedulerConfig
from kvbench.content import TOKENS_PER_HASH_ID, block_keys
from kvbench.engine import Engine
from kvbench.executors.cost_model import CostModel
from kvbench.executors.roofline import RooflineExecutor
from kvbench.group import Group
from kvbench.recorder import Recorder
from kvbench.request import Request, Sampling
from kvbench.reservation import kv_tokens
from kvbench.scheduler import Scheduler
from kvbench.sequences import SequenceTable
from kvbench.traces import TraceConfig
from kvbench.workload import build
from kvbench.workload_config import WorkloadConfig
from tests.cli import Cli
from tests.engine.test_leap import DEVICE, SHAPE

GREEDY = Sampling(ignore_eos=True)


def text(tokens: Iterable[int]) -> Request:
    return Request(0, np.array(list(tokens), np.int32), 0.0, 1, GREEDY)


def named(num_tokens: int, hash_ids: tuple[int, ...] = (), prefix: tuple[int, int] | None = None) -> Request:
    """A prompt without text. prefix: its id and length."""
    prefix_id, length = prefix or (None, 0)
    return Request(0, np.zeros(num_tokens, np.int32), 0.0, 1, GREEDY, hash_ids, prefix_id, length, is_text=False)


def num_equal(one: Request, other: Request, block_size: int) -> int:
    """Blocks that the requests name alike; asserts that they are the first of both."""
    keys = [block_keys(request, block_size).tolist() for request in (one, other)]
    assert all(len(set(names)) == len(names) for names in keys)
    same = [i for i, (a, b) in enumerate(zip(*keys, strict=False)) if a == b]
    assert same == list(range(len(same)))
    assert len(set(keys[0]) & set(keys[1])) == len(same)
    return len(same)


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@given(one=tokens, other=tokens, block_size=st.sampled_from([1, 3, 8]))
def test_texts_are_named_alike_as_far_as_they_agree(one: list[int], other: list[int], block_size: int) -> None:
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert num_equal(text(one), text(other), block_size) == common // block_size
    assert len(block_keys(text(one), block_size)) == len(one) // block_size


@pytest.mark.parametrize(
    ("block_size", "num_keys", "alike"),
    [(1, 1500, 1024), (16, 93, 64), (512, 2, 2), (48, 31, 21), (1000, 1, 1), (1024, 1, 1), (2048, 0, 0)],
)
def test_ids_of_a_trace_name_any_block_size(block_size: int, num_keys: int, alike: int) -> None:
    """A block that reaches into a third id is known by the third, also if it agrees with the second's."""
    one, other = named(1500, (7, 8, 9)), named(1530, (7, 8, 10))
    assert len(block_keys(one, block_size)) == num_keys
    assert num_equal(one, other, block_size) == alike


def test_neighbouring_ids_and_places_have_keys_of_their_own() -> None:
    keys = [block_keys(named(512 * 50, tuple(range(50 * i, 50 * i + 50))), 16) for i in range(100)]
    assert len(np.unique(np.concatenate(keys))) == 100 * 50 * 32


def test_a_known_prefix_is_all_that_placeholders_have_in_common() -> None:
    assert num_equal(named(40, prefix=(1, 20)), named(50, prefix=(1, 20)), 8) == 2
    assert num_equal(named(1300, prefix=(1, 1200)), named(1201, prefix=(1, 1200)), 16) == 75
    assert num_equal(named(40, prefix=(1, 20)), named(40, prefix=(2, 20)), 8) == 0
    assert len(block_keys(named(40), 8)) == 0


def test_only_an_executor_without_tokens_believes_the_trace(tmp_path) -> None:
    file = mooncake(tmp_path, [(600, [1, 2])])
    cfg = WorkloadConfig(trace=TraceConfig(file=file), chat_template=False, output_tokens=None, ignore_eos=True)
    for tokenizer in (None, ByteTokenizer()):
        (request,) = build(cfg, tokenizer, vocab_size=2**16, max_tokens=10**6, seed=0).requests
        assert request.is_text == (tokenizer is not None)
        assert request.hash_ids == (1, 2)


def mooncake(folder, prompts: list[tuple[int, list[int]]]) -> str:
    """A trace of prompts (length, ids), a second apart."""
    lines = [
        {"timestamp": 1000 * i, "input_length": length, "output_length": 2 + i % 3, "hash_ids": ids}
        for i, (length, ids) in enumerate(prompts)
    ]
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def conversations(seed: int, count: int = 60) -> list[tuple[int, list[int]]]:
    """Prompts that continue one another behind one system prompt, as in Mooncake's traces."""
    rng = np.random.default_rng(seed)
    prompts: list[tuple[int, list[int]]] = [(512, [0])]
    for _ in range(count):
        base = [0] if rng.random() < 0.3 else prompts[rng.integers(len(prompts))][1]
        if rng.random() < 0.1:
            prompts.append(prompts[rng.integers(len(prompts))])
            continue
        whole = base[: rng.integers(1, len(base) + 1)]
        fresh = 1 + max(max(ids) for _, ids in prompts)
        ids = [*whole, *range(fresh, fresh + int(rng.integers(1, 4)))]
        prompts.append((512 * len(ids) - int(rng.integers(0, 511)), ids))
    return prompts


def counted(prompts: list[tuple[int, list[int]]], block_size: int) -> list[int]:
    """Tokens that each prompt finds if nothing is ever forgotten, straight from the ids. block_size divides 512."""
    written: dict[int, int] = {}  # tokens of the id's 512 that some prompt had
    found = []
    for length, ids in prompts:
        num_known = 0
        for place, hash_id in enumerate(ids):
            own = min(TOKENS_PER_HASH_ID, length - TOKENS_PER_HASH_ID * place)
            known = min(own, written.get(hash_id, 0)) // block_size * block_size
            num_known += known
            if known < TOKENS_PER_HASH_ID:
                break
        found.append(min(num_known, (length - 1) // block_size * block_size))
        for place, hash_id in enumerate(ids):
            own = min(TOKENS_PER_HASH_ID, length - TOKENS_PER_HASH_ID * place)
            written[hash_id] = max(own, written.get(hash_id, 0))
    return found


@pytest.mark.parametrize("block_size", [16, 512])
def test_a_pool_without_end_finds_what_the_trace_says(tmp_path, block_size: int) -> None:
    prompts = conversations(block_size)
    cfg = WorkloadConfig(trace=TraceConfig(file=mooncake(tmp_path, prompts)), chat_template=False, output_tokens=None)
    requests = build(cfg, None, vocab_size=2, max_tokens=10**6, seed=0).requests
    expected = counted(prompts, block_size)
    assert sum(expected) > 512 * len(prompts)
    allocator = PagedPrefixAllocator(Pool(10**6, 64, 40_000), block_size=block_size)
    table = SequenceTable(64, 40_000)
    scheduler = Scheduler(allocator, table, SchedulerConfig(max_batched_tokens=1))  # prompts one after the other
    recorder = Recorder(allocator, scheduler, table, keep_tokens=False)
    executor = RooflineExecutor(CostModel(SHAPE, DEVICE, 2))
    Engine(scheduler, executor, recorder).run(Group(request, kv_tokens(request)) for request in requests)
    served = recorder.requests()
    assert served["num_cached_tokens"].tolist() == expected
    assert (served["status"] == "finished").all()


def test_what_a_trace_shares_is_in_the_report(run: Cli, tmp_path) -> None:
    prompts = conversations(1, 20)
    virtual = ("executor=roofline", "device=h100", "model=llama_31_8b", "dtype=bfloat16", "max_model_len=131072")
    trace = ("workload=trace", f"workload.trace.file={mooncake(tmp_path, prompts)}", "measure.progress=false")
    code, out, err = run(*virtual, *trace, "pool.size=30GiB", "allocator=paged_prefix,paged,static")
    assert code == 0, err
    assert "hits %" in out
    hits = {read.config()["allocator"]["name"]: read.metric("prefix_hit_fraction") for read in run.runs()}
    # A second is enough for each of these prompts.
    assert hits["paged_prefix"] == sum(counted(prompts, 16)) / sum(length for length, _ in prompts)
    assert hits["paged"] == hits["static"] == 0
