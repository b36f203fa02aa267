"""The requests of a run, all known before it starts and equal for equal settings and seed."""

import itertools
import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench import lengths
from kvbench.arrivals import arrival_times
from kvbench.byte_tokenizer import ByteTokenizer
from kvbench.errors import ConfigError
from kvbench.length_distributions import draw_lengths
from kvbench.length_filter import FilterConfig
from kvbench.models import Tokenizer
from kvbench.prompts import SHIPPED, read_prompts
from kvbench.request import Request, Sampling
from kvbench.traces import Trace
from kvbench.workload_config import WorkloadConfig, check, length_source, request_limit

Prompts = list[NDArray[np.int32]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workload:
    """What a run serves. ``provenance``: where its lengths came from and what they average, JSON types only."""

    requests: list[Request]
    provenance: dict[str, Any]


@dataclass(frozen=True)
class Streams:
    """Independent random streams of one seed: what is drawn from one moves nothing drawn from another."""

    prompts: np.random.Generator
    lengths: np.random.Generator
    arrivals: np.random.Generator
    sampling: np.random.Generator
    prefixes: np.random.Generator

    @classmethod
    def of(cls, seed: int) -> "Streams":
        return cls(*(np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(5)))


_passed: set[str] = set()  # configurations that `validate` found good


def validate(cfg: WorkloadConfig) -> None:
    """Check what needs no model, by drawing the workload without one. Raises ConfigError.

    What has passed is not drawn again: a sweep's jobs mostly share their workload.
    """
    if (key := repr(cfg)) in _passed:
        return
    check(cfg)
    tokenizer = None
    if length_source(cfg) is None:
        tokenizer = ByteTokenizer()
        cfg = replace(cfg, chat_template=False)  # whether there is one depends on the model
    elif cfg.trace.file is not None:
        # Texts have other lengths in the model's tokens: what a filter leaves of them is not known yet.
        cfg = replace(cfg, filter=FilterConfig(), trace=replace(cfg.trace, tokenizer="bytes"))
    read_prompts(cfg.prompts)
    build(cfg, tokenizer, vocab_size=len(ByteTokenizer()), max_tokens=sys.maxsize, seed=0)
    _passed.add(key)


def build(cfg: WorkloadConfig, tokenizer: Tokenizer | None, *, vocab_size: int, max_tokens: int, seed: int) -> Workload:
    """Requests sorted by arrival, ids counting from 0 in that order (gaps where one was skipped).

    ``tokenizer``: None where tokens have no meaning; only lengths can be served then, and prompts are zeros.
    ``max_tokens``: the model's limit on prompt + output. Prompts, lengths, arrivals and sampling draw from
    independent streams of ``seed``. Raises ConfigError naming the setting that cannot be used.
    """
    sampling = _sampling(cfg)
    check(cfg)
    streams = Streams.of(seed)
    draw = _whole_prompts if length_source(cfg) is None else _cut_prompts
    prompts, drawn, provenance = draw(cfg, tokenizer, streams)
    prefix_ids: Iterable[int | None] = itertools.repeat(None, len(prompts))
    if cfg.prefix.tokens is not None:
        prompts, prefix_ids = _behind_prefixes(prompts, cfg, tokenizer, streams.prefixes)
        drawn, provenance = replace(drawn, hash_ids=None), provenance | {"prefix": asdict(cfg.prefix)}
    if tokenizer is not None:
        _check_vocabulary(prompts, vocab_size)
    samplings = _samplings(sampling, len(prompts), streams.sampling)
    is_text = tokenizer is not None
    requests = _requests(prompts, drawn, samplings, prefix_ids, cfg.prefix.tokens or 0, is_text)
    fitting = _fit(requests, max_tokens, cfg.too_long)
    averages = {
        "num_requests": len(fitting),
        "num_too_long": len(requests) - len(fitting),
        "mean_input_tokens": sum(len(request.prompt) for request in fitting) / len(fitting),
        "mean_output_tokens": sum(request.max_new_tokens for request in fitting) / len(fitting),
    }
    return Workload(fitting, provenance | averages)


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


def _samplings(sampling: Sampling, count: int, rng: np.random.Generator) -> Iterator[Sampling]:
    """One per request; one for all where nothing is sampled, and so no seed is used."""
    if sampling.mode != "sample":
        return itertools.repeat(sampling, count)
    return (replace(sampling, seed=seed) for seed in rng.integers(2**63, size=count).tolist())


def _requests(
    prompts: Prompts,
    drawn: Trace,
    samplings: Iterator[Sampling],
    prefix_ids: Iterable[int | None],
    num_prefix_tokens: int,
    is_text: bool,
) -> list[Request]:
    assert drawn.arrival_s is not None
    hash_ids = itertools.repeat((), len(drawn)) if drawn.hash_ids is None else drawn.hash_ids
    arrivals, outputs = drawn.arrival_s.tolist(), drawn.output_tokens.tolist()
    shared, texts = itertools.repeat(num_prefix_tokens, len(prompts)), itertools.repeat(is_text, len(prompts))
    columns = zip(prompts, arrivals, outputs, samplings, hash_ids, prefix_ids, shared, texts, strict=True)
    return [Request(i, *fields) for i, fields in enumerate(columns)]


def _whole_prompts(
    cfg: WorkloadConfig, tokenizer: Tokenizer | None, streams: Streams
) -> tuple[Prompts, Trace, dict[str, Any]]:
    if tokenizer is None:
        raise ConfigError(
            "workload.prompts: there is no tokenizer to encode texts with; give model.path a model that has one, or "
            "serve lengths (workload.lengths, workload.histogram, workload.trace.file)"
        )
    texts = read_prompts(cfg.prompts)
    limit = request_limit(cfg, len(texts))
    arrivals = arrival_times(cfg.arrival, limit, streams.arrivals, duration_s=cfg.duration_s)
    chosen = list(itertools.islice(_shuffled_passes(len(texts), streams.prompts), len(arrivals)))
    tokens = {index: _encode(texts[index], tokenizer, cfg) for index in set(chosen)}
    prompts = [tokens[index] for index in chosen]
    outputs = draw_lengths(cfg.output_tokens, len(arrivals), streams.lengths, key="output_tokens")
    inputs = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    provenance = {"source": "prompts", "file": Path(cfg.prompts or SHIPPED.name).name}
    return prompts, Trace(inputs, outputs, arrivals), provenance


def _cut_prompts(
    cfg: WorkloadConfig, tokenizer: Tokenizer | None, streams: Streams
) -> tuple[Prompts, Trace, dict[str, Any]]:
    """Prompts of exact lengths, cut one after the other from our texts; without a tokenizer, zeros."""
    drawn, provenance = lengths.draw(cfg, tokenizer, streams.lengths, streams.arrivals)
    return _cut(drawn.input_tokens.tolist(), cfg, tokenizer, streams.prompts), drawn, provenance


def _cut(counts: list[int], cfg: WorkloadConfig, tokenizer: Tokenizer | None, rng: np.random.Generator) -> Prompts:
    if tokenizer is None:
        zeros = np.broadcast_to(np.int32(0), max(counts))  # one number, however many tokens
        return [zeros[:count] for count in counts]
    # Joined texts: no token that marks the beginning of one may stand in their middle.
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in read_prompts(cfg.prompts)]
    stream = itertools.chain.from_iterable(texts[index] for index in _shuffled_passes(len(texts), rng))
    return [np.fromiter(itertools.islice(stream, count), np.int32, count) for count in counts]


def _behind_prefixes(
    prompts: Prompts, cfg: WorkloadConfig, tokenizer: Tokenizer | None, rng: np.random.Generator
) -> tuple[Prompts, list[int]]:
    """Each prompt behind one of ``num_prefixes`` texts of ``workload.prefix.tokens`` tokens, and which one."""
    num_tokens, num_prefixes = cfg.prefix.tokens, cfg.prefix.num_prefixes
    assert num_tokens is not None
    chosen = rng.integers(num_prefixes, size=len(prompts)).tolist()
    if tokenizer is None:
        return _cut([num_tokens + len(prompt) for prompt in prompts], cfg, None, rng), chosen
    prefixes = _cut([num_tokens] * num_prefixes, cfg, tokenizer, rng)
    return [np.concatenate([prefixes[index], p]) for index, p in zip(chosen, prompts, strict=True)], chosen


def _shuffled_passes(count: int, rng: np.random.Generator) -> Iterator[int]:
    """Endless passes over ``range(count)``, each in an order of its own."""
    while True:
        yield from rng.permutation(count).tolist()


def _encode(text: str, tokenizer: Tokenizer, cfg: WorkloadConfig) -> NDArray[np.int32]:
    if not cfg.chat_template:
        is_beginning = cfg.prefix.tokens is None  # no token that marks one may stand behind a prefix
        return np.array(tokenizer.encode(text, add_special_tokens=is_beginning), dtype=np.int32)
    if not tokenizer.chat_template:
        raise ConfigError("workload.chat_template: this model's tokenizer has none; legal value: false")
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return np.array(tokenizer.encode(str(chat), add_special_tokens=False), dtype=np.int32)


def _check_vocabulary(prompts: Prompts, vocab_size: int) -> None:
    for index, prompt in enumerate(prompts):
        if len(prompt) and (largest := int(prompt.max())) >= vocab_size:
            raise ConfigError(
                f"workload.prompts: token {largest} of request {index} is outside the model's "
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
            fitting.append(
                replace(request, prompt=kept, max_new_tokens=output, hash_ids=(), prefix_id=None, num_prefix_tokens=0)
            )
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
