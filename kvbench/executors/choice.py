"""Choosing next tokens from logits, on the logits' device and without waiting for it."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.memory import upload

_ARGMAX_BLOCK = 512


def choose(
    logits: Tensor, temperature: NDArray[np.float32], top_p: NDArray[np.float32], uniforms: NDArray[np.float64]
) -> Tensor:
    """Next token of each row: int64 ``[n]``, on the logits' device, which the host does not wait for.

    logits: ``[n, vocab]``, any float dtype. The others, ``[n]``, are on the host, as they decide what runs.
    temperature: 0 is greedy. top_p: in (0, 1]: the smallest set of most likely tokens that reaches it stays.
    uniforms: in [0, 1), see :func:`kvbench.sampling.uniform`.
    """
    tokens = first_largest(logits)
    drawn = np.flatnonzero(temperature > 0)
    if len(drawn):
        has_nucleus = bool((top_p[drawn] < 1).any())
        parameters = np.stack([drawn, temperature[drawn], top_p[drawn], uniforms[drawn]])  # float64 holds them all
        rows, divisor, limit, target = upload(torch.from_numpy(parameters), logits.device)
        rows = rows.long()
        scaled = logits[rows].float() / divisor.float()[:, None]
        probs = torch.softmax(scaled, -1, dtype=torch.float64)
        weights = _nucleus(probs, limit) if has_nucleus else probs
        tokens.index_copy_(0, rows, _invert_cdf(weights, target))
    return tokens


def first_largest(logits: Tensor) -> Tensor:
    """``logits.argmax(-1)``, the first of equals. logits: ``[n, vocab]``; int64 ``[n]``.

    On the CPU torch's argmax is scalar and its amax is not: here the block that holds the maximum is found first,
    in a quarter of the time.
    """
    num_rows, vocab = logits.shape
    if not logits.is_cpu or vocab % _ARGMAX_BLOCK:
        return logits.argmax(-1)
    blocks = logits.reshape(num_rows, -1, _ARGMAX_BLOCK)
    block = blocks.amax(-1).argmax(-1)
    return block * _ARGMAX_BLOCK + blocks[torch.arange(num_rows), block].argmax(-1)


def _nucleus(probs: Tensor, top_p: Tensor) -> Tensor:
    """Zero the tokens outside each row's nucleus (unnormalised). probs: float64 ``[n, vocab]``."""
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
