"""Traces: requests as lengths and arrival times, read from the public formats and written as Parquet."""

from kvbench.traces.reader import read
from kvbench.traces.selection import TraceConfig, select
from kvbench.traces.trace import Trace, write

__all__ = ["Trace", "TraceConfig", "read", "select", "write"]
