"""The device profile of 2023 holds what Figure 1 implies, and nothing else is fitted."""

from pathlib import Path

import yaml

from paper_figures.calibration import efficiencies

PROFILE = Path(__file__).parents[2] / "conf/device/a100_40gb_vllm2023.yaml"


def test_efficiencies_are_those_of_figure_1() -> None:
    profile = yaml.safe_load(PROFILE.read_text())["profile"]
    assert [round(value, 2) for value in efficiencies()] == [
        profile["matmul_efficiency"],
        profile["attention_efficiency"],
    ]
