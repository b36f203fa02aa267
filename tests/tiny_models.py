"""Tiny random decoders of every family the tests run, float32, with varied greedy output."""

from collections.abc import Callable

from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from kvbench.models import randomise

VOCAB_SIZE = 128
EOS_TOKEN_ID = 2
PAD_TOKEN_ID = 1
SLIDING_WINDOW = 12  # tokens: shorter than the sequences of the tests

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 0,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": PAD_TOKEN_ID,
    "tie_word_embeddings": False,
}
GROUPED = COMMON | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**GROUPED),
    "qwen2": lambda: Qwen2Config(**GROUPED),
    "qwen3": lambda: Qwen3Config(**GROUPED, head_dim=16),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=SLIDING_WINDOW),
    "gemma2": lambda: Gemma2Config(
        **GROUPED,
        head_dim=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt2": lambda: GPT2Config(**COMMON, n_embd=64, n_layer=2, n_head=4, n_positions=512),
    "opt": lambda: OPTConfig(
        **COMMON,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
    ),
}


def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model of ``family`` (a key of FAMILIES) in eval mode, equal for equal seeds."""
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    randomise(model, seed)
    return model.eval()
