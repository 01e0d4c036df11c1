"""``miles verify --exact`` names the first module whose outputs differ between engine and trainer."""

import json
from types import SimpleNamespace

import pytest

from miles_core.cli.main import main
from miles_core.errors import ConfigError
from miles_testing.devices import DEVICES
from miles_testing.toy import toy_files
from miles_tools.verify.layers import find_models

#: One module of the trainer's model returns a row that differs in its last bits.
PLANTED = """
from miles_core.plugin import hookimpl

@hookimpl
def on_model(model, role):
    if role == "train":
        module = model.get_submodule("model.layers.1.self_attn.k_proj")
        module.register_forward_hook(lambda module, args, output: output * (1 + 2 ** -22))
"""


@pytest.fixture(params=DEVICES)
def verify(tmp_path, capsys, request):
    def call(*words):
        model = toy_files("qwen3") / "model"
        given = ["--hf-checkpoint", str(model), "--save", str(tmp_path / "out"), "--no-self-check"]
        given += [
            "--device",
            request.param,
            "--dtype",
            "float32",
        ]  # the planted difference is smaller than a place of BF16
        if request.param == "cuda":
            given.append("--embedded-disable-cuda-graph")  # graphs run no module, and the command refuses them
        code = main(["verify", "--exact", "--json", *given, *words])
        return code, json.loads(capsys.readouterr().out)["policies"][0], (tmp_path / "out" / "verify.html").read_text()

    return call


def test_both_sides_are_bit_identical_with_the_plugin(verify):
    code, found, page = verify("--plugins", "true_on_policy")
    modules = {module["name"]: module for module in found["layers"]["modules"]}
    assert code == 0 and found["layers"]["first"] is None and found["gap"]["max_abs"] == 0
    assert {"model.layers.0", "model.layers.1.mlp.down_proj", "model.norm", "lm_head"} <= modules.keys()
    for module in modules.values():
        assert module["engine"] == module["trainer"] and module["rows"] > 1
    assert "modules are bit-identical on both sides" in page


def test_a_planted_difference_is_named(verify, tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text(PLANTED)
    code, found, page = verify("--plugins", f"true_on_policy,{planted}")
    first = next(module for module in found["layers"]["modules"] if module["differing"])
    assert code == 1 and found["layers"]["first"] == first["name"] == "model.layers.1.self_attn.k_proj"
    assert first["engine"] != first["trainer"] and first["differing"] > first["rows"] // 2
    assert "model.layers.1.self_attn.k_proj is the first module whose outputs differ" in page


def test_without_the_plugin_the_first_product_differs(verify):
    code, found, _ = verify()
    assert code == 1 and found["layers"]["first"].startswith("model.layers.0.")


def test_an_engine_in_another_process_is_refused():
    with pytest.raises(ConfigError, match="needs them in this process: give --engine embedded --trainer embedded"):
        find_models(SimpleNamespace(learner=None, serving=None))
