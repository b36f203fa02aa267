"""Linear layers of a decoder step on the CPU: ``python -m tests.benchmarks.linear``.

A step runs every linear layer of SmolLM2-135M once (540 MB of float32 weights, so they come from memory).
Candidates take turns, so that a change of the machine's mood hits all of them. Times are medians in ms.
``sgemm`` is the speed of a large float32 product, ``stream`` that of summing the weights: no step is faster
than either allows.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels import cpu_linear
from kvbench.executors.packing import OneDNNLinear

NUM_LAYERS = 30
LAYER_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
SHAPES = LAYER_SHAPES * NUM_LAYERS + [(49152, 576)]
OPERATIONS_PER_ROW = 2 * sum(rows * columns for rows, columns in SHAPES)


class Candidates:
    """One weight dtype: the model's weights in every layout, and a step with each."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.weights = [torch.randn(shape).mul_(0.02).to(dtype) for shape in SHAPES]
        self.onednn = [OneDNNLinear(weight, None) for weight in self.weights]
        self.panels = [cpu_linear.PackedWeight(weight) for weight in self.weights]
        self.inputs: dict[int, Tensor] = {}

    def at(self, num_rows: int) -> dict[str, Callable[[], object]]:
        dtype = self.weights[0].dtype
        self.inputs = {depth: torch.randn(num_rows, depth).to(dtype) for _, depth in LAYER_SHAPES}
        return {"torch": self._torch, "onednn": self._onednn, "panels": self._panels, "stream": self._stream}

    def _torch(self) -> None:
        for weight in self.weights:
            linear(self.inputs[weight.shape[1]], weight)

    def _onednn(self) -> None:
        for (_, depth), layer in zip(SHAPES, self.onednn, strict=True):
            layer(self.inputs[depth])

    def _panels(self) -> None:
        for (_, depth), packed in zip(SHAPES, self.panels, strict=True):
            cpu_linear.linear(self.inputs[depth], packed)

    def _stream(self) -> None:
        for weight in self.weights:
            weight.view(-1).view(torch.float32).sum()


def medians(candidates: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds by candidate; the first turn is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats + 1):
        for name, candidate in candidates.items():
            start = time.perf_counter()
            candidate()
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(samples[1:])) for name, samples in seconds.items()}


def sgemm_rate(repeats: int) -> float:
    """Operations per second of a large product."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / medians({"sgemm": lambda: a @ b}, repeats)["sgemm"]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 256])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--without", nargs="*", default=[], help="candidates to leave out (torch, onednn)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for dtype in arguments.dtypes:
        candidates = Candidates(getattr(torch, dtype))
        weight_bytes = sum(weight.nbytes for weight in candidates.weights)
        for num_rows in arguments.rows:
            chosen = {k: v for k, v in candidates.at(num_rows).items() if k not in arguments.without}
            seconds = medians(chosen, arguments.repeats)
            peak = sgemm_rate(arguments.repeats)
            operations = OPERATIONS_PER_ROW * num_rows
            limit = max(operations / peak, seconds["stream"])
            times = "  ".join(f"{name} {median * 1e3:.1f}" for name, median in seconds.items())
            print(
                f"{dtype:8} M {num_rows:<3} | {times}"
                f" | panels {operations / seconds['panels'] / 1e9:.0f} GFLOP/s"
                f" {weight_bytes / seconds['panels'] / 1e9:.1f} GB/s"
                f" | sgemm {peak / 1e9:.0f} GFLOP/s stream {weight_bytes / seconds['stream'] / 1e9:.1f} GB/s"
                f" | panels/limit {seconds['panels'] / limit:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
