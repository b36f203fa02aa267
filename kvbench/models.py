"""The model that the engine runs: SmolLM2, any Hugging Face decoder, or a tiny random Llama."""

import copy
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from kvbench import geometry, weights
from kvbench.byte_tokenizer import ByteTokenizer
from kvbench.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GEOMETRY = "geometry"  # model.source of a shape without weights
WEIGHT_PATTERNS = ("*.safetensors", "*.bin")
EMBEDDING_NAMES = ("embed", "wte", "wpe")  # Llama and OPT; GPT-2
KV_PROJECTIONS = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")

Tokenizer = PreTrainedTokenizerBase | ByteTokenizer

log = logging.getLogger(__name__)
disable_progress_bar()  # of transformers: its bars would break ours


@dataclass
class ModelConfig:
    """Schema of ``conf/model/``. The YAML files say what each key means."""

    name: str = "smollm2"
    source: str = "smollm2"
    path: str | None = None
    cache_dir: str | None = None
    kv_heads: int | None = None
    max_tokens: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class LoadedModel:
    """A decoder in eval mode and what belongs to it.

    tokenizer: None where a local directory brings none.
    max_tokens: most tokens (prompt and output) of one sequence, by the model's positions.
    provenance: where the weights came from, for the run record; JSON types only.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer | None
    name: str
    max_tokens: int
    provenance: dict[str, Any]


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype of a setting's value. Raises ConfigError on another name."""
    if name not in DTYPES:
        raise ConfigError(f"dtype: {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def load(cfg: ModelConfig, dtype: torch.dtype) -> LoadedModel:
    """Load ``cfg`` on the CPU in ``dtype``. Raises ConfigError on settings or weights it cannot use."""
    if cfg.source not in LOADERS:
        raise ConfigError(f"model.source: {cfg.source!r} is not one of {', '.join((*LOADERS, GEOMETRY))}")
    model, tokenizer, provenance = LOADERS[cfg.source](cfg, dtype)
    provenance["dtype"] = str(dtype).removeprefix("torch.")
    if cfg.kv_heads is not None:
        model = repeat_kv_heads(model, cfg.kv_heads)
        provenance["kv_heads"] = cfg.kv_heads
    return LoadedModel(model.eval(), tokenizer, cfg.name, max_tokens(cfg, model.config), provenance)


def repeat_kv_heads(model: PreTrainedModel, kv_heads: int) -> PreTrainedModel:
    """The same function with each K and V head repeated, so that it caches ``kv_heads`` of them.

    Attention's head groups are contiguous, so repeats stand next to each other and logits stay equal.
    """
    config = copy.deepcopy(model.config)
    text_config = config.get_text_config()
    num_heads = text_config.num_attention_heads
    own = getattr(text_config, "num_key_value_heads", num_heads)
    legal = [heads for heads in range(own, num_heads + 1, own) if num_heads % heads == 0]
    state = model.state_dict()
    if not any(name.endswith(KV_PROJECTIONS) for name in state):
        legal = [own]  # K and V come out of a fused projection, which is not taken apart here
    if kv_heads not in legal:
        raise ConfigError(f"model.kv_heads: {kv_heads} is not one of {legal} for this model, or null")
    if kv_heads == own:
        return model
    for name in state:
        if name.endswith(KV_PROJECTIONS):
            heads = state[name].unflatten(0, (own, -1))
            state[name] = heads.repeat_interleave(kv_heads // own, dim=0).flatten(0, 1)
    text_config.num_key_value_heads = kv_heads
    repeated = weights.with_state_dict(type(model), config, state)
    repeated.generation_config = model.generation_config
    return repeated


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Draw all parameters from ``seed`` alone, at scales that keep greedy output varied.

    Independent of torch's global generator and of how a transformers version initialises.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:  # gains near their neutral value, biases near 0
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
            else:
                # Embeddings of unit variance; projections that keep their input's variance.
                is_embedding = any(part in name for part in EMBEDDING_NAMES)
                std = 1.0 if is_embedding else 1.0 / math.sqrt(min(parameter.shape))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _load_smollm2(cfg: ModelConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, Tokenizer, dict[str, Any]]:
    files = weights.smollm2(weights.cache_root(cfg.cache_dir))
    model = AutoModelForCausalLM.from_pretrained(files.directory, dtype=dtype)
    return model, AutoTokenizer.from_pretrained(files.directory), files.provenance


def _load_hugging_face(
    cfg: ModelConfig, dtype: torch.dtype
) -> tuple[PreTrainedModel, Tokenizer | None, dict[str, Any]]:
    if not cfg.path:
        raise ConfigError("model.path: give a local directory or a hub id for model=hf")
    path = Path(cfg.path).expanduser()
    location = str(path) if path.is_dir() else cfg.path
    refusal = None if path.is_dir() else weights.hub_refusal(location)
    local = refusal is not None  # spares the hub client's retries, about 24 s per model
    try:
        model = AutoModelForCausalLM.from_pretrained(location, dtype=dtype, local_files_only=local)
    except (OSError, ValueError) as error:
        what = "no decoder that transformers can load" if refusal is None else "no local directory; from the hub"
        raise ConfigError(f"model.path: {cfg.path}: {what} ({refusal or error})") from error
    return model, _tokenizer_of(location, local), {"source": "hf", "path": cfg.path} | _identity(path, model)


def _tokenizer_of(location: str, local: bool) -> PreTrainedTokenizerBase | None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, local_files_only=local)
        if tokenizer.vocab_size > 0:  # transformers makes an empty one where the files are missing
            return tokenizer
        reason: Exception | str = "no vocabulary"
    except (OSError, ValueError) as error:
        reason = error
    log.warning("model.path: %s has no tokenizer that transformers can load (%s)", location, reason)
    return None


def _identity(path: Path, model: PreTrainedModel) -> dict[str, Any]:
    """The hub's commit, or the sha256 of every weights file of a local directory."""
    if not path.is_dir():
        return {"revision": getattr(model.config, "_commit_hash", None)}
    files: Iterable[Path] = sorted(file for pattern in WEIGHT_PATTERNS for file in path.glob(pattern))
    return {"weights_sha256": {file.name: weights.sha256_of(file) for file in files}}


def _load_random(cfg: ModelConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, Tokenizer, dict[str, Any]]:
    tokenizer, config = ByteTokenizer(), _tiny_config()
    model: PreTrainedModel = LlamaForCausalLM(config)
    randomise(model, cfg.seed)
    # Not model.to(dtype), which would also round the rotary frequencies.
    state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    model = weights.with_state_dict(LlamaForCausalLM, config, state)
    return model, tokenizer, {"source": "random", "seed": cfg.seed}


def _tiny_config() -> LlamaConfig:
    tokenizer = ByteTokenizer()
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def max_tokens(cfg: ModelConfig, config: PretrainedConfig) -> int:
    """Most tokens of a sequence: ``model.max_tokens``, else the model's positions. Raises ConfigError."""
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    chosen = limit if cfg.max_tokens is None else cfg.max_tokens
    if chosen is None:
        raise ConfigError("model.max_tokens: this model states no position limit; give one")
    if chosen < 1 or (limit is not None and chosen > limit):
        raise ConfigError(f"model.max_tokens: {chosen} is not in 1..{limit or 'any'}, or null")
    return chosen


def configuration(cfg: ModelConfig) -> PretrainedConfig:
    """The model's configuration without its weights. Raises ConfigError."""
    if cfg.source == "smollm2":
        return geometry.read_config(str(weights.smollm2(weights.cache_root(cfg.cache_dir)).directory))
    if cfg.source == "random":
        return _tiny_config()
    if cfg.source in ("hf", GEOMETRY):
        return geometry.read_config(cfg.path)
    raise ConfigError(f"model.source: {cfg.source!r} is not one of {', '.join((*LOADERS, GEOMETRY))}")


Loader = Callable[[ModelConfig, torch.dtype], tuple[PreTrainedModel, Tokenizer | None, dict[str, Any]]]
LOADERS: dict[str, Loader] = {"smollm2": _load_smollm2, "hf": _load_hugging_face, "random": _load_random}
