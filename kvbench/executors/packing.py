"""Linear layers made ready for CPU decoding: weights packed once, projections of one input fused.

``torch.nn.Linear`` hands oneDNN a plain weight, which it reorders into its blocked layout in every call:
at decode batch sizes that costs more than the product. Here each weight is packed once, for oneDNN
(:class:`OneDNNLinear`) or for our own kernel (:class:`PanelLinear`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels import cpu_linear

PACK_BATCH = 16  # tokens per step that oneDNN's layout is chosen for; others work as well
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

MakeLinear = Callable[[Tensor, Tensor | None], nn.Module]  # from a weight and a bias


def pack_linears(model: nn.Module, make: MakeLinear) -> None:
    """Replace every linear layer of ``model`` in place. Inference only, float32 and bfloat16.

    Tied weights (an embedding used as the output layer) keep serving their other owner.
    """
    for parent in list(model.modules()):
        for names in FUSED:
            layers = [layer for name in names if type(layer := getattr(parent, name, None)) is nn.Linear]
            if len(layers) == len(names) and len({layer.bias is None for layer in layers}) == 1:
                _fuse(parent, names, layers, make)
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, make(child.weight, child.bias))


class PanelLinear(nn.Module):
    """``x @ weight.T + bias`` by :mod:`kernels.cpu_linear`. x: ``[..., in_features]``, float32 or bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = cpu_linear.PackedWeight(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        out = cpu_linear.linear(x.reshape(-1, x.shape[-1]), self.packed)
        return out.view(*x.shape[:-1], out.shape[-1])


class OneDNNLinear(nn.Module):
    """``x @ weight.T + bias`` by oneDNN. x: ``[..., in_features]``, in the weight's dtype.

    bfloat16 on a processor without bfloat16 instructions is computed in float32 by upconverting weights
    once: the products are the same numbers, the sums are more exact, and the weights take twice the memory.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_dtype = weight.dtype
        compute = torch.float32 if weight.dtype == torch.bfloat16 and not has_bfloat16() else weight.dtype
        self.compute_dtype = compute
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(compute), PACK_BATCH)
        self.bias = None if bias is None else bias.detach().to(compute)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.ops.mkldnn._linear_pointwise(x.to(self.compute_dtype), self.packed, self.bias, "none", [], "")
        return out.to(self.out_dtype)


@dataclass
class _Stash:
    """What a projection's sibling computed for it; no attribute of a module, where an assignment takes 2 us."""

    input: Tensor | None = None
    output: Tensor | None = None


class _First(nn.Module):
    """The first of several projections of one input: computes all, keeps the others for their turn."""

    def __init__(self, fused: nn.Module, sizes: list[int], stashes: list[_Stash]) -> None:
        super().__init__()
        self._fused, self._sizes, self._stashes = fused, sizes, stashes

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self._fused(x).split(self._sizes, dim=-1)
        for stash, part in zip(self._stashes, rest, strict=True):
            stash.input, stash.output = x, part
        return first


class _Other(nn.Module):
    """Hands out what :class:`_First` computed for the same input."""

    def __init__(self, stash: _Stash) -> None:
        super().__init__()
        self._stash = stash

    def forward(self, x: Tensor) -> Tensor:
        stash = self._stash
        output = stash.output
        if stash.input is not x or output is None:
            raise RuntimeError("a fused projection was given another input than its siblings")
        stash.input = stash.output = None
        return output


def _fuse(parent: nn.Module, names: tuple[str, ...], layers: list[nn.Linear], make: MakeLinear) -> None:
    weight = torch.cat([layer.weight.detach() for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    stashes = [_Stash() for _ in names[1:]]
    first = _First(make(weight, bias), [layer.out_features for layer in layers], stashes)
    for name, layer in zip(names, [first, *map(_Other, stashes)], strict=True):
        setattr(parent, name, layer)


def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 in hardware."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
