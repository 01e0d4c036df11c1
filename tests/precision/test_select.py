from types import SimpleNamespace

import torch

from miles_core.precision.format import Format
from miles_core.precision.select import fake_quantize, make_codec


class Halves(Format):
    name = "halves"
    skip_origin = "--halves-skip"

    @classmethod
    def from_config(cls, config):
        made = cls()
        made.skip = config.plugin("halves")
        return made

    def storage(self, shape):
        raise NotImplementedError

    quantize = dequantize = config = storage


def run(rollout="bf16", train="bf16"):
    config = SimpleNamespace(
        rollout=SimpleNamespace(precision=rollout),
        train=SimpleNamespace(precision=train),
        plugin=lambda name: ("lm_head",),
    )
    return SimpleNamespace(config=config, hooks=SimpleNamespace(format={"halves": Halves}.__getitem__))


def test_bf16_is_the_model_copy_as_it_is():
    assert make_codec(run(train="halves")).format is None
    model = torch.nn.Linear(2, 2)
    assert fake_quantize(run(rollout="halves"), model) is None
    assert not model._forward_pre_hooks


def test_a_format_is_made_from_the_runs_options():
    codec = make_codec(run(rollout="halves"))
    assert isinstance(codec.format, Halves)
    assert codec.selector.skip == ("lm_head",) and codec.selector.origin == "--halves-skip"
