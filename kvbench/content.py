"""Names for the content of a prompt's blocks: what an allocator with PREFIX_CACHE finds them by.

Keys are 64-bit hashes. Among n different blocks of a run the chance that any two collide is n^2 / 2^65: one in
37 million for a million blocks.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from kvbench.allocator import IntArray
from kvbench.request import Request

TOKENS_PER_HASH_ID = 512  # of Mooncake's traces


def block_keys(request: Request, block_size: int) -> IntArray:
    """A key for each leading full block of the prompt whose content is known, int64.

    Equal keys: equal tokens from the prompt's first to the block's last.
    """
    num_tokens = len(request.prompt)
    if request.is_text:
        return _of_tokens(request.prompt[: num_tokens // block_size * block_size], block_size)
    if request.hash_ids:
        ids = np.array(request.hash_ids, dtype=np.int64)
        ends = np.arange(block_size, min(num_tokens, ids.size * TOKENS_PER_HASH_ID) + 1, block_size)
        return _mixed(ids[(ends - 1) // TOKENS_PER_HASH_ID], ends)
    ends = np.arange(block_size, request.num_prefix_tokens + 1, block_size)
    return _mixed(np.full(ends.size, request.prefix_id or 0), ends)


def _of_tokens(tokens: NDArray[np.int32], block_size: int) -> IntArray:
    """tokens: of whole blocks."""
    data, step = np.ascontiguousarray(tokens, dtype="<i4").tobytes(), 4 * block_size
    state = hashlib.blake2b(digest_size=8)
    digests = []
    for start in range(0, len(data), step):
        state.update(data[start : start + step])
        digests.append(state.copy().digest())
    return np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)


def _mixed(ids: IntArray, ends: IntArray) -> IntArray:
    """What 64-bit ids say of the tokens up to ``ends``: SplitMix64's steps, over the id and then over both."""
    return _scrambled(_scrambled(ids.astype(np.uint64)) + ends.astype(np.uint64)).astype(np.int64)


def _scrambled(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
