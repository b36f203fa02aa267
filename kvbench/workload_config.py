"""The settings of a workload, and what can be wrong with them on their own."""

import math
from dataclasses import dataclass, field
from typing import Any

from kvbench import chat, length_filter
from kvbench.arrivals import ArrivalConfig
from kvbench.chat import ChatConfig
from kvbench.errors import ConfigError
from kvbench.length_filter import FilterConfig
from kvbench.traces import TraceConfig

TOO_LONG = ("error", "skip", "truncate")
PAIRS = ("in_order", "sample", "independent")


@dataclass
class PrefixConfig:
    """``workload.prefix``: tokens that prompts begin with (None: nothing), one of ``num_prefixes`` texts each."""

    tokens: int | None = None
    num_prefixes: int = 1


@dataclass
class WorkloadConfig:
    """Schema of ``conf/workload/``. The YAML files say what each key means.

    ``input_tokens`` and ``output_tokens`` take an integer, a mapping or null, ``early_stopping`` a bool or "never".
    """

    name: str = "prompts"
    prompts: str | None = None
    input_tokens: Any = None
    lengths: str | None = None
    histogram: str | None = None
    chat: ChatConfig = field(default_factory=ChatConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    pairs: str = "in_order"
    filter: FilterConfig = field(default_factory=FilterConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    num_requests: int | None = None
    duration_s: float | None = None
    chat_template: bool = True
    output_tokens: Any = 64
    too_long: str = "error"
    arrival: ArrivalConfig = field(default_factory=ArrivalConfig)
    mode: str = "greedy"
    n: int = 1
    beam_width: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    length_penalty: float = 1.0
    early_stopping: Any = False
    recording: int | None = None
    ignore_eos: bool = False


def length_source(cfg: WorkloadConfig) -> str | None:
    """The setting that gives lengths; None where whole prompts are served. Raises ConfigError on two."""
    sources = {
        "workload.input_tokens": cfg.input_tokens,
        "workload.lengths": cfg.lengths,
        "workload.histogram": cfg.histogram,
        "workload.trace.file": cfg.trace.file,
    }
    given = [setting for setting, value in sources.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{given[0]}: must be null with {given[1]}; lengths come from one of them")
    return given[0] if given else None


def request_limit(cfg: WorkloadConfig, num_rows: int) -> int | None:
    """Most requests to draw from ``num_rows`` prompts or lengths; None: as many as arrive in ``duration_s``."""
    if cfg.num_requests is None and (cfg.duration_s is None or cfg.arrival.process == "all_at_once"):
        return num_rows
    return cfg.num_requests


def check(cfg: WorkloadConfig) -> None:
    """Raises ConfigError on settings that are illegal whatever the files hold."""
    source = length_source(cfg)
    for setting, value, legal in (("too_long", cfg.too_long, TOO_LONG), ("pairs", cfg.pairs, PAIRS)):
        if value not in legal:
            raise ConfigError(f"workload.{setting}: {value!r} is not one of {', '.join(legal)}")
    if cfg.num_requests is not None and cfg.num_requests < 1:
        raise ConfigError(f"workload.num_requests: {cfg.num_requests} is not an integer >= 1, or null")
    if cfg.duration_s is not None and not 0 < cfg.duration_s < math.inf:
        raise ConfigError(f"workload.duration_s: {cfg.duration_s} is not a finite number > 0, or null")
    if cfg.recording is not None and cfg.mode != "beam":
        raise ConfigError(f"workload.recording: must be null with workload.mode={cfg.mode}; it names recorded beams")
    length_filter.check(cfg.filter)
    _check_prefix(cfg.prefix)
    chat.check(cfg.chat)
    if cfg.chat.mean_rounds is not None and cfg.histogram is None:
        raise ConfigError("workload.chat.mean_rounds: must be null without workload.histogram, which rounds come from")
    if source is None:
        _check_prompts(cfg)
    elif cfg.chat_template:
        raise ConfigError(f"workload.chat_template: must be false with {source}, whose lengths are exact")
    elif cfg.output_tokens is not None and cfg.input_tokens is None:
        raise ConfigError(f"workload.output_tokens: must be null with {source}, which brings its own")


def _check_prompts(cfg: WorkloadConfig) -> None:
    if cfg.output_tokens is None:
        raise ConfigError(
            "workload.lengths: give a CSV with columns input_tokens and output_tokens, or workload.trace.file a "
            "trace, or set workload.output_tokens"
        )
    if any(bound is not None for bound in vars(cfg.filter).values()):
        raise ConfigError(
            "workload.filter: every bound must be null with whole prompts; it applies to workload.input_tokens, "
            "workload.lengths, workload.histogram and workload.trace.file"
        )


def _check_prefix(cfg: PrefixConfig) -> None:
    if cfg.tokens is not None and cfg.tokens < 1:
        raise ConfigError(f"workload.prefix.tokens: {cfg.tokens} is not an integer >= 1, or null")
    if cfg.num_prefixes < 1:
        raise ConfigError(f"workload.prefix.num_prefixes: {cfg.num_prefixes} is not an integer >= 1")
