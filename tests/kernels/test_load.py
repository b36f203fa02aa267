"""Implementations are chosen by name, and nothing falls back."""

import inspect
import sys

import pytest

import kernels

OPERATIONS = ["store_kv", "decode_attention", "prefill_attention", "copy_slots", "transfer_slots"]


def test_unknown_names_are_refused_with_the_legal_ones():
    with pytest.raises(ValueError, match=r"'cuda'.*reference, cpu, triton"):
        kernels.load("cuda")


def test_missing_dependencies_are_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels.cpu", None)
    with pytest.raises(kernels.KernelsUnavailable, match="'cpu' cannot be used here"):
        kernels.load("cpu")


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_signatures_are_those_of_the_interface(name, operation):
    expected = inspect.signature(getattr(kernels.Kernels, operation))
    assert inspect.signature(getattr(kernels.load(name), operation)) == expected
