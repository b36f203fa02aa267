"""What the public formats call their columns, and how a cell of each is read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvbench.input_files import seconds, token_count
from kvbench.traces import cells

Parser = Callable[[Any], Any]
Columns = dict[str, tuple[str, Parser]]  # role: name in the file, parser


@dataclass(frozen=True)
class Format:
    """Columns as (name in the file, parser). Arrivals are in units of ``1 / per_second`` s.

    from_first: arrivals are points in time, counted here from the file's earliest.
    """

    input: tuple[str, Parser]
    output: tuple[str, Parser]
    arrival: tuple[str, Parser] | None = None
    hash_ids: tuple[str, Parser] | None = None
    per_second: int = 1
    from_first: bool = True
    optional: frozenset[str] = frozenset()

    def columns(self) -> Columns:
        named = {"arrival": self.arrival, "input": self.input, "output": self.output, "hash_ids": self.hash_ids}
        return {role: column for role, column in named.items() if column is not None}

    def missing(self, header: list[str]) -> list[str]:
        """Names of columns that are needed and not in ``header``."""
        return [name for role, (name, _) in self.columns().items() if role not in self.optional and name not in header]


FORMATS = {
    "azure": Format(
        arrival=("TIMESTAMP", cells.microseconds),
        input=("ContextTokens", token_count),
        output=("GeneratedTokens", token_count),
        per_second=10**6,
    ),
    "burstgpt": Format(
        arrival=("Timestamp", seconds),
        input=("Request tokens", token_count),
        output=("Response tokens", token_count),
    ),
    "csv": Format(
        arrival=("arrival_s", seconds),
        input=("input_tokens", token_count),
        output=("output_tokens", token_count),
        from_first=False,
        optional=frozenset({"arrival"}),
    ),
    "parquet": Format(
        arrival=("arrival_s", cells.number),
        input=("input_tokens", cells.count),
        output=("output_tokens", cells.count),
        hash_ids=("hash_ids", cells.block_ids),
        from_first=False,
        optional=frozenset({"arrival", "hash_ids"}),
    ),
    "mooncake": Format(
        arrival=("timestamp", cells.number),
        input=("input_length", cells.count),
        output=("output_length", cells.count),
        hash_ids=("hash_ids", cells.block_ids),
        per_second=1000,
    ),
}
CSV_FORMATS = ("azure", "burstgpt", "csv")
LEGAL_FORMATS = ("auto", *FORMATS, "sharegpt")
