"""Where the efficiencies of the device profile ``a100_40gb_vllm2023`` come from: `python -m paper_figures.calibration`.

A decode step reads the weights once and every request's KV once. So Figure 1's step time, batch over throughput, is
a line over the batch: its intercept is the weights' traffic, its slope one request's KV, each over what share of the
datasheet's bandwidth was reached. No other published value is used, and nothing is fitted per figure.
"""

import numpy as np

from paper_figures import paper

WEIGHT_BYTES = 2 * 12_840_304_640  # OPT-13B: parameters that are multiplied, float16
BYTES_PER_S = 1.555e12  # A100 40 GB, datasheet
REQUEST_BYTES = 0.339e9  # one request's KV, from the figure's memory axis: 414 tokens of 819,200 bytes


def efficiencies() -> tuple[float, float]:
    """``matmul_efficiency`` and ``attention_efficiency``: shares of the bandwidth."""
    published = paper.load("fig1")
    batch = published["x"].to_numpy()
    slope, intercept = np.polyfit(batch, batch / published["value"].to_numpy(), 1)
    return WEIGHT_BYTES / BYTES_PER_S / intercept, REQUEST_BYTES / BYTES_PER_S / slope


if __name__ == "__main__":
    print("matmul_efficiency: {:.2f}\nattention_efficiency: {:.2f}".format(*efficiencies()))
