"""A stack of decoder layers on the CPU, as one program of operations on buffers that all layers share.

Against nine calls a layer from Python, paired, one thread, CPU time of a decode step of SmolLM2-135M in bfloat16 at
context 260 on a machine with other work: 0.60 at batch 1, 0.59 at 4, 0.65 at 8, 0.73 at 16, 0.79 at 32. Least times in
ms by operation; the limits are the bytes at 9.5 GB/s and the operations at 115 GFLOP/s:

    batch                    1     4     8    16    32   prompt of 160
    products              24.0  24.3  27.0  38.9  64.1   293
      their limit         22.4  22.4  22.4  29.5  59.1   296
    attention              1.3   3.3   6.4  11.9  24.1    28
      its limit            0.6   2.5   5.0  10.1  20.2
    norms, rotation, KV    1.8   2.0   2.3   2.6   3.6    13
    output layer           5.8   6.4         9.3  16

(each with about 0.4 ms per kind of operation for timing it apart.)

A layer is eight operations: norm, product, rotation with the storing of KV, attention, product, norm, gated product,
product. Weights are bfloat16 or float32 and so is the KV; all else is float32, the residual stream included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import cpu, cpu_attention, cpu_fused, cpu_linear, cpu_program, cpu_work
from kernels.addressing import BaseSlots, BlockTables
from kernels.cpu_linear import ADD, STORE, PackedWeight

# Operations of a layer, in order. Decoding and prefilling rows are attended to by one operation each.
_INPUT_NORM, _QKV, _ROTATE, _DECODE, _PREFILL, _OUTPUT, _MLP_NORM, _GATE_UP, _DOWN = range(9)
_PRODUCTS = (_QKV, _OUTPUT, _GATE_UP, _DOWN)


@dataclass
class Layer:
    """One layer's weights. index: in the pool. window: tokens, 0: all. Norms are float32, ``gate_up`` is gated."""

    index: int
    input_norm: Tensor
    input_epsilon: float
    qkv: PackedWeight
    scale: float
    window: int
    output: PackedWeight
    mlp_norm: Tensor
    mlp_epsilon: float
    gate_up: PackedWeight
    down: PackedWeight


Attend = Callable[[Layer, Tensor, Tensor, Tensor], Tensor]  # of query, key, value


@dataclass
class Attention:
    """The rows of a step that are decoded, or those that are prefilled, as ``Kernels.prefill_attention`` takes them."""

    first: int  # token of the step
    where: BlockTables | BaseSlots
    query_starts: NDArray[np.int32]
    lengths: Tensor


class Decoder:
    """``layers`` over heads of one shape, whose KV is of ``dtype``: float32 or bfloat16."""

    def __init__(
        self, layers: Sequence[Layer], num_query_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self._layers = layers
        self._heads = (num_query_heads, num_kv_heads, head_dim)
        self._dtype = dtype
        self._windows = np.array([layer.window for layer in layers])
        self._operations = np.zeros((len(layers), 9), cpu_program.OPERATION)
        self._norms = np.zeros((len(layers), 2), cpu_fused.NORM)
        self._products = np.zeros((len(layers), len(_PRODUCTS)), cpu_linear.ARGUMENTS)
        self._rotations = np.zeros(len(layers), cpu_fused.ROTATION)
        self._attention = np.zeros((len(layers), 2), cpu_work.ARGUMENTS)
        self._describe_norms()
        self._describe_products()
        self._describe_heads()
        self._buffers = _Buffers(0, layers[0], *self._heads)

    def run(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The layers' output with attention by ``attend``, which is given tensors of the KV's dtype.

        hidden: ``[num_tokens, size]``. cos, sin: ``[num_tokens, head_dim]``. The result: float32, like ``hidden``.
        """
        num_tokens = self._load(hidden, cos, sin)
        num_query_heads, num_kv_heads, head_dim = self._heads
        key, value = torch.empty(2, num_tokens, num_kv_heads, head_dim, dtype=self._dtype)
        slots = torch.arange(num_tokens)
        self._rotations["key"], self._rotations["value"] = key.data_ptr(), value.data_ptr()
        self._rotations["slots"] = slots.data_ptr()
        query = self._buffers.query[:num_tokens].view(num_tokens, num_query_heads, head_dim)
        attended = self._buffers.attended[:num_tokens].view_as(query)
        for layer, operations in zip(self._layers, self._operations, strict=True):
            _run(operations[:_DECODE])
            attended.copy_(attend(layer, query.to(self._dtype), key, value))
            _run(operations[_OUTPUT:])
        return self._buffers.hidden[:num_tokens]

    def run_pooled(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, slots: Tensor, parts: Sequence[Attention]
    ) -> Tensor:
        """The layers' output with attention over a pool, in which the step's KV is stored.

        hidden, cos, sin: as for :meth:`run`. kv: the pool, which has these layers. slots: int64 ``[num_tokens]``,
        distinct. parts: the decoding rows, then the prefilling ones. Raises IndexError on slots outside the pool.
        """
        num_tokens = self._load(hidden, cos, sin)
        num_slots = kv.shape[2]
        if num_tokens and not (int(slots.min()) >= 0 and int(slots.max()) < num_slots):
            raise IndexError("a new token's slot is outside the pool")
        keys = kv.data_ptr() + kv.stride(0) * kv.itemsize * np.array([layer.index for layer in self._layers])
        for arguments in (self._rotations, *self._attention.T):
            arguments["key"], arguments["value"] = keys, keys + kv.stride(1) * kv.itemsize
        self._rotations["slots"] = slots.data_ptr()
        self._attention["num_slots"], self._attention["invalid"] = num_slots, 0
        memory = [self._describe_attention(column, part, kv) for column, part in enumerate(parts)]
        _run(self._operations.reshape(-1))
        del memory
        if self._attention["invalid"].any():
            raise IndexError("a block table or base slot names slots outside the pool")
        return self._buffers.hidden[:num_tokens]

    def _load(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> int:
        num_tokens, b = len(hidden), self._buffers
        if num_tokens > len(b.hidden):
            b = self._buffers = _Buffers(num_tokens, self._layers[0], *self._heads)
            self._bind(b)
        b.hidden[:num_tokens], b.cos[:num_tokens], b.sin[:num_tokens] = hidden, cos, sin
        products = self._products
        products["num_rows"] = num_tokens
        products["num_blocks"] = cpu_linear.num_blocks(num_tokens, products["depth"])
        self._operations["num_items"][:, _PRODUCTS] = products["num_panels"] * products["num_blocks"]
        self._operations["num_items"][:, [_INPUT_NORM, _ROTATE, _MLP_NORM]] = num_tokens
        return num_tokens

    def _describe_attention(self, column: int, part: Attention, kv: Tensor) -> Any:
        """Write one part's attention into every layer; memory that must outlive its use."""
        num_query_heads, _, head_dim = self._heads
        operations, attention = self._operations[:, _DECODE + column], self._attention[:, column]
        operations["num_items"] = 0
        if not part.query_starts[-1]:
            return None
        cpu.check(kv[0, 0], kv[0, 1], part.where, part.query_starts, part.lengths)
        skipped = part.first * num_query_heads * head_dim * 4
        attention["query"] = self._buffers.query.data_ptr() + skipped
        attention["output"] = self._buffers.attended.data_ptr() + skipped
        memory = []
        for window in np.unique(self._windows):
            template = attention[self._windows == window]
            num_pieces, kept = cpu_work.describe(
                template, part.where, part.query_starts, part.lengths, int(window), num_query_heads, head_dim
            )
            attention[self._windows == window] = template
            operations["num_items"][self._windows == window] = num_pieces
            memory.append(kept)
        return memory

    def _describe_norms(self) -> None:
        for layer, norms in zip(self._layers, self._norms, strict=True):
            norms["weight"] = layer.input_norm.data_ptr(), layer.mlp_norm.data_ptr()
            norms["epsilon"] = layer.input_epsilon, layer.mlp_epsilon
            norms["size"] = layer.qkv.in_features
        for column, index in enumerate((_INPUT_NORM, _MLP_NORM)):
            self._link(index, cpu_fused.rms_norm().address, self._norms[:, column])

    def _describe_products(self) -> None:
        for layer, products in zip(self._layers, self._products, strict=True):
            for column, (weight, finish) in enumerate(_products(layer)):
                products[column] = np.frombuffer(bytes(weight.arguments(finish)), cpu_linear.ARGUMENTS)[0]
        flat = self._products.reshape(-1)
        flat["following"] = np.roll(flat["weight"], -1)
        flat["following_bytes"] = np.roll(flat["following_bytes"], -1)
        for column, index in enumerate(_PRODUCTS):
            self._link(index, self._layers[0].qkv.function, self._products[:, column])

    def _describe_heads(self) -> None:
        num_query_heads, num_kv_heads, head_dim = self._heads
        self._rotations["num_query_heads"], self._rotations["head_dim"] = num_query_heads, head_dim
        self._rotations["kind"] = cpu.KINDS[self._dtype]
        self._rotations["num_kv_heads"] = self._attention["num_kv_heads"] = num_kv_heads
        self._link(_ROTATE, cpu_fused.rotate_and_store().address, self._rotations)
        scales = np.array([layer.scale for layer in self._layers])
        self._attention["scale"] = scales[:, None] * cpu_work.LOG2_E
        kernel = cpu_attention.kernel(head_dim, num_query_heads // num_kv_heads, cpu.KINDS[self._dtype], 0)
        for column, index in enumerate((_DECODE, _PREFILL)):
            self._link(index, kernel.address, self._attention[:, column])

    def _link(self, index: int, function: int, arguments: NDArray) -> None:
        """Make ``function`` of a layer's arguments its operation ``index``."""
        self._operations["function"][:, index] = function
        addresses = arguments.ctypes.data + arguments.strides[0] * np.arange(len(arguments))
        self._operations["arguments"][:, index] = addresses

    def _bind(self, b: "_Buffers") -> None:
        """Make the operations work on other buffers."""
        hidden, normed, attended = (tensor.data_ptr() for tensor in (b.hidden, b.normed, b.attended))
        qkv, gated = b.qkv.data_ptr(), b.gated.data_ptr()
        self._norms["x"], self._norms["output"] = hidden, normed
        self._products["x"] = normed, attended, normed, gated
        self._products["output"] = qkv, hidden, gated, hidden
        self._rotations["qkv"], self._rotations["query"] = qkv, b.query.data_ptr()
        self._rotations["cos"], self._rotations["sin"] = b.cos.data_ptr(), b.sin.data_ptr()


class _Buffers:
    """What the operations of a step read and write, for up to ``num_tokens`` tokens: float32."""

    def __init__(self, num_tokens: int, layer: Layer, num_query_heads: int, num_kv_heads: int, head_dim: int) -> None:
        def new(num_features: int) -> Tensor:
            return torch.empty(num_tokens, num_features)

        self.hidden = new(layer.qkv.in_features)  # the residual stream
        self.normed = new(layer.qkv.in_features)
        self.cos, self.sin = new(head_dim), new(head_dim)
        self.qkv = new(layer.qkv.out_features)
        self.query, self.attended = new(num_query_heads * head_dim), new(num_query_heads * head_dim)
        self.gated = new(layer.down.in_features)


def _products(layer: Layer) -> tuple[tuple[PackedWeight, int], ...]:
    """The weights of ``_PRODUCTS``, and what becomes of their results."""
    return (layer.qkv, STORE), (layer.output, ADD), (layer.gate_up, STORE), (layer.down, ADD)


def _run(operations: NDArray) -> None:
    cpu_program.run(operations, torch.get_num_threads())
