"""Our ``kernels`` shares its name with a package that transformers probes for.

transformers looks for an importable ``kernels`` and reads its version; with some versions found there it
goes on to import names that we do not have. An installed package that is not that one, and has no
``__version__``, is left alone.
"""

import importlib.metadata
import sys
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available

import kernels


def test_no_version_is_there_to_be_probed():
    assert not hasattr(kernels, "__version__")


def test_the_hub_package_is_absent():
    names = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    assert "kernels" not in names
    assert Path(kernels.__file__).parent.name == "kernels"
    assert hasattr(kernels, "IMPLEMENTATIONS")


def test_transformers_imports_beside_it():
    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    LlamaForCausalLM(config)
    assert Path(sys.modules["kernels"].__file__) == Path(kernels.__file__)
    assert not is_kernels_available()
