"""The shape of a model: what its KV and its arithmetic cost, from its configuration alone."""

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from kvbench.errors import ConfigError

_EMBEDDINGS = ("embed", "wte", "wpe")  # parameters that are looked up, not multiplied
_shapes: dict[tuple[str, int | None], "ModelShape"] = {}  # by configuration: a sweep has few models and many jobs


@dataclass(frozen=True)
class Geometry:
    """What a model needs from the pool."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        """K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True)
class ModelShape(Geometry):
    """What a step of the model computes and reads.

    layer_parameters: multiplied with every token. head_parameters: of the output layer, multiplied with
    every token that is sampled from. num_parameters: all, embeddings included, shared ones once.
    """

    hidden_size: int
    layer_parameters: int
    head_parameters: int
    num_parameters: int


def shape_of(config: PretrainedConfig, kv_heads: int | None = None) -> ModelShape:
    """The shape of the decoder that ``config`` describes, counted on a model without storage.

    kv_heads: KV heads after repeating the model's own (None: as configured). Weights are counted as configured.
    """
    key = config.to_json_string(), kv_heads
    if key not in _shapes:
        _shapes[key] = _count(config, kv_heads)
    return _shapes[key]


def _count(config: PretrainedConfig, kv_heads: int | None) -> ModelShape:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    output = model.get_output_embeddings().weight
    layers = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and parameter is not output and not any(part in name for part in _EMBEDDINGS)
    )
    return ModelShape(
        num_layers=text.num_hidden_layers,
        num_query_heads=heads,
        num_kv_heads=kv_heads or getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        hidden_size=text.hidden_size,
        layer_parameters=layers,
        head_parameters=output.numel(),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def read_config(path: str | None) -> PretrainedConfig:
    """A model's configuration: a directory with a ``config.json``, such a file, or the name of a shipped one."""
    if not path:
        raise ConfigError(f"model.path: give a config.json, its directory, or one of {', '.join(shipped())}")
    where = Path(path).expanduser()
    file = where / "config.json" if where.is_dir() else where
    if not file.is_file():
        file = Path(str(_shipped_folder() / f"{path}.json"))
    if not file.is_file():
        raise ConfigError(f"model.path: {path} is no config.json, no directory with one, nor {', '.join(shipped())}")
    try:
        fields: dict[str, Any] = json.loads(file.read_text())
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.path: {file.name} describes no model that transformers knows: {error}") from error


def shipped() -> list[str]:
    """Names of the configurations that come with kvbench."""
    return sorted(file.name.removesuffix(".json") for file in _shipped_folder().iterdir())


def _shipped_folder() -> Any:
    return resources.files("kvbench") / "resources" / "geometries"
