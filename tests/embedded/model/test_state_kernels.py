"""The kernels of layers with a state."""

from __future__ import annotations

import functools
import sys
import types

import pytest
from torch import nn

from miles_embedded.model import state_kernels
from miles_embedded.model.load import load_model
from miles_embedded.testing.families import family_checkpoint, lacking


@pytest.fixture
def modeling(monkeypatch):
    """A module of Transformers whose function for the delta rule calls a package."""

    def torch_chunk_gated_delta_rule(x):
        return x

    @functools.wraps(torch_chunk_gated_delta_rule)
    def wrapped(x):
        return x + 1

    module = types.ModuleType("modeling_made_up")
    module.torch_chunk_gated_delta_rule, module.other = wrapped, functools.wraps(wrapped)(lambda x: x + 2)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def layer(modeling):
    return type("DeltaNet", (nn.Linear,), {"__module__": modeling.__name__})(2, 2)


def test_a_package_is_used_unless_its_kernels_are_compiled_wrongly(modeling, monkeypatch, caplog):
    state_kernels.choose_kernels([layer(modeling)])
    assert modeling.torch_chunk_gated_delta_rule(1) == 2
    monkeypatch.setattr(state_kernels, "miscompiles_delta_rule", lambda: True)
    state_kernels.choose_kernels([layer(modeling), layer(modeling)])
    assert modeling.torch_chunk_gated_delta_rule(1) == 1
    assert modeling.other(1) == 3
    assert [record.getMessage()[:38] for record in caplog.records] == ["torch_chunk_gated_delta_rule runs in t"]


def test_transformers_wraps_its_functions_so(tmp_path, monkeypatch):
    """The test above makes up what Transformers does; this one finds the functions of a real family."""
    if missing := lacking("qwen3_next"):
        pytest.skip(missing)
    import transformers.models.qwen3_next.modeling_qwen3_next as real

    before = real.torch_chunk_gated_delta_rule
    monkeypatch.setattr(real, "torch_chunk_gated_delta_rule", before)  # restored afterwards
    monkeypatch.setattr(real, "torch_recurrent_gated_delta_rule", real.torch_recurrent_gated_delta_rule)
    monkeypatch.setattr(state_kernels, "miscompiles_delta_rule", lambda: True)
    load_model(family_checkpoint("qwen3_next", tmp_path))
    assert real.torch_chunk_gated_delta_rule is before.__wrapped__
