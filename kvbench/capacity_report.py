"""From the rate that one replica sustains to GPUs and their cost: a table, a CSV and a picture."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table

from kvbench import capacity_plot, report
from kvbench.console import console
from kvbench.results import Run

HOURS_PER_MONTH = 365 * 24 / 12
# Student's t for a two-sided 95 % interval, by degrees of freedom from 1; the normal distribution's beyond.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
NORMAL = 1.960


def write(runs: list[Run], directory: Path) -> None:
    """Print the table of complete ``runs`` and write ``capacity.{csv,png,pdf}`` to ``directory``."""
    if not runs:
        return
    names = report.labels(runs, but=("seed",))
    systems: dict[str, list[Run]] = {name: [] for name in names}
    for run, name in zip(runs, names, strict=True):
        systems[name].append(run)
    rows = [_row(name, seeds) for name, seeds in systems.items()]
    frame = pd.DataFrame(rows)
    frame.to_csv(directory / "capacity.csv", index=False)
    output = console(160)
    output.print(_table(frame))
    for row in frame.reindex(columns=["run", "unreachable"]).dropna().itertuples():
        output.print(f"{row.run}: unreachable: {row.unreachable}", soft_wrap=True, highlight=False)
    goal = runs[0].config()["capacity"]["attainment"]
    picture = capacity_plot.draw(frame, _tried(runs, names), goal, directory / "capacity")
    output.print(f"picture: {picture}", soft_wrap=True)


def interval(values: list[float]) -> float:
    """Half the width of the 95 % interval of the mean; nan for one value."""
    if len(values) < 2:
        return math.nan
    quantile = STUDENT[len(values) - 2] if len(values) - 2 < len(STUDENT) else NORMAL
    return quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def gpus_needed(traffic: float, rate: float, num_devices: int) -> float:
    """GPUs in whole replicas; infinite where a replica sustains nothing."""
    return math.ceil(traffic / rate - 1e-9) * num_devices if rate > 0 else math.inf


def _row(name: str, runs: list[Run]) -> dict[str, Any]:
    """One system over its seeds. Without numbers where a seed's objective cannot be met at any rate."""
    config = runs[0].config()
    traffic, devices = config["workload"]["arrival"]["rate"], config["device"]["profile"]["num_devices"]
    first = {"run": name, "num_seeds": len(runs), "traffic": traffic, "gpus_per_replica": devices}
    rates = [rate for run in runs if (rate := run.metric("sustained_requests_per_s")) is not None]
    if len(rates) < len(runs):
        worst = min(run.record["tried"][0]["attainment"] for run in runs)
        problem = (
            f"{100 * worst:.1f} % of the requests meet the objective at {config['capacity']['lowest_rate']} requests/s"
        )
        return first | {"unreachable": problem}
    rate, half = float(np.mean(rates)), interval(rates)
    needed = {
        "gpus": gpus_needed(traffic, rate, devices),
        "gpus_low": gpus_needed(traffic, rate + half, devices) if len(rates) > 1 else math.nan,
        "gpus_high": gpus_needed(traffic, rate - half, devices) if len(rates) > 1 else math.nan,
    }
    price = config["capacity"]["gpu_price_per_hour"] or math.nan
    costs = {name.replace("gpus", "cost_per_month"): HOURS_PER_MONTH * price * count for name, count in needed.items()}
    goodput = float(np.mean([run.metric("goodput_requests_per_s") for run in runs]))
    rated = {"rate": rate, "rate_interval": half, "goodput": goodput, "replicas": needed["gpus"] // devices}
    return first | rated | needed | costs


def _tried(runs: list[Run], names: list[str]) -> pd.DataFrame:
    """Every rate that was tried: columns ``run``, ``search`` (one per run and seed), ``rate``, ``attainment``."""
    searches = enumerate(zip(runs, names, strict=True))
    rows = [{"run": name, "search": i} | entry for i, (run, name) in searches for entry in run.record["tried"]]
    return pd.DataFrame(rows)


def _table(frame: pd.DataFrame) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("run", no_wrap=True)
    for title in (
        "traffic\nrequests/s",
        "one replica\nrequests/s",
        "goodput\nrequests/s",
        "replicas",
        "GPUs",
        "cost a month",
    ):
        table.add_column(title, justify="right")
    for row in frame.to_dict("records"):
        if isinstance(row.get("unreachable"), str):
            table.add_row(row["run"], f"{row['traffic']:g}", "unreachable")
            continue
        rate = f"{row['rate']:.3g}" + ("" if math.isnan(row["rate_interval"]) else f" ± {row['rate_interval']:.2g}")
        ranges = (_range(row, name) for name in ("gpus", "cost_per_month"))
        cells = (f"{row['traffic']:g}", rate, f"{row['goodput']:.3g}", f"{row['replicas']:.0f}", *ranges)
        table.add_row(row["run"], *cells)
    return table


def _range(row: dict[str, Any], name: str) -> str:
    value, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
    if math.isnan(value):
        return "-"
    span = f" ({low:,.0f} or more)" if high == math.inf else f" ({low:,.0f} to {high:,.0f})"
    return f"{value:,.0f}" + ("" if math.isnan(low) else span)
