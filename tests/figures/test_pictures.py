"""What a reader of a printed page needs: units, intervals, and ours told from the published without colour."""

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from paper_figures import columns, style
from paper_figures.__main__ import FIGURES
from tests.figures import synthetic

CURVES = ["fig1", "fig12", "fig14", "fig16", "fig17", "fig18a", "fig18b", "fig19a", "fig19b"]
UNITS = ("/s", "s/token", "tokens", "requests", "ms", "%", "per request", "contiguous")


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Figure]:
    folder = tmp_path_factory.mktemp("results")
    synthetic.write_all(folder)
    with style.context():
        return {name: figure.draw(folder).figure for name, figure in FIGURES.items()}


def labels(axes: Axes) -> list[str]:
    return [label for label in (axes.get_xlabel(), axes.get_ylabel()) if label]


@pytest.mark.parametrize("name", FIGURES)
def test_axes_have_units(figures: dict[str, Figure], name: str) -> None:
    found = [label for axes in figures[name].axes for label in labels(axes)]
    assert found
    assert all(any(unit in label for unit in UNITS) for label in found)
    assert labels(figures[name].axes[0])


@pytest.mark.parametrize("name", CURVES)
def test_published_curves_are_hollow_and_dashed(figures: dict[str, Figure], name: str) -> None:
    for axes in figures[name].axes:
        marked = [line for line in axes.lines if line.get_marker() not in ("None", "")]
        hollow = [line for line in marked if line.get_markerfacecolor() == "none"]
        assert len(hollow) == len(marked) / 2 > 0
        assert all(line.get_linestyle() == "--" for line in hollow)
        assert all(line.get_linestyle() == "-" for line in marked if line not in hollow)


@pytest.mark.parametrize("name", ["fig2", "fig13", "fig15"])
def test_published_bars_are_hatched(figures: dict[str, Figure], name: str) -> None:
    for axes in figures[name].axes:
        hatched = [bar for bar in axes.patches if bar.get_hatch()]
        assert len(hatched) == len(axes.patches) / 2 > 0


@pytest.mark.parametrize("name", [name for name in CURVES if name not in ("fig18a", "fig19a")])
def test_three_seeds_have_bands(figures: dict[str, Figure], name: str) -> None:
    for axes in figures[name].axes:
        bands = [band for band in axes.collections if isinstance(band, PolyCollection)]
        assert len(bands) == sum(line.get_markerfacecolor() == "none" for line in axes.lines)
        assert all(len(band.get_paths()) == 1 for band in bands)


def test_systems_differ_in_marker_and_colour() -> None:
    looks = [style.LOOKS[system] for system in columns.SYSTEMS.values()]
    assert len({look.marker for look in looks}) == len({look.colour for look in looks}) == len(looks)
