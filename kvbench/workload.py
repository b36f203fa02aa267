"""The requests of a run, all known before it starts and equal for equal settings and seed."""

import itertools
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.arrivals import ArrivalConfig, arrival_times
from kvbench.byte_tokenizer import ByteTokenizer
from kvbench.errors import ConfigError
from kvbench.input_files import read_columns, token_count
from kvbench.models import Tokenizer
from kvbench.output_lengths import output_lengths
from kvbench.prompts import read_prompts
from kvbench.request import Request, Sampling

TOO_LONG = ("error", "skip", "truncate")

log = logging.getLogger(__name__)


@dataclass
class WorkloadConfig:
    """Schema of ``conf/workload/``. The YAML files say what each key means.

    ``output_tokens`` takes an integer, a mapping or null, ``early_stopping`` a bool or "never".
    """

    name: str = "prompts"
    prompts: str | None = None
    lengths: str | None = None
    num_requests: int | None = None
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
    ignore_eos: bool = False


def validate(cfg: WorkloadConfig) -> None:
    """Check what needs no model, by drawing the workload with a byte tokenizer. Raises ConfigError."""
    chat_template = cfg.chat_template and cfg.lengths is not None
    trial = replace(cfg, chat_template=chat_template)
    build(trial, ByteTokenizer(), vocab_size=len(ByteTokenizer()), max_tokens=sys.maxsize, seed=0)


def build(
    cfg: WorkloadConfig, tokenizer: Tokenizer | None, *, vocab_size: int, max_tokens: int, seed: int
) -> list[Request]:
    """Requests sorted by arrival, ids counting from 0 in that order (gaps where one was skipped).

    ``max_tokens``: the model's limit on prompt + output. Prompts, lengths, arrivals and sampling draw
    from independent streams of ``seed``. Raises ConfigError naming the setting that cannot be used.
    """
    sampling = _sampling(cfg)
    if cfg.too_long not in TOO_LONG:
        raise ConfigError(f"workload.too_long: {cfg.too_long!r} is not one of {', '.join(TOO_LONG)}")
    if cfg.num_requests is not None and cfg.num_requests < 1:
        raise ConfigError(f"workload.num_requests: {cfg.num_requests} is not an integer >= 1, or null")
    if tokenizer is None:
        raise ConfigError("workload.prompts: this model has no tokenizer; give model.path one that has")
    streams = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(4)]
    prompt_rng, length_rng, arrival_rng, sampling_rng = streams
    if cfg.lengths is None:
        prompts, outputs = _whole_prompts(cfg, tokenizer, prompt_rng, length_rng)
    else:
        prompts, outputs = _cut_prompts(cfg, tokenizer, prompt_rng)
    arrivals = arrival_times(cfg.arrival, len(prompts), arrival_rng)
    seeds = sampling_rng.integers(2**63, size=len(prompts))
    requests = [
        Request(index, prompt, float(arrival), int(output), replace(sampling, seed=int(request_seed)))
        for index, (prompt, arrival, output, request_seed) in enumerate(
            zip(prompts, arrivals, outputs, seeds, strict=True)
        )
    ]
    _check_vocabulary(requests, vocab_size)
    return _fit(requests, max_tokens, cfg.too_long)


def _sampling(cfg: WorkloadConfig) -> Sampling:
    return Sampling(
        mode=cfg.mode,
        n=cfg.n,
        beam_width=cfg.beam_width,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        length_penalty=cfg.length_penalty,
        early_stopping=cfg.early_stopping,
        ignore_eos=cfg.ignore_eos,
    )


def _whole_prompts(
    cfg: WorkloadConfig,
    tokenizer: Tokenizer,
    prompt_rng: np.random.Generator,
    length_rng: np.random.Generator,
) -> tuple[list[NDArray[np.int32]], NDArray[np.int64]]:
    if cfg.output_tokens is None:
        raise ConfigError(
            "workload.lengths: give a CSV with columns input_tokens and output_tokens, or set workload.output_tokens"
        )
    texts = read_prompts(cfg.prompts)
    num_requests = cfg.num_requests or len(texts)
    chosen = list(itertools.islice(_shuffled_passes(len(texts), prompt_rng), num_requests))
    tokens = {index: _encode(texts[index], tokenizer, cfg.chat_template) for index in set(chosen)}
    return [tokens[index] for index in chosen], output_lengths(cfg.output_tokens, num_requests, length_rng)


def _cut_prompts(
    cfg: WorkloadConfig, tokenizer: Tokenizer, rng: np.random.Generator
) -> tuple[list[NDArray[np.int32]], NDArray[np.int64]]:
    """Prompts of exactly the lengths of ``cfg.lengths``, cut one after the other from our texts.

    Rows are taken in file order, again from the first where more requests are asked for.
    """
    if cfg.chat_template:
        raise ConfigError("workload.chat_template: must be false with workload.lengths, whose lengths are exact")
    if cfg.output_tokens is not None:
        raise ConfigError("workload.output_tokens: must be null with workload.lengths, which brings its own")
    columns = {"input_tokens": token_count, "output_tokens": token_count}
    rows = read_columns(str(cfg.lengths), columns, "workload.lengths")
    take = np.arange(cfg.num_requests or len(rows["input_tokens"])) % len(rows["input_tokens"])
    inputs, outputs = (np.array(rows[column], dtype=np.int64)[take] for column in columns)
    # Joined texts: no token that marks the beginning of one may stand in their middle.
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in read_prompts(cfg.prompts)]
    stream = itertools.chain.from_iterable(texts[index] for index in _shuffled_passes(len(texts), rng))
    return [np.fromiter(itertools.islice(stream, int(n)), np.int32, int(n)) for n in inputs], outputs


def _shuffled_passes(count: int, rng: np.random.Generator) -> Iterator[int]:
    """Endless passes over ``range(count)``, each in an order of its own."""
    while True:
        yield from rng.permutation(count).tolist()


def _encode(text: str, tokenizer: Tokenizer, chat_template: bool) -> NDArray[np.int32]:
    if not chat_template:
        return np.array(tokenizer.encode(text), dtype=np.int32)
    if not tokenizer.chat_template:
        raise ConfigError("workload.chat_template: this model's tokenizer has none; legal value: false")
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return np.array(tokenizer.encode(str(chat), add_special_tokens=False), dtype=np.int32)


def _check_vocabulary(requests: list[Request], vocab_size: int) -> None:
    for request in requests:
        if (largest := int(request.prompt.max())) >= vocab_size:
            raise ConfigError(
                f"workload.prompts: token {largest} of request {request.request_id} is outside the model's "
                f"vocabulary of {vocab_size}; the tokenizer at model.path belongs to another model"
            )


def _fit(requests: list[Request], max_tokens: int, too_long: str) -> list[Request]:
    """Apply ``workload.too_long`` to requests whose prompt + output exceed ``max_tokens``.

    truncate: drop the prompt's first tokens; an output that alone leaves no room for a prompt token is
    shortened to do so.
    """
    fitting = []
    for request in requests:
        num_prompt = len(request.prompt)
        if num_prompt + request.max_new_tokens <= max_tokens:
            fitting.append(request)
        elif too_long == "truncate":
            output = min(request.max_new_tokens, max_tokens - 1)
            kept = request.prompt[-(max_tokens - output) :]
            fitting.append(replace(request, prompt=kept, max_new_tokens=output))
        elif too_long == "error":
            raise ConfigError(
                f"workload.too_long: request {request.request_id} needs {num_prompt} prompt + "
                f"{request.max_new_tokens} output tokens, more than max_model_len={max_tokens}; raise it, "
                "lower workload.output_tokens, or set workload.too_long to skip | truncate"
            )
    if not fitting:
        raise ConfigError(f"workload.too_long: skip leaves no request within the model's {max_tokens} tokens")
    if len(fitting) < len(requests):
        log.warning("workload.too_long=skip left out %d of %d requests", len(requests) - len(fitting), len(requests))
    return fitting
