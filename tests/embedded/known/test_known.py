"""The table of known families against Transformers: the weights it derives, and what it leaves to Transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.errors import CheckpointError
from miles_embedded import known
from miles_embedded.known.entries import Unknown
from miles_embedded.known.families import FAMILIES
from miles_embedded.known.weights import known_weights, shapes_of
from miles_embedded.model.examine import examine_checkpoint
from miles_embedded.testing.families import family_checkpoint

PUBLISHED = sorted((Path(__file__).parents[2] / "published").glob("*.json"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Returns a function: family -> directory of a tiny checkpoint that Transformers wrote."""
    root = tmp_path_factory.mktemp("families")

    def make(family):
        return root / family if (root / family).is_dir() else family_checkpoint(family, root / family)

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_has_the_weights_that_transformers_writes(family, checkpoint):
    directory = checkpoint(family)
    stored = known_weights(directory)  # compares with the files
    assert len(stored) > 10 and stored == shapes_of(json.loads((directory / "config.json").read_text()))


def test_a_model_with_a_tower_is_known_in_the_published_form(checkpoint):
    """Qwen2.5-VL was published with the entries of its language model at the top level."""
    config = json.loads((checkpoint("qwen2_5_vl") / "config.json").read_text())
    text = {
        name: value for name, value in config["text_config"].items() if name not in ("model_type", "rope_parameters")
    }
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    old = {n: v for n, v in config.items() if n != "text_config"} | text | {"rope_scaling": rope, "rope_theta": 1e4}
    assert shapes_of(old) == shapes_of(config)
    for change in ({"mrope_section": [1, 1, 1]}, {"mrope_section": None}):
        with pytest.raises(Unknown, match="mrope_section"):
            shapes_of({**old, "rope_scaling": {**rope, **change}})
    with pytest.raises(Unknown, match="vision_config has surprise = 1"):
        shapes_of({**config, "vision_config": {**config["vision_config"], "surprise": 1}})


@pytest.mark.parametrize("path", [p for p in PUBLISHED if "kimi" not in p.name], ids=lambda p: p.stem)
def test_published_configurations_are_known(path):
    assert len(shapes_of(json.loads(path.read_text(encoding="utf-8")))) > 100


def write(directory, config):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


CHANGES = [
    ("num_attention_heads", 3), ("num_attention_heads", 0), ("num_key_value_heads", 3), ("head_dim", 7), ("head_dim", -8),
    ("hidden_size", "32"), ("hidden_size", None), ("hidden_act", "swoosh"), ("rms_norm_eps", -1.0), ("rope_theta", 0),
    ("rope_scaling", {"rope_type": "yarn"}), ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}), ("rope_parameters", []),
    ("rope_scaling", {"type": "su", "factor": 2.0}), ("layer_types", ["full_attention"]), ("layer_types", ["linear", "linear"]),
    ("num_experts_per_tok", 99), ("n_group", 3), ("topk_group", 5), ("first_k_dense_replace", -1), ("num_local_experts", 0),
    ("vocab_size", 2.5), ("num_hidden_layers", True), ("sliding_window", "8"), ("attention_bias", "yes"), ("qk_rope_head_dim", 5),
    ("partial_rotary_factor", 0.3), ("dtype", 5), ("max_position_embeddings", -5), ("mlp_only_layers", "0"), ("new_entry", 1),
]  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "gemma2", "qwen2_5_vl"])
def test_what_transformers_refuses_is_not_known(family, checkpoint, tmp_path):
    """Whatever the table accepts must be accepted by Transformers, too."""
    good = json.loads((checkpoint(family) / "config.json").read_text())
    accepted = 0
    for number, (name, value) in enumerate(CHANGES):
        if name not in good and name not in FAMILIES[family].entries and name not in ("new_entry", "rope_scaling"):
            continue
        directory = write(tmp_path / str(number), {**good, name: value})
        try:
            known_weights(directory)
        except Unknown:
            continue
        accepted += 1
        examine_checkpoint(directory, weights=False)
    assert accepted < 3, "nearly all of these values are impossible"


def test_other_weight_files_are_not_known(checkpoint, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    source = checkpoint("qwen3")
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    name = "model.layers.0.mlp.up_proj.weight"
    for number, changed in enumerate(
        [
            {**tensors, "model.extra.weight": torch.zeros(2)},
            {n: t for n, t in tensors.items() if n != name},
            {**tensors, name: tensors[name].T.contiguous()},
        ]
    ):
        directory = write(tmp_path / str(number), config)
        save_file(changed, directory / "model.safetensors")
        with pytest.raises(Unknown, match="weight"):
            known_weights(directory)
    (write(tmp_path / "cut", config) / "model.safetensors").write_bytes(b"12345")
    with pytest.raises(Unknown, match="truncated"):
        known_weights(tmp_path / "cut")


def run_examine(directory, **config):
    """Examine a model in a process of its own; returns its standard error and the imported packages."""
    code = (
        "import sys, types; from miles_embedded.known import examine\n"
        "model = types.SimpleNamespace(ref_load=None, hf_checkpoint=sys.argv[1], trust_remote_code=False)\n"
        "rollout = types.SimpleNamespace(max_context_len=None)\n"
        "try: examine(types.SimpleNamespace(model=model, rollout=rollout), False)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True, timeout=120)
    return done.stdout, done.stderr


def test_a_known_model_is_examined_without_torch(checkpoint):
    assert run_examine(checkpoint("qwen3")) == ("[]\n", "")


def test_an_unknown_entry_is_left_to_transformers_in_one_line(checkpoint, tmp_path):
    config = json.loads((checkpoint("qwen3") / "config.json").read_text())
    out, err = run_examine(write(tmp_path / "odd", {**config, "num_attention_heads": 3, "num_key_value_heads": 2}))
    assert "CheckpointError" in out and "transformers" in out
    assert "importing transformers to build the model" in err and "3 heads are not a multiple of 2" in err


def test_a_run_builds_the_model_always(checkpoint, monkeypatch):
    built = []
    monkeypatch.setattr("miles_embedded.model.examine.examine", lambda config, weights: built.append(weights))
    options = type("Options", (), {"ref_load": None, "hf_checkpoint": str(checkpoint("qwen3"))})
    known.examine(type("Config", (), {"model": options}), True)
    assert built == [True]


def test_a_directory_without_config_is_refused_as_before(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        examine_checkpoint(tmp_path, weights=False)
    with pytest.raises(Unknown, match=r"no config\.json"):
        known_weights(tmp_path)
