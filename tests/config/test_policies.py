"""The table ``policies`` of a configuration file."""

from __future__ import annotations

import pytest

from miles_core.config.load import load, loads
from miles_core.errors import ConfigError


def loaded(tmp_path, text, *words):
    (tmp_path / "run.yaml").write_text(text)
    return load(["--config", str(tmp_path / "run.yaml"), *words], manifests={})


TWO = """
train: {lr: 3e-6}
policies:
  solver: {hf_checkpoint: a, lr: 1.0e-6, rollout: {temperature: 0.5}, rollout-max-response-len: 7}
  judge: {hf_checkpoint: b, role: frozen, generates: true, train: {precision: bf16}}
  third:
"""


def test_options_of_a_policy_take_the_place_of_the_runs(tmp_path):
    config = loaded(tmp_path, TWO)
    solver, judge, third = (config.for_policy(name) for name in ("solver", "judge", "third"))
    assert list(config.policies) == ["solver", "judge", "third"]
    assert [c.train.lr for c in (config, solver, judge, third)] == [3e-6, 1e-6, 3e-6, 3e-6]
    assert (solver.rollout.temperature, solver.rollout.max_response_len, judge.rollout.temperature) == (0.5, 7, 1.0)
    assert [c.model.hf_checkpoint for c in (config, solver, judge, third)] == ["a", "a", "b", "a"]
    assert config.policies["judge"]["role"] == "frozen" and config.policies["judge"]["generates"] is True
    facts = {f.name: f.value for f in config.facts()}
    assert facts["policies.solver.train.lr"] == 1e-6 and facts["policies.third.role"] == "train"


def test_a_configuration_with_policies_is_read_back_equal(tmp_path):
    config = loaded(tmp_path, TWO)
    assert loads(config.to_yaml(), {}) == config
    assert config.with_plugins(()).policies == config.policies == config.replace({"train.lr": 1.0}).policies


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policies: {a: {lrr: 1}}", r"line 1: unknown key lrr; did you mean --lr.*of the policy a"),
        ("policies: {a: {train: {lrr: 1}}}", r"the table train has no key 'lrr'.*of the policy a"),
        ("policies: {a: {lr: fast}}", "'fast'"),
        ("policies: {a: {num_rollout: 3}}", "rollout.num_rollout belongs to the whole run"),
        ("policies: {a: {role: critics}}", "role 'critics'; it is one of train, critic, frozen; did you mean critic"),
        ("policies: {a: {generates: 3}}", "generates is 3"),
        ("policies: {a/x: {lr: 1}}", "'a/x' cannot be the name of a policy"),
        ("policies: [a]", "policies is a table of tables"),
        ("policies: {a: 3}", "policies is a table of tables"),
    ],
)
def test_what_a_policy_cannot_have(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, text)


def test_a_policy_that_a_plugin_adds_has_options_too(tmp_path):
    config = loaded(tmp_path, "train: {lr: 2.0e-6}")
    own = config.for_policy("critic", {"lr": 1e-3, "train.clip_grad": 0.5}, "elsewhere")
    assert (own.train.lr, own.train.clip_grad, own.model.hf_checkpoint) == (1e-3, 0.5, "elsewhere")
    with pytest.raises(ConfigError, match=r"policies.critic: a policy has no option 'lrr'; did you mean lr"):
        config.for_policy("critic", {"lrr": 1})


def test_whether_a_policy_generates_is_a_fact(tmp_path):
    facts = {
        fact.name: fact.value
        for fact in loaded(tmp_path, "policies: {a: {}, b: {role: frozen}, c: {role: frozen, generates: true}}").facts()
    }
    assert [facts[f"policies.{name}.generates"] for name in "abc"] == [True, False, True]
