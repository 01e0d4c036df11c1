"""What a plan refuses, and how it says so."""

import json
import re

import pytest

from miles_core.plugin import ConfigError, PlanError
from miles_testing import plan

PPO = {"advantage_estimator": "ppo"}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"advantage_estimator": "grpo"}, "advantage estimators without a critic do not read its values"),
        ({**PPO, "critic_trunk": "policy", "trainer": "megatron"}, "only the embedded trainer hands to a value head"),
        ({**PPO, "steps": 3, "num_critic_only_steps": 3}, "at least one step in which the policy learns"),
        ({**PPO, "custom_rm_path": None}, "a critic predicts rewards; give --rm-type NAME"),
    ],
)
def test_refused(options, why):
    options = dict(options)
    if "steps" in options:
        options["num_rollout"] = options.pop("steps")
    with pytest.raises(PlanError) as error:
        plan(["ppo"], **options)
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({"critic_trunk": "policy", "critic_load": "x"}, "ppo.trunk == own"),
        ({"critic_trunk": "policy", "critic_optimizer": "adam"}, "ppo.trunk == own"),
        ({"critic_trunk": "policy", "critic_steps_per_rollout": 2}, "ppo.trunk == own"),
        ({"value_loss_coef": 0.5}, "ppo.trunk == policy"),
        ({"critic_detach_trunk": True}, "ppo.trunk == policy"),
        ({"critic_min_lr": 1e-7}, "ppo.lr_schedule != constant"),
    ],
)
def test_options_without_effect_are_refused(options, needs):
    with pytest.raises(ConfigError, match=f"it needs {needs}"):
        plan(["ppo"], **PPO, **options)


@pytest.mark.parametrize(
    ("table", "options", "why"),
    [
        (
            "{policy: {}, critic: {role: frozen}}",
            {},
            "it has the role frozen, and a critic has to learn the values of policy",
        ),
        ("{a: {}, b: {}, critic_a: {role: train}}", {}, "critic_a"),
        (
            "{a: {}, critic: {role: critic}}",
            {"critic_trunk": "policy"},
            "makes a head on the policy's trunk the critic",
        ),
        ("{a: {}, b: {}, judge: {role: critic}}", {}, "no policy has the critic judge"),
    ],
)
def test_tables_of_policies_that_are_refused(tmp_path, table, options, why):
    (tmp_path / "p.yaml").write_text(f"policies: {table}")
    with pytest.raises(PlanError) as error:
        plan(["ppo"], config=tmp_path / "p.yaml", **PPO, **options)
    assert why in str(error.value)


def test_what_is_accepted(tmp_path):
    (tmp_path / "p.yaml").write_text("policies: {a: {}, value: {role: critic, lr: 0.1}}")
    for options in ({}, {"config": tmp_path / "p.yaml"}, {"critic_trunk": "policy", "value_loss_coef": 0.5}):
        assert "ppo" in plan(**PPO, n_samples_per_prompt=1, **options).order  # the estimator activates the plugin


def test_the_memory_of_the_plan_counts_the_critic(tmp_path):
    """A Qwen3-8B fits an H200 with engine, full-precision state and no critic; with a critic the state alone is 287 GB."""
    shape = {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "head_dim": 128,
    }
    shape |= {"num_key_value_heads": 8, "intermediate_size": 6144, "vocab_size": 150000}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **shape}))
    options = {"hf_checkpoint": tmp_path, "advantage_estimator": "ppo", "device": "cuda"}
    shown = "\n".join(plan(["ppo"], facts=["gpu=B200"], **options).reviews)
    found = {}
    for row in ("rank", "critic"):
        numbers = re.search(rf"trainer, {row} +([0-9. ]+)", shown)[1].split()
        found[row] = [float(x) for x in numbers[:3]]  # weights, gradients, optimizer
    assert found["critic"] == found["rank"] and found["rank"][2] == pytest.approx(3 * found["rank"][1], rel=0.02)
    plain = "\n".join(plan(["ppo"], facts=["gpu=B200"], critic_trunk="policy", **options).reviews)
    assert "trainer, rank" in plain and "trainer, critic" not in plain
    with pytest.raises(PlanError, match="GB on each GPU"):  # 32 GB of each trainer and the engine are more than 80 GB
        plan(["ppo"], facts=["gpu=H100"], **options)
    assert plan(["ppo"], facts=["gpu=H100"], critic_trunk="policy", **options)


@pytest.mark.parametrize("optimizer", ["muon", "adamw8bit", "adamw-offload"])
def test_the_critic_s_optimizer_brings_the_plugin_that_provides_it(optimizer):
    assert "optimizers" in plan(["ppo"], **PPO, critic_optimizer=optimizer).order
    assert "optimizers" not in plan(["ppo"], **PPO, critic_optimizer="adamw").order
