"""The reference against torch's own attention, sequence by sequence."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.kernels.cases import Problem, Shape, decode, make, prefill, relative_error

SHAPE = Shape(lengths=(1, 37, 64, 130), new_tokens=(1, 5, 64, 1), block_size=16)


def torch_attention(problem: Problem, window: int = 0) -> torch.Tensor:
    outputs = []
    for i, (length, num_queries) in enumerate(zip(problem.shape.lengths, problem.shape.new_tokens, strict=True)):
        slots = problem.bases.slots(i, length)
        key, value = (cache[slots].transpose(0, 1) for cache in problem.contiguous_kv)
        start = int(problem.query_starts[i])
        query = problem.query[start : start + num_queries].transpose(0, 1)
        mask = torch.ones(num_queries, length, dtype=torch.bool).tril(length - num_queries)
        if window:
            mask &= ~torch.ones_like(mask).tril(length - num_queries - window)
        output = scaled_dot_product_attention(
            query.double(), key.double(), value.double(), attn_mask=mask, enable_gqa=True
        )
        outputs.append(output.transpose(0, 1).float())
    return torch.cat(outputs)


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize("window", [0, 1, 20])
def test_prefill_is_causal_attention_over_the_cached_context(layout, window):
    problem = make(SHAPE)
    expected = torch_attention(problem, window)
    assert relative_error(prefill("reference", problem, layout, window=window), expected) < 1e-7


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_decode_is_attention_of_the_last_token(layout):
    problem = make(Shape(lengths=(1, 37, 64, 130), new_tokens=(1, 1, 1, 1), block_size=7))
    assert relative_error(decode("reference", problem, layout), torch_attention(problem)) < 1e-7


def test_softcap_bounds_scores():
    problem = make(Shape(lengths=(9,), new_tokens=(1,), num_kv_heads=1, group=1, head_dim=8))
    slots = problem.bases.slots(0, 9)
    key, value = (cache[slots, 0].double() for cache in problem.contiguous_kv)
    scores = 2.0 * torch.tanh(key @ problem.query[0, 0].double() / 2.0)
    expected = (scores.softmax(0) @ value).float()[None, None]
    assert relative_error(decode("reference", problem, "paged", scale=1.0, softcap=2.0), expected) < 1e-7
