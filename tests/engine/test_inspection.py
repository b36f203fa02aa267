"""Models that the engine cannot decode are refused at start, by the feature they need."""

import pytest
import torch
import transformers as tf

from kvbench.errors import ConfigError
from kvbench.executors.inspection import inspect
from kvbench.geometry import Geometry
from tests.tiny_models import FAMILIES, tiny_model

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}
REFUSED = {
    "bypassed attention": (lambda: tf.FalconConfig(**SHAPE), "bypasses the registered attention function"),
    "ALiBi": (lambda: tf.BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4), "ALiBi"),
    "sinks": (lambda: tf.GptOssConfig(**SHAPE, num_local_experts=2, head_dim=16), "attention sinks"),
    "MLA": (lambda: tf.DeepseekV3Config(**SHAPE), "multi-head latent attention"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_pass(family: str) -> None:
    kv_heads = 4 if family in ("gpt2", "opt") else 2
    assert inspect(tiny_model(family)) == Geometry(2, 4, kv_heads, 16)


def test_bytes_per_slot_counts_keys_and_values_of_every_layer() -> None:
    assert Geometry(40, 40, 40, 128).bytes_per_slot(torch.float16) == 819_200  # OPT-13B


@pytest.mark.parametrize("feature", REFUSED)
def test_missing_features_are_named(feature: str) -> None:
    config, named = REFUSED[feature]
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config()).eval()
    with pytest.raises(ConfigError, match=named) as refused:
        inspect(model)
    assert str(refused.value).startswith("model: ")


def test_an_attention_that_differs_silently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no declaration tells, the probe's logits do."""
    model = tiny_model("llama")
    attend = "kvbench.executors.inspection.reference.prefill_attention"
    monkeypatch.setattr(attend, lambda query, *rest, **options: query)
    with pytest.raises(ConfigError, match="other logits"):
        inspect(model)
