"""CPU attention against the float64 reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import BaseSlots, BlockTables, cpu, openmp
from tests.kernels.cases import Shape, decode, make, prefill, relative_error

BOUND = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
# Each line compiles a kernel, so there are few: vectors of 8 and 16 lanes, odd numbers of vectors,
# groups that fill the accumulators and groups that do not.
GEOMETRIES = [  # dtype, head_dim, group, softcap
    (torch.float32, 8, 1, 5.0),
    (torch.float32, 64, 3, 0.0),
    (torch.float32, 80, 2, 0.0),
    (torch.float32, 128, 8, 50.0),
    (torch.bfloat16, 64, 3, 0.0),
    (torch.bfloat16, 96, 1, 5.0),
    (torch.float16, 32, 2, 0.0),
]
LAYOUTS = ["paged", "contiguous"]


@st.composite
def cases(draw, most_new_tokens: int):
    """A problem and the options to solve it with."""
    dtype, head_dim, group, softcap = draw(st.sampled_from(GEOMETRIES))
    lengths = draw(st.lists(st.integers(1, 90) | st.integers(500, 530), min_size=1, max_size=4))
    new_tokens = [draw(st.integers(1, min(most_new_tokens, length))) for length in lengths]
    block_size = draw(st.sampled_from([1, 2, 5, 8, 16, 17, 32, 64]))
    num_kv_heads = draw(st.integers(1, 3))
    shape = Shape(tuple(lengths), tuple(new_tokens), group, num_kv_heads, head_dim, block_size, dtype)
    options = {"window": draw(st.sampled_from([0, 1, 7, 16, 100])), "softcap": softcap}
    return make(shape, seed=draw(st.integers(0, 99))), options


@pytest.mark.parametrize("layout", LAYOUTS)
@given(case=cases(most_new_tokens=1))
def test_decode_agrees_with_the_reference(layout, case):
    problem, options = case
    expected = decode("reference", problem, layout, **options)
    assert relative_error(decode("cpu", problem, layout, **options), expected) < BOUND[problem.shape.dtype]


@pytest.mark.parametrize("layout", LAYOUTS)
@given(case=cases(most_new_tokens=70))
def test_prefill_agrees_with_the_reference(layout, case):
    problem, options = case
    expected = prefill("reference", problem, layout, **options)
    assert relative_error(prefill("cpu", problem, layout, **options), expected) < BOUND[problem.shape.dtype]


@given(case=cases(most_new_tokens=70))
def test_paged_and_contiguous_agree_to_the_bit(case):
    problem, options = case
    paged, contiguous = (prefill("cpu", problem, layout, **options) for layout in LAYOUTS)
    assert torch.equal(paged, contiguous)


def test_long_contexts_stay_exact():
    problem = make(Shape(lengths=(4096, 2047, 1025), new_tokens=(1, 1, 1)))
    assert relative_error(decode("cpu", problem, "paged"), decode("reference", problem, "paged")) < 1e-6


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 30.0])
def test_softcap_is_exact_for_small_and_large_scores(magnitude):
    problem = make(Shape(lengths=(64,) * 8, new_tokens=(1,) * 8))
    scale = magnitude * 64**-0.5
    expected = decode("reference", problem, "paged", scale=scale, softcap=2.0)
    assert relative_error(decode("cpu", problem, "paged", scale=scale, softcap=2.0), expected) < 1e-6


def test_large_scores_do_not_overflow():
    problem = make(Shape(lengths=(100,), new_tokens=(1,)))
    expected = decode("reference", problem, "paged", scale=100.0)
    assert relative_error(decode("cpu", problem, "paged", scale=100.0), expected) < 1e-3


def test_a_row_of_length_zero_yields_zeros():
    problem = make(Shape(lengths=(5, 0, 9), new_tokens=(1, 1, 1)))
    result = decode("cpu", problem, "paged")
    assert relative_error(result, decode("reference", problem, "paged")) < 1e-6
    assert result[1].eq(0).all()


def test_results_do_not_depend_on_the_batch_or_on_threads():
    problem = make(Shape(lengths=(2000, 3, 700), new_tokens=(1, 1, 1)))
    key_cache, value_cache, _ = problem.layout("paged")
    together = decode("cpu", problem, "paged")
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(decode("cpu", problem, "paged"), together)
    finally:
        torch.set_num_threads(threads)
    for i in range(3):
        alone = cpu.decode_attention(
            problem.query[i : i + 1],
            key_cache,
            value_cache,
            BlockTables(problem.tables.tables[i : i + 1], problem.tables.block_size),
            problem.lengths[i : i + 1],
            scale=64**-0.5,
        )
        assert torch.equal(alone[0], together[i])


def test_threads_without_openmp_do_the_same_work(monkeypatch):
    problem = make(Shape(lengths=(2000, 3, 700), new_tokens=(1, 1, 1)))
    expected = decode("cpu", problem, "paged")
    monkeypatch.setattr(openmp, "_gomp_parallel", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(decode("cpu", problem, "paged"), expected)


def test_strided_queries_and_given_outputs():
    problem = make(Shape(lengths=(20, 40), new_tokens=(1, 1), dtype=torch.bfloat16))
    key_cache, value_cache, where = problem.layout("paged")
    wide = torch.zeros(2, 7, 64, dtype=torch.bfloat16)
    wide[:, :6] = problem.query
    out = torch.empty_like(problem.query)
    arguments = (key_cache, value_cache, where, problem.lengths)
    result = cpu.decode_attention(wide[:, :6], *arguments, scale=64**-0.5, out=out)
    assert result is out
    assert torch.equal(out, decode("cpu", problem, "paged"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_addresses_outside_the_pool_are_refused(layout):
    problem = make(Shape(lengths=(40, 20), new_tokens=(1, 1)))
    key_cache, value_cache, _ = problem.layout(layout)
    for bad in (-1, len(key_cache)):
        wrong: BlockTables | BaseSlots = BaseSlots(torch.tensor([bad, 0]))
        if layout == "paged":
            table = problem.tables.tables.clone()
            table[0, 1] = bad
            wrong = BlockTables(table, problem.tables.block_size)
        with pytest.raises(IndexError, match="outside the pool"):
            cpu.decode_attention(problem.query, key_cache, value_cache, wrong, problem.lengths, scale=1.0)


def test_a_context_longer_than_its_table_is_refused():
    problem = make(Shape(lengths=(40, 20), new_tokens=(1, 1)))
    key_cache, value_cache, where = problem.layout("paged")
    lengths = problem.lengths + 40
    with pytest.raises(IndexError, match="outside the pool"):
        cpu.decode_attention(problem.query, key_cache, value_cache, where, lengths, scale=1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([40, 20])}, "lengths must be int32"),
        ({"lengths": torch.tensor([40], dtype=torch.int32)}, "one row per sequence"),
        ({"query": torch.zeros(2, 6, 64, dtype=torch.float64)}, "differ in dtype"),
        ({"query": torch.zeros(2, 5, 64)}, "multiple of num_kv_heads"),
        ({"query": torch.zeros(2, 6, 72)}, "head_dim"),
        ({"where": BlockTables(torch.zeros(2, 3), 16)}, "tables must be int32"),
        ({"where": BlockTables(torch.zeros(2, 3, dtype=torch.int32), 0)}, "block_size"),
        ({"where": BaseSlots(torch.zeros(2, dtype=torch.int32))}, "bases must be int64"),
        ({"key_cache": torch.zeros(96, 64, 2).transpose(1, 2)}, "contiguous"),
    ],
)
def test_wrong_tensors_are_refused(change, message):
    problem = make(Shape(lengths=(40, 20), new_tokens=(1, 1), block_size=16))
    key_cache, value_cache, where = problem.layout("paged")
    arguments = {
        "query": problem.query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "where": where,
        "lengths": problem.lengths,
    }
    with pytest.raises(ValueError, match=message):
        cpu.decode_attention(**{**arguments, **change}, scale=1.0)
