import json
from types import SimpleNamespace

import pytest
import torch

from miles_core.config.groups import Precision
from miles_core.errors import ConfigError
from miles_core.precision.format import Format
from miles_core.sync.push import make_codec
from miles_embedded.quantized.trained import fake_quantize
from miles_formats.options import codec_for, exclusions


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


def run(rollout="bf16", train="bf16", checkpoint=None, **precision):
    config = SimpleNamespace(
        model=SimpleNamespace(hf_checkpoint=checkpoint),
        rollout=SimpleNamespace(precision=rollout),
        train=SimpleNamespace(precision=train, emulate_precision=False),
        precision=Precision(**precision),
        embedded=SimpleNamespace(quantized_dgrad=False),
        plugin=lambda name: ("lm_head",),
    )
    hooks = SimpleNamespace(format={"halves": Halves}.__getitem__, make=lambda kind, name, **given: codec_for(**given))
    return SimpleNamespace(config=config, hooks=hooks)


def test_bf16_is_the_model_copy_as_it_is():
    assert make_codec(run(train="halves")).format is None
    model = torch.nn.Linear(2, 2)
    assert fake_quantize(run(rollout="halves"), model) is None
    assert not model._forward_pre_hooks


def test_a_format_is_made_from_the_runs_options():
    codec = make_codec(run(rollout="halves"))
    assert isinstance(codec.format, Halves)
    assert codec.selector.skip == ("lm_head",) and codec.selector.origin == "--halves-skip"


def test_a_run_with_a_warm_up_starts_plain():
    assert make_codec(run(rollout="halves", warmup_steps=3)).format is None
    assert isinstance(make_codec(run(rollout="halves", warmup_steps=3), precision="halves").format, Halves)


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 5}))
    return str(tmp_path)


def test_layer_ranges_count_from_both_ends(checkpoint):
    options = {"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 1}
    selector = make_codec(run(rollout="halves", checkpoint=checkpoint, **options)).selector
    left_alone = [n for n in range(7) if not selector(f"model.layers.{n}.mlp.up_proj.weight", (8, 8))]
    assert left_alone == [0, 1, 4]  # 5 and 6 would be MTP layers, which are not at the end of the decoder
    name = "model.layers.4.mlp.up_proj.weight"
    assert selector.reason(name, (8, 8)) == "--num-layers-at-end-in-bf16: layer 4"
    assert selector("model.language_model.layers.3.mlp.up_proj.weight", (8, 8))
    assert not selector("model.language_model.layers.0.mlp.up_proj.weight", (8, 8))
    assert selector("thinker.adapter.layers.0.mlp.up_proj.weight", (8, 8))  # layers of something else are not counted


def test_extra_selectors_are_in_the_same_dialect(checkpoint):
    given = ("*.layers.3.*", "o_proj")
    selector = make_codec(run(rollout="halves", extra_high_precision_layers=given)).selector
    assert not selector("model.layers.3.mlp.up_proj.weight", (8, 8))
    assert not selector("model.layers.1.self_attn.o_proj.weight", (8, 8))
    assert selector("model.layers.1.mlp.up_proj.weight", (8, 8))
    with pytest.raises(ConfigError, match=r"--extra-high-precision-layers-hf: '\*\.layers\.3.* matches none"):
        selector.check({"model.layers.1.self_attn.o_proj.weight": (8, 8)})


def test_ranges_that_leave_nothing_or_cannot_be_counted_are_refused(checkpoint):
    with pytest.raises(ConfigError, match=r"leave none of the model's 5 layers"):
        exclusions(Precision(num_layers_at_start_in_bf16=3, num_layers_at_end_in_bf16=2), checkpoint)
    with pytest.raises(ConfigError, match="does not say how many"):
        exclusions(Precision(num_layers_at_end_in_bf16=2), None)


def test_conversion_leaves_the_same_layers_alone(tmp_path, capsys):
    from miles_testing.tiny import tiny_checkpoint
    from miles_tools.commands.convert import run as convert

    model = tiny_checkpoint("qwen3", tmp_path / "model")
    words = ["--to", "fp8", "--model-dir", str(model), "--dry-run", "--json", "--num-layers-at-end-in-bf16", "1"]
    assert convert([*words, "--extra-high-precision-layers-hf", "o_proj"]) == 0
    exclusions = {t["name"]: t["kept_because"] for t in json.loads(capsys.readouterr().out)["tensors"]}
    assert exclusions["model.layers.0.self_attn.q_proj.weight"] == ""
    assert exclusions["model.layers.0.self_attn.o_proj.weight"] == "--extra-high-precision-layers-hf: o_proj"
    assert exclusions["model.layers.1.self_attn.q_proj.weight"] == "--num-layers-at-end-in-bf16: layer 1"
    with pytest.raises(ConfigError, match="no effect on a checkpoint's conversion"):
        convert([*words, "--warmup-steps", "3"])
