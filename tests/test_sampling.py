"""Random numbers that depend on nothing but their keys, and tokens that follow the model's probabilities."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.executors.choice import best_candidates, choose, first_largest
from kvbench.request import Request, Sampling
from kvbench.sampling import uniform
from tests import tiny_models
from tests.engine.harness import Setting, serve

# 99.9 % quantile of chi-square, by degrees of freedom (Abramowitz and Stegun, table 26.8)
CHI2_999 = {15: 37.697, 30: 59.703}


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_uniform_is_uniform_along_each_key() -> None:
    ramp = np.arange(20_000)
    for keys in ((ramp, 1, 2, 3), (1, ramp, 2, 3), (1, 2, ramp, 3), (1, 2, 3, ramp)):
        counts, _ = np.histogram(uniform(*keys), bins=16, range=(0, 1))
        assert chi_square(counts, np.full(16, len(ramp) / 16)) < CHI2_999[15]


def test_uniform_distinguishes_its_keys() -> None:
    permuted = [uniform(*keys) for keys in ((1, 2, 3, 4), (2, 1, 3, 4), (1, 2, 4, 3), (4, 3, 2, 1))]
    assert len({float(value) for value in permuted}) == 4
    neighbours = uniform(7, 0, 0, np.arange(10_000)), uniform(8, 0, 0, np.arange(10_000))
    assert abs(np.corrcoef(*neighbours)[0, 1]) < 0.05


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.1, 3.0), st.floats(0.05, 1.0))
def test_a_sampled_token_lies_in_the_nucleus(seed: int, temperature: float, top_p: float) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(8, 31)).astype(np.float32)) * 3
    tokens = choose(logits, np.full(8, temperature, np.float32), np.full(8, top_p, np.float32), rng.random(8)).tolist()
    probs = torch.softmax(logits.double() / temperature, -1)
    for row, token in enumerate(tokens):
        more_likely = probs[row][probs[row] > probs[row, token]].sum()
        assert more_likely < top_p + 1e-6


@pytest.mark.parametrize("vocab", [512, 1536, 1000])
def test_the_first_of_the_largest_is_chosen(vocab: int) -> None:
    logits = torch.randint(0, 4, (50, vocab), generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[: len(logits) // 2] *= 0
    logits[range(50), torch.randint(vocab, (50,), generator=torch.Generator().manual_seed(1))] = (
        torch.tensor([5.0, torch.inf]).repeat(25).bfloat16()
    )
    logits[::3, ::7] = 5
    expected = [min(i for i, x in enumerate(row) if x == max(row)) for row in logits.tolist()]
    assert first_largest(logits).tolist() == expected
    logits[7, 3] = logits[7, -1] = torch.nan
    assert first_largest(logits)[7] == 3


def test_rows_choose_independently() -> None:
    """Greedy and sampled rows, with and without a nucleus, choose in a batch what they choose alone."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(6, 50)).astype(np.float32))
    temperature = np.array([0.0, 1.0, 0.5, 0.0, 2.0, 1.0], np.float32)
    top_p = np.array([1.0, 1.0, 0.7, 0.5, 0.9, 0.3], np.float32)
    uniforms = rng.random(6)
    together = choose(logits, temperature, top_p, uniforms)
    alone = [choose(logits[[i]], temperature[[i]], top_p[[i]], uniforms[[i]]).item() for i in range(6)]
    assert together.tolist() == alone
    assert together[0] == logits[0].argmax()
    assert together[3] == logits[3].argmax()


def test_the_extremes_of_the_uniform_choose_possible_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).repeat(2, 1)
    edge, ones = np.array([0.0, 1 - 2.0**-53]), np.ones(2, np.float32)
    assert choose(logits, ones, ones, edge).tolist() == [1, 2]


def test_best_candidates_are_log_probabilities() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    values, tokens = best_candidates(logits, 5)
    torch.testing.assert_close(values, torch.log_softmax(logits, -1).gather(1, tokens))
    assert (values.diff(dim=1) <= 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_frequencies_match_the_model(temperature: float) -> None:
    """First tokens of 4000 samples against the softmax of transformers' logits."""
    model = tiny_models.tiny_model("llama")
    prompt = np.array([5, 9, 20, 33], np.int32)
    requests = [
        Request(i, prompt, 0.0, 1, Sampling("sample", n=50, temperature=temperature, seed=i, ignore_eos=True))
        for i in range(80)
    ]
    served = serve(model, requests, Setting("paged", max_rows=200), audit=False)
    tokens = np.concatenate([np.concatenate(list(group.outputs.values())) for group in served.groups])
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = model(torch.from_numpy(prompt.astype(np.int64))[None], use_cache=False).logits[0, -1]
    probs = torch.softmax(logits.double() / temperature, -1).numpy()
    order = np.argsort(-probs)
    # the 30 most likely tokens one by one, all others together
    expected = np.append(probs[order[:30]], probs[order[30:]].sum()) * len(tokens)
    counts = np.bincount(tokens, minlength=len(probs))[order]
    observed = np.append(counts[:30], counts[30:].sum())
    assert len(tokens) == 4000
    assert chi_square(observed, expected) < CHI2_999[30]
