"""How much a reserving allocator is asked to hold: the policies of Orca as the PagedAttention paper names them."""

from kvbench.config import Reservation
from kvbench.request import Request


def kv_tokens(request: Request) -> int:
    """Most tokens whose KV a sequence of ``request`` ever needs: its last token is never read back."""
    return len(request.prompt) + request.max_new_tokens - 1


def reserved_tokens(policy: Reservation, request: Request, limit: int) -> int:
    """Tokens to reserve per sequence. ``max``: the model's ``limit``; ``pow2``: the true output rounded up
    to a power of two; ``oracle``: exactly what will be written. Never above ``limit``.
    """
    if policy is Reservation.max:
        return limit
    if policy is Reservation.pow2:
        output = 1 << (request.max_new_tokens - 1).bit_length()
        return min(len(request.prompt) + output - 1, limit)
    return kv_tokens(request)
