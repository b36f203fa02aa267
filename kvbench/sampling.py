"""Choosing next tokens from logits.

A sampled token depends only on the logits and on ``uniform(seed, request, sequence, position)``: never
on the batch it was computed in, on the allocator or on a preemption.
"""

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor


def uniform(seed: ArrayLike, request: ArrayLike, sequence: ArrayLike, position: ArrayLike) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), a pure function of the four integers (arrays broadcast).

    Counter-based: one round of the SplitMix64 finaliser (Steele et al., OOPSLA 2014) per integer.
    """
    state = np.uint64(0)
    with np.errstate(over="ignore"):
        for part in (seed, request, sequence, position):
            state = _mix(state + np.asarray(part, np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def choose(logits: Tensor, temperature: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    """Next token of each row: int64 ``[n]``.

    logits: ``[n, vocab]``, any float dtype. temperature: float32 ``[n]``, 0 is greedy.
    top_p: float32 ``[n]`` in (0, 1]: the smallest set of most likely tokens that reaches it stays.
    uniforms: float64 ``[n]`` in [0, 1), see :func:`uniform`.
    """
    tokens = logits.argmax(-1)
    sampled = torch.nonzero(temperature > 0).squeeze(-1)
    if len(sampled):
        scaled = logits[sampled].float() / temperature[sampled, None]
        probs = torch.softmax(scaled, -1, dtype=torch.float64)
        tokens[sampled] = _invert_cdf(_nucleus(probs, top_p[sampled]), uniforms[sampled])
    return tokens


def _nucleus(probs: Tensor, top_p: Tensor) -> Tensor:
    """Zero the tokens outside each row's nucleus (unnormalised). probs: float64 ``[n, vocab]``."""
    if bool((top_p >= 1).all()):
        return probs
    ordered, order = probs.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    outside = (before >= top_p[:, None]) & (top_p[:, None] < 1)
    return torch.zeros_like(probs).scatter(-1, order, ordered.masked_fill(outside, 0.0))


def _invert_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """First token whose cumulative weight exceeds ``uniform * total``: never one of weight zero."""
    cumulative = weights.cumsum(-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return tokens.clamp_(max=weights.shape[-1] - 1)


def best_candidates(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` most likely tokens of each row: log probabilities float32 ``[n, k]`` and ids ``[n, k]``."""
    values, tokens = logits.float().topk(k, dim=-1)
    return values - logits.float().logsumexp(-1, keepdim=True), tokens
