import json

import pytest

from miles_core.errors import ConfigError
from miles_core.observe.environment import Environment, Gpu, find_version
from miles_tools.commands import doctor
from miles_tools.commands.doctor import Requirement, problems_of, requirements, run


def machine(**changes):
    base = {
        "python": "3.11.7",
        "platform": "Linux",
        "processor": "CPU",
        "cpus": 2,
        "memory": 8 << 30,
        "packages": {"torch": "2.13.0+cpu"},
        "gpus": (),
        "no_gpu": "NVML finds no device",
    }
    return Environment(**(base | changes))


def test_requirements_are_those_of_the_distribution():
    rows = {r.name: r for r in requirements()}
    assert {"python", "torch", "transformers", "packaging"} <= rows.keys()
    assert "pytest" not in rows  # an extra
    assert all(r.ok for r in rows.values())


def test_problems_say_what_to_do():
    needs = [Requirement("torch", "2.1.0", ">=2.9", False), Requirement("rich", "", ">=13", False)]
    h200 = Gpu("NVIDIA H200", 90, 141 << 30, 140 << 30, "570")
    wrong, missing, build = problems_of(needs, machine(gpus=(h200,)))
    assert wrong == "torch >=2.9 is needed and 2.1.0 is installed: pip install 'torch>=2.9'"
    assert missing == "rich >=13 is needed and it is not installed: pip install 'rich>=13'"
    assert "torch 2.13.0+cpu is a CPU build" in build
    assert problems_of([], machine()) == []


def test_output_for_people_and_exit_codes(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(
        doctor,
        "plugin_states",
        lambda model: [
            {
                "name": "tis",
                "version": "0.1",
                "summary": "importance sampling",
                "source": "x",
                "state": "usable",
                "why": "",
            },
            {
                "name": "fp9",
                "version": "0.1",
                "summary": "a format",
                "source": "x",
                "state": "not here",
                "why": "needs gpu.sm >= 120",
            },
        ],
    )
    assert run([]) == 0
    out = capsys.readouterr().out
    assert "needs gpu.sm >= 120" in out
    assert "importance sampling" in out
    assert "Everything a run needs is here" in out
    monkeypatch.setattr(doctor, "requirements", lambda: [Requirement("torch", "2.1.0", ">=2.9", False)])
    assert run([]) == 2
    assert "problem: torch >=2.9 is needed and 2.1.0 is installed" in capsys.readouterr().out


def test_slow_imports_are_shown(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(doctor, "plugin_states", lambda model: [])
    for reason in ("", "imports of torch are recompiled on every start"):
        monkeypatch.setattr(doctor, "environment", lambda reason=reason: machine(imports=reason))
        assert run([]) == 0
        out = capsys.readouterr().out
        assert ("recompiled on every start" in out) == bool(reason) and "Everything a run needs is here" in out


def test_json_with_a_model(tmp_path, monkeypatch, capsys):
    import torch
    from safetensors.torch import save_file

    monkeypatch.setattr(doctor, "plugin_states", lambda model: [])
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    save_file({"lm_head.weight": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    assert run(["--model", str(tmp_path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["ok"] is True
    assert content["model"]["parameters"] == 12
    assert content["model"]["training_bytes"]["bfloat16"] == 12 * 18
    assert run(["--model", str(tmp_path)]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("needed", "gpus", "expected"),
    [
        (1 << 30, (), "fits the memory here"),
        (100 << 30, (), "does not fit the memory here"),
        (50 << 30, (1,), "fits one GPU, does not fit the memory here"),
        (300 << 30, (1,), "needs 3 GPUs, sharded, does not fit the memory here"),
    ],
)
def test_where_training_fits(needed, gpus, expected):
    h200 = Gpu("NVIDIA H200", 90, 141 << 30, 140 << 30, "570")
    assert doctor._fits(needed, machine(gpus=tuple(h200 for _ in gpus))) == expected


def test_installed_plugins_have_a_state(capsys):
    from miles_core.plugin.discovery import discover
    from miles_tools.commands import plugins

    rows = doctor.plugin_states(None)
    assert [r["name"] for r in rows] == discover().names
    assert all(r["state"] in ("usable", "not here", "broken") for r in rows)
    assert all(r["why"] for r in rows if r["state"] != "usable")
    for name, package in (
        ("megatron", "megatron-core"),
        ("sglang", "sglang"),
        ("vllm", "vllm"),
    ):  # usable only if a run can select it
        (row,) = [r for r in rows if r["name"] == name]
        assert find_version(package) or (row["state"] == "not here" and "is not installed: pip install" in row["why"])
    # they need options, and nothing of the machine
    assert {"distillation", "offline", "ppo", "tools"} <= {r["name"] for r in rows if r["state"] == "usable"}
    plugins.run(["--json"])  # the two commands agree about what runs here only when it is emulated
    emulated = {r["name"] for r in json.loads(capsys.readouterr().out) if "--emulate-precision" in r["state"]}
    assert emulated == {r["name"] for r in rows if r["why"].startswith("with --emulate-precision")}


def test_memory_by_class_in_a_format(tmp_path, capsys):
    from miles_testing.tiny import tiny_checkpoint

    model = tiny_checkpoint("qwen3_moe", tmp_path / "model", hidden_size=128, moe_intermediate_size=128, head_dim=32)
    assert run(["--model", str(model), "--precision", "fp8", "--json", "--num-layers-at-end-in-bf16", "1"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["memory"]}
    experts = rows["routed experts"]
    weights = 2 * 4 * 3 * 128 * 128  # layers, experts, projections
    assert (experts["tensors"], experts["quantized"], experts["bf16"]) == (24, 12, 2 * weights)
    assert experts["after"] == weights + weights // 2 + 12 * 4  # half stays, half is a byte each and a scale a tile
    assert rows["lm_head"]["quantized"] == rows["embeddings"]["quantized"] == rows["norms"]["quantized"] == 0
    assert rows["routers"]["bf16"] == rows["routers"]["after"] == 2 * 2 * 4 * 128
    total = rows.pop("total")
    assert total["bf16"] == sum(r["bf16"] for r in rows.values())
    assert total["after"] == sum(r["after"] for r in rows.values()) < total["bf16"]
    assert run(["--model", str(model), "--precision", "fp8"]) == 0
    assert "Memory in fp8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"), [(["--precision", "fp8"], "give --model DIR"), (["--lr", "1"], "unknown flag --lr")]
)
def test_options_that_would_do_nothing_are_refused(words, why):
    with pytest.raises(ConfigError, match=why):
        run(words)
