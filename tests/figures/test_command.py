"""The command: every figure from a full set of tables, none without."""

from pathlib import Path

import pandas as pd
import pytest

from paper_figures.__main__ import FIGURES, main
from tests.figures import synthetic


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    synthetic.write_all(folder / "reference")
    assert main(["--results", str(folder / "reference"), "--out", str(folder / "figures")]) == 0
    return folder


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_and_compared(drawn: Path, name: str) -> None:
    assert (drawn / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (drawn / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    table = pd.read_csv(drawn / "reference" / "fidelity.csv")
    rows = table[(table["figure"] == name) & table["published"].notna()]
    assert len(rows) > 0
    assert rows["ours"].notna().all(), "every published value has one of ours beside it"
    reasons = rows["note"].dropna().unique()
    assert not any(word in reason for reason in reasons for word in ("not measured", "not published", "not cross"))
    assert rows["difference"].notna().all()


def test_figures_are_compared_in_the_paper_s_order(drawn: Path) -> None:
    table = pd.read_csv(drawn / "reference" / "fidelity.csv")
    assert table["figure"].drop_duplicates().tolist() == list(FIGURES)


@pytest.mark.parametrize("name", ["fig2", "fig17"])
def test_drawn_again_the_bytes_are_equal(drawn: Path, tmp_path: Path, name: str) -> None:
    before = (drawn / "reference" / "fidelity.csv").read_bytes()
    assert main(["--only", name, "--results", str(drawn / "reference"), "--out", str(tmp_path)]) == 0
    for suffix in ("png", "pdf"):
        again = (tmp_path / f"{name}.{suffix}").read_bytes()
        assert again == (drawn / "figures" / f"{name}.{suffix}").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2
    assert (drawn / "reference" / "fidelity.csv").read_bytes() == before


def test_figures_without_a_table_are_named_and_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic.write(tmp_path, "cpu/attention_kernel", _kernel_rows())
    assert main(["--results", str(tmp_path), "--out", str(tmp_path / "figures")]) == 0
    lines = capsys.readouterr().out.splitlines()
    skipped = {line.split(":")[0] for line in lines if "skipped, no " in line}
    assert skipped == set(FIGURES) - {"fig18a"}
    assert any("paper_parallel_sampling.parquet and no " in line for line in lines if line.startswith("fig15"))
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"fig18a.png", "fig18a.pdf"}
    assert set(pd.read_csv(tmp_path / "fidelity.csv")["figure"]) == {"fig18a"}


def test_a_figure_needs_all_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic.write(tmp_path, "roofline/paper_beam_search", synthetic.sharing("beam_width", saving=0.1))
    assert main(["--only", "fig15", "--results", str(tmp_path), "--out", str(tmp_path / "figures")]) == 2
    printed = capsys.readouterr()
    assert "paper_parallel_sampling.parquet" in printed.out
    assert "nothing to draw" in printed.err


def test_nothing_to_draw_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--results", str(tmp_path / "nowhere"), "--out", str(tmp_path / "figures")]) == 2
    assert "nothing to draw" in capsys.readouterr().err
    assert not (tmp_path / "figures").exists()


def test_a_damaged_table_stops_the_command_and_leaves_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = _kernel_rows()
    del rows[0]["paged_us"]
    synthetic.write(tmp_path, "cpu/attention_kernel", rows)
    (tmp_path / "fidelity.csv").write_text("as it was\n")
    assert main(["--results", str(tmp_path), "--out", str(tmp_path / "figures")]) == 2
    error = capsys.readouterr().err
    assert "fig18a" in error
    assert "attention_kernel.parquet" in error
    assert "'paged_us'" in error
    assert (tmp_path / "fidelity.csv").read_text() == "as it was\n"


def test_one_seed_is_drawn_without_intervals(tmp_path: Path) -> None:
    rows = [row for row in synthetic.memory_waste() if row["config.seed"] == 0]
    synthetic.write(tmp_path, "roofline/paper_memory_waste", rows)
    assert main(["--results", str(tmp_path), "--out", str(tmp_path / "figures")]) == 0
    assert pd.read_csv(tmp_path / "fidelity.csv")["ci95"].isna().all()


def test_unknown_figures_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--only", "fig3"])
    assert stop.value.code == 2
    assert "fig18b" in capsys.readouterr().err


def _kernel_rows() -> list[dict[str, object]]:
    setting = {"dtype": "float32", "threads": 1, "batch": 8, "block_size": 16}
    return [setting | {"context": context, "paged_us": 11.0, "contiguous_us": 10.0} for context in (64, 128)]
