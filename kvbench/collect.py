"""Many runs as one table: ``python -m kvbench.collect RESULTS_FOLDER ... TABLE.parquet``.

A row per complete run: ``config.<key>``, ``metric.<name>``, ``env.<key>``, ``window`` and ``config_hash``, so that
every number still says where it comes from. This is how sweeps of hundreds of runs are committed.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench import results
from kvbench.results import Run


def table(runs: list[Run]) -> pd.DataFrame:
    """One row per run; of runs with equal configurations the newest."""
    newest = {run.config_hash: run for run in runs}
    return pd.DataFrame([_row(run) for run in newest.values()])


def _row(run: Run) -> dict[str, Any]:
    env = json.loads((run.path / "env.json").read_text())
    config = {f"config.{key}": _scalar(value) for key, value in results.flatten(run.config()).items()}
    metrics = {f"metric.{name}": float(entry["value"]) for name, entry in run.record["metrics"].items()}
    known = {f"env.{key}": _scalar(value) for key, value in results.flatten(env).items()}
    return {"config_hash": run.config_hash, "window": run.record["window"]} | config | metrics | known


def _scalar(value: Any) -> Any:
    """Lists as JSON text; a column of a table holds one type."""
    return json.dumps(value) if isinstance(value, list) else value


def main() -> None:
    folders, target = [Path(name) for name in sys.argv[1:-1]], Path(sys.argv[-1])
    if not folders or target.suffix != ".parquet" or not all(folder.is_dir() for folder in folders):
        print("usage: python -m kvbench.collect RESULTS_FOLDER ... TABLE.parquet", file=sys.stderr)
        sys.exit(2)
    found = [run for folder in folders for run in results.find(folder)]
    runs = [run for run in found if run.status == "complete" and "metrics" in run.record]
    if not runs:
        print(f"error: no complete run in {', '.join(map(str, folders))}", file=sys.stderr)
        sys.exit(2)
    target.parent.mkdir(parents=True, exist_ok=True)
    frame = table(runs)
    frame.to_parquet(target, index=False)
    print(f"{len(frame)} runs in {target}")


if __name__ == "__main__":
    main()
