"""What is not finite is named: module, step, micro-batch and samples."""

import re

import pytest

from miles_core.errors import NonFiniteError

HEAD = """
import dataclasses

import numpy as np
import torch
from miles_core.data.field import Field
from miles_core.plugin.marker import hookimpl
from miles_core.plugin.manifest import Plugin

plugin = Plugin("fault", "plants a fault", "0", "~=0.1", hooks={"": "Hooks"})
"""
FORWARD = """
struck = False


class Hooks:
    @hookimpl
    def on_model(self, model, role):
        if role == "train":
            module = model.get_submodule("model.layers.1.self_attn.o_proj")
            module.register_forward_hook(lambda m, args, out: out.index_fill(-1, torch.tensor([3]), float(VALUE)) if struck else out)

    @hookimpl
    def wrap_forward(self, run):
        def wrap(inner):
            def forward(chunk, micro_batch, ctx):
                global struck
                struck = ctx.kind == "train" and 13 in micro_batch.index.tolist()
                return inner(chunk, micro_batch, ctx)

            return forward

        return wrap
"""
BACKWARD = """
class Hooks:
    @hookimpl
    def on_model(self, model, role):
        if role == "train":
            module = model.get_submodule("model.layers.0.input_layernorm")
            module.register_forward_hook(lambda m, args, out: out + (out * 0).sqrt())
"""
COLUMN = """
FIELD = Field("prior", "float32", "response")
plugin = dataclasses.replace(plugin, fields=(FIELD,))


class Hooks:
    @hookimpl
    def on_sample(self, run, sample):
        sample.fields["prior"] = np.full(sample.response_length, np.inf, np.float32)

    @hookimpl
    def wrap_loss(self, run):
        def wrap(inner):
            def loss(output, batch, ctx):
                found = inner(output, batch, ctx)
                return dataclasses.replace(found, value=found.value + (output.log_probs * batch.columns["prior"]).sum())

            return loss

        return wrap
"""
PARAMETER = """
class Hooks:
    @hookimpl
    def wrap_weights(self, run, policy):
        def wrap(inner):
            def weights():
                for unit in inner():
                    for name in unit.tensors:
                        if run.step == 1 and name == "model.layers.1.self_attn.q_proj.weight":
                            unit.tensors[name] = unit.tensors[name].clone().fill_(float("nan"))
                    yield unit

            return weights

        return wrap
"""


@pytest.fixture
def failing(tmp_path, toy_run):
    def call(text, **options):
        path = tmp_path / "fault.py"
        path.write_text(HEAD + text)
        with pytest.raises(NonFiniteError) as caught:
            toy_run([str(path)], micro_batch_size=4, **options)
        return str(caught.value)

    return call


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_the_first_module_in_the_forward_pass(failing, value):
    said = failing(FORWARD.replace("VALUE", repr(value)))
    found = re.search(
        r"training step 2: the output of model\.layers\.1\.self_attn\.o_proj \[1, \d+, 32\] holds \d+ values that are not "
        r"finite, the first \((nan|inf)\) at \[0, 0, 3\], from finite inputs, in micro-batch 2 of 2 \(samples 12, 13, 14, 15\)",
        said,
    )
    assert found and found[1] == value


def test_recomputed_activations_change_nothing(failing):
    said = failing(FORWARD.replace("VALUE", "'nan'"), recompute_activations=True)
    assert "the output of model.layers.1.self_attn.o_proj" in said


def test_the_first_gradient_in_the_backward_pass(failing):
    said = failing(BACKWARD)
    assert "training step 1: the gradient of the output of model.embed_tokens" in said  # what the layer norm reads
    assert "in micro-batch 1 of 2" in said and "gradient norm of optimiser step 1" in said


def test_a_column_that_came_from_elsewhere(failing):
    said = failing(COLUMN)
    assert re.search(r"column prior is inf at response token 0 of sample 0, not computed by this pass", said)


def test_the_engine_names_the_module_and_its_parameter(failing):
    said = failing(PARAMETER)
    assert "engine, weight version 1: the output of model.layers.1.self_attn.q_proj" in said
    assert "because its parameter model.layers.1.self_attn.q_proj.weight is not finite" in said
