from __future__ import annotations

import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles_core.config.load import load
from miles_core.errors import ConfigError

TEXT = st.text(alphabet=string.ascii_letters + string.digits + " .,:#'\"-[]{}é\n", min_size=1, max_size=12)
NAMES = TEXT.map(str.strip).filter(lambda t: t and t.lower() != "none" and not t.startswith("-"))
ITEMS = st.lists(st.text(alphabet="ab ,:[\"'#\n", min_size=1, max_size=5), min_size=1, max_size=3)
FLOATS = st.floats(min_value=1e-12, max_value=1, exclude_min=True)


@st.composite
def command_lines(draw) -> list[str]:
    import json

    words = []
    options = {
        "--lr": FLOATS.map(repr),
        "--rollout-top-p": FLOATS.map(repr),
        "--rollout-top-k": st.integers(-1, 50).map(str),
        "--rollout-stop": ITEMS.map(json.dumps),
        "--rollout-stop-token-ids": st.lists(st.integers(0, 9), min_size=1).map(lambda v: ",".join(map(str, v))),
        "--label-key": NAMES,
        "--save": NAMES,
        "--plugins": st.sampled_from(["replay", "small,replay", "weights,server"]),
        "--loss-aggregation": st.sampled_from(["token_mean", "rollout_mean"]),
    }
    for flag, values in options.items():
        if draw(st.booleans()):
            words.append(f"{flag}={draw(values)}")
    words += draw(
        st.lists(st.sampled_from(["--use-replay", "--rollout-small", "--no-profile", "--rollout-shuffle"]), unique=True)
    )
    if draw(st.booleans()):
        words += [
            "--engine",
            "server",
            "--server-anything",
            draw(st.sampled_from(["1", "x", "[1, 2]", "1e-5", "true"])),
        ]
    return words


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(command_lines())
def test_the_saved_configuration_reads_back_equal(manifests, tmp_path, words):
    config = load(words, manifests=manifests, environment={})
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    again = load(["--config", str(path)], manifests=manifests, environment={})
    assert again == config
    assert again.to_dict() == config.to_dict()
    for option in config.schema.options:
        assert again.is_set(option) == config.is_set(option) or option == "run.plugins"


def test_equality_sees_a_difference(loaded):
    assert loaded("--lr", "1") == loaded("--lr", "1.0")
    assert loaded("--lr", "1") != loaded("--lr", "2")
    assert loaded("--plugins", "replay") != loaded()
    assert loaded() != "something else"


def test_a_saved_default_is_nobodys_choice_and_weaker_than_choices(loaded, written):
    path = written(loaded("--lr", "3").to_yaml())
    again = loaded("--config", path, "--rollout-top-k", "5")
    assert again.is_set("train.lr") and not again.is_set("train.min_lr")
    assert again.origin("train.min_lr").startswith("default, saved in ")
    assert again.rollout.top_k == 5


def test_a_saved_default_does_not_enable_or_refuse(loaded, written):
    path = written("defaults: {weights: {threshold: 2}}")
    assert loaded("--config", path).plugins == ()


def test_replace_keeps_the_origin_and_is_not_the_users_choice(loaded):
    before = loaded("--lr", "1")
    after = before.replace({"rollout.top_k": 5, "engine": "embedded", "server.verbose": True}, origin="set by replay")
    assert (after.rollout.top_k, before.rollout.top_k) == (5, -1)
    assert after.origin("rollout.top_k") == "set by replay" and not after.is_set("rollout.top_k")
    assert after.origin("engine") == "set by replay"
    assert after.passthrough("server") == {"verbose": True} and before.passthrough("server") == {}
    assert after.train.lr == 1


def test_replace_checks_names_and_values(loaded):
    with pytest.raises(ConfigError, match=r"rollout\.temprature; did you mean rollout\.temperature"):
        loaded().replace({"rollout.temprature": 1})
    with pytest.raises(ConfigError, match=r"set by x: rollout\.top_p cannot be 7"):
        loaded().replace({"rollout.top_p": 7}, origin="set by x")


def test_activated_adds_required_plugins(loaded):
    config = loaded("--plugins", "fan", "--weights-threshold", "2")
    active = config.with_plugins(["fan", "weights"])
    assert active.plugins == ("fan", "weights") and active.requested == {"fan": "--plugins"}
    assert active.args.weights_threshold == 2


def test_facts_carry_value_origin_flag_choices_and_choice(loaded):
    config = loaded("--plugins", "replay", "--rollout-stop", "a,b", "--engine", "server", "--server-x", "1")
    facts = {fact.name: fact for fact in config.facts()}
    assert facts["engine"].value == "server" and facts["engine"].origin == "--engine server" and facts["engine"].chosen
    assert facts["engine"].choices == ("embedded", "server") and facts["engine"].flag == "--engine"
    assert facts["rollout.precision"].choices == ("bf16", "small", "tiny") and not facts["rollout.precision"].chosen
    assert facts["rollout.stop"].value == "a,b"
    assert facts["data.shuffle"].choices == (False, True)
    assert facts["replay.buffer_size"].value == 1024
    assert facts["server.x"].value == 1 and facts["server.x"].flag == "--server-x"
    assert "run.engine" not in facts


def test_args_is_flat_and_holds_enabled_plugins_only(loaded):
    args = loaded("--plugins", "replay", "--rollout-temperature", "0.5").args
    assert args.rollout_temperature == 0.5 and args.lr == 1e-6 and args.replay_buffer_size == 1024
    assert not hasattr(args, "weights_threshold")


def test_reading_a_value_by_path(loaded):
    config = loaded("--engine", "server", "--server-x", "y")
    assert config.get("engine") == config.get("run.engine") == "server"
    assert config.get("server.x") == "y"
    assert config.group("rollout") is config.rollout
    assert config.replay is config.plugin("replay")
    with pytest.raises(AttributeError, match="no table 'replya'; did you mean replay"):
        _ = config.replya
    with pytest.raises(ConfigError, match=r"there is no option rollout\.tempratur"):
        config.get("rollout.tempratur")
    with pytest.raises(KeyError, match="did you mean rollout"):
        config.group("rolout")


def test_a_configuration_survives_copying_and_pickling(loaded):
    import copy
    import pickle

    config = loaded("--plugins", "weights", "--weights-threshold", "2")
    assert copy.copy(config) == copy.deepcopy(config) == config
    core = loaded("--lr", "2")
    assert core.train == pickle.loads(pickle.dumps(core.train))


def test_a_plugin_may_not_hide_an_attribute_of_the_configuration(manifests):
    import dataclasses

    from miles_core.errors import PluginError

    taken = dataclasses.replace(manifests[1], name="schema")
    with pytest.raises(PluginError, match="may not be called 'schema'"):
        load([], manifests=[taken])
