"""Adapters of policies that play each other or teach: populations over one base, past versions, and past students."""

import json

import pytest
import torch
from safetensors.torch import load_file

from miles_coevolution.hooks import LEAGUE
from miles_testing import toy_run
from miles_testing.doubles import remote

OPTIONS = {"lora_target_modules": "all-linear", "lora_rank": 4, "lr": 1e-2, "rollout_batch_size": 12}
NIM = {"generate": "nim", "prompts": "nim", "rm_type": "game", "custom_rm_path": None, "prompt_data": "1-6"}
PAST = "co_evolution: {past_versions: 2, interval: 1}"
POPULATION = "co_evolution: {strategy: simultaneous, population_size: 4, interval: 1}"


@pytest.fixture
def play(tmp_path):
    def play(text, plugins=(), directory="run", **options):
        (tmp_path / "run.yaml").write_text(text)
        options = {**OPTIONS, **NIM, "config": tmp_path / "run.yaml", **options}
        return toy_run(["coevolution", "lora", *plugins], tmp_path / directory, **options)

    return play


def models(part):
    """The models of engine and trainer."""
    return part.engine.model, part.learner.rank.trainer.model


def test_a_population_of_four_evolves_over_one_base(play):
    """One base in memory for engine and trainer of all members, whose adapters are copied and mutated."""
    done = play(POPULATION, lora_sync="adapter", steps=3)
    assert [part.policy.name for part in done.parts] == ["policy", "policy-1", "policy-2", "policy-3"]
    found = [model for part in done.parts for model in models(part)]
    memory = {p.data_ptr(): p.nbytes for model in found for p in model.parameters()}
    base = sum(p.nbytes for name, p in found[0].named_parameters() if "lora_" not in name)
    assert len(found) == 8 and sum(memory.values()) < 1.5 * base
    assert done.metrics[-1]["coevolution/replaced"] == 3
    assert all(record["policy/mismatch/abs_log_prob"] < 1e-5 for record in done.metrics)


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_past_versions_have_adapters(play, sync):
    """The opponent has the adapters of the version that was drawn, in its trainer and in its engine."""
    done = play(PAST, lora_sync=sync, steps=4)
    past = done.parts[1]
    engine, trainer = models(past)
    version = done.run.state[LEAGUE].slots["policy"]
    (file,) = (done.directory / "coevolution" / f"policy-{version:08d}" / "trainer").glob("model*.safetensors")
    kept, own = load_file(file), dict(trainer.named_parameters())
    assert version > 0 and set(kept) == {name for name in own if "lora_" in name}
    assert all(torch.equal(kept[name], own[name]) for name in kept)
    layer = "model.layers.0.self_attn.q_proj"
    a, b = (kept[f"{layer}.lora.lora_{x}"] for x in "AB")
    played = engine.get_submodule(layer)
    assert b.abs().max() > 0
    if sync == "adapter":
        assert torch.equal(played.lora.lora_B, b)
    else:
        expected = own[f"{layer}.weight"] + 4.0 * (b @ a)  # alpha 16, rank 4
        assert torch.allclose(played.weight, expected, atol=1e-6)


def test_a_resumed_run_of_adapters_evolves_bit_for_bit(play, tmp_path):
    options = {"lora_sync": "adapter", "save_interval": 1}
    whole = play(PAST, directory="whole", steps=4, **options).metrics
    play(PAST, directory="parts", steps=2, **options)
    parts = play(PAST, directory="parts", load=tmp_path / "parts", steps=4, **options).metrics
    names = ("train/loss", "train/grad_norm", "coevolution/policy/score", "coevolution/policy/past_age")
    assert [[m[n] for n in names if n in m] for m in whole] == [[m[n] for n in names if n in m] for m in parts]


def test_adapters_in_other_processes_evolve_the_same(play):
    here, there = (
        play(PAST, lora_sync="merged", steps=3, directory=name, plugins=plugins, **options).metrics
        for name, plugins, options in (("here", (), {}), ("there", (remote.__file__,), {"runtime": "remote"}))
    )
    assert [m["train/loss"] for m in here] == [m["train/loss"] for m in there]


def test_a_past_student_with_adapters_teaches(tmp_path):
    """The first teacher is the student, so the first divergence is 0; after each refresh it is 0 again."""
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"policies": {"student": {}, "teacher": {"role": "frozen"}}}))
    options = {**OPTIONS, "config": file, "distillation_refresh_interval": 2, "steps": 5}
    done = toy_run(["distillation", "lora"], tmp_path / "run", **options)
    gaps = [abs(record["distillation/reverse_kl"]) for record in done.metrics]
    assert max(gaps[0], gaps[2], gaps[4]) < 1e-5 < 1e-4 < min(gaps[1], gaps[3])
