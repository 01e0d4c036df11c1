from __future__ import annotations

from dataclasses import make_dataclass, replace

import pytest

from miles_core.config.load import load
from miles_core.errors import ConfigError, PlanError
from miles_core.plugin.manifest import Rule
from miles_core.plugin.options import option
from miles_core.run.prepare import apply_plan, prepare


def refused(loaded, *argv, **environment) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(*argv, **environment)
    return str(caught.value)


def test_flags_win_over_later_files_over_earlier_files_over_environment_over_defaults(loaded, written):
    first = written("rollout: {batch_size: 1, top_k: 1, temperature: 0.1}\nsmall: {group_size: 1}", "first.yaml")
    second = written("rollout: {batch_size: 2, top_k: 2}", "second.yaml")
    config = loaded(
        "--plugins", "small", "--rollout-top-k", "3", "--config", first, "--config", second, SMALL_GROUP_SIZE="9"
    )
    assert (config.rollout.batch_size, config.rollout.top_k, config.rollout.temperature) == (2, 3, 0.1)
    assert config.plugin("small").group_size == 1
    assert config.rollout.top_p == 1.0
    assert loaded("--plugins", "small", SMALL_GROUP_SIZE="9").plugin("small").group_size == 9


def test_every_value_says_where_it_came_from(loaded, written):
    path = written("# a comment\nrollout:\n  batch_size: 4\n")
    config = loaded("--config", path, "--lr", "1e-4", "--plugins", "small", SMALL_GROUP_SIZE="64")
    assert config.origin("rollout.batch_size") == f"{path} line 3"
    assert config.origin("train.lr") == "--lr 1e-4"
    assert config.origin("small.group_size") == "environment variable SMALL_GROUP_SIZE=64"
    assert config.origin("rollout.top_p") == "default"
    assert config.is_set("train.lr") and not config.is_set("rollout.top_p")


def test_everything_wrong_is_reported_at_once(loaded, written):
    path = written("rollout:\n  batch_sze: 4\n")
    message = refused(loaded, "--config", path, "--lr", "fast", "--no-such-thing", "1", "--plugins", "wieghts")
    assert message.startswith("4 problems")
    for part in ("batch_sze", "'fast'", "--no-such-thing", "did you mean weights"):
        assert part in message


def test_two_flags_that_contradict_each_other_are_refused(loaded):
    message = refused(loaded, "--rollout-small", "--rollout-tiny")
    assert "rollout.precision is given twice: small (--rollout-small) and tiny (--rollout-tiny)" in message


def test_the_same_flag_twice_is_an_override(loaded):
    assert loaded("--lr", "1", "--lr", "2").train.lr == 2
    assert loaded("--rollout-shuffle", "--no-rollout-shuffle").data.shuffle is False


def test_a_file_that_contradicts_itself_is_refused(loaded, written):
    path = written("lr: 1\ntrain: {lr: 2}")
    assert "given twice: 1.0" in refused(loaded, "--config", path)


def test_an_enabling_flag_enables_its_plugin(loaded):
    for flag in ("--use-replay", "--use-routing-replay"):
        config = loaded(flag, "--replay-buffer-size", "7")
        assert config.plugins == ("replay",)
        assert config.requested == {"replay": flag}
        assert config.plugin("replay").buffer_size == 7


def test_a_flag_or_file_key_of_one_installed_plugin_enables_it(loaded, written):
    config = loaded("--plugins", "replay", "--weights-threshold", "2")
    assert config.plugins == ("replay", "weights") and config.requested["weights"] == "--weights-threshold 2"
    path = written("weights:\n  threshold: 2\n")
    assert loaded("--config", path).requested == {"weights": f"{path} line 2"}


def test_a_variable_of_a_plugin_that_is_not_enabled_is_refused(loaded):
    message = refused(loaded, SMALL_GROUP_SIZE="3")
    assert "environment variable SMALL_GROUP_SIZE=3" in message and "add --plugins small or unset it" in message


def test_a_flag_of_a_required_plugin_is_accepted(loaded):
    assert loaded("--plugins", "fan", "--weights-threshold", "2").plugin("weights").threshold == 2


def test_a_flag_of_each_of_several_required_plugins_is_accepted(manifests):
    rule = Rule("plugin.replay and plugin.weights", "it replays and reweights")
    manifests = [replace(m, requires=(rule,)) if m.name == "fan" else m for m in manifests]
    config = load(["--plugins", "fan", "--weights-threshold", "2"], manifests=manifests, environment={})
    assert config.plugins == ("fan",), "the flag does not request a plugin that the rule requires"


def test_a_flag_of_the_backend_that_is_in_force_by_default_is_accepted(loaded):
    assert loaded("--sharding-strategy", "no_shard").embedded.sharding_strategy == "no_shard"


def test_zero_is_a_value_that_enables(loaded):
    config = loaded("--replay-rate", "0")
    assert config.requested == {"replay": "--replay-rate 0"} and config.plugin("replay").rate == 0.0
    assert loaded("--replay-bias", "0").plugins == (), "the default is no change"


def test_disabling_flags_do_not_enable(loaded):
    config = loaded("--no-use-replay")
    plan, _ = prepare(config, (), config.schema.manifests)
    assert config.plugins == () and apply_plan(config, plan).replay.use_replay is False


def test_an_option_of_a_plugin_that_is_required_in_other_runs_only_is_refused(manifests):
    """The configuration accepts it, because the requirement depends on facts that the plan decides."""
    rule = Rule("plugin.weights", "it reweights", when="model.moe")
    manifests = [replace(m, requires=(rule,)) if m.name == "fan" else m for m in manifests]
    config = load(["--plugins", "fan", "--weights-threshold", "2"], manifests=manifests, environment={})
    with pytest.raises(PlanError, match=r"--weights-threshold 2 needs plugin\.weights"):
        prepare(config, ["model.moe=false"], config.schema.manifests)


def test_naming_a_part_enables_the_plugin_that_provides_it(loaded):
    config = loaded("--plugins", "weights", "--engine", "server", "--rollout-small")
    assert config.plugins == ("weights", "server", "small")
    assert config.requested == {"weights": "--plugins"} and config.run.plugins == ("weights",), (
        "the plan adds the others"
    )


def test_a_part_with_two_providers_needs_a_choice(manifests):
    import dataclasses

    twin = dataclasses.replace(manifests[-1], name="twin", config=None, passthrough={})
    with pytest.raises(ConfigError, match="server or twin provide it; name one of them in --plugins"):
        load(["--engine", "server"], manifests=[*manifests, twin], environment={})
    assert load(["--engine", "server", "--plugins", "twin"], manifests=[*manifests, twin]).plugins == ("twin",)


def test_a_shared_flag_sets_every_owner_and_merges_choices(loaded):
    config = loaded("--plugins", "tiny", "--small-recipe", "micro")
    assert config.plugin("tiny").recipe == config.plugin("small").recipe == "micro"
    assert "block or micro" in refused(loaded, "--plugins", "tiny", "--small-recipe", "nano")


def test_pass_through_flags_reach_their_table_and_leave_declared_ones_alone(loaded):
    config = loaded(
        "--engine",
        "server",
        "--server-mem-fraction",
        "0.5",
        "--server-fast",
        "--lr",
        "2",
        "--server-port",
        "8",
        "--server-name=x",
    )
    assert config.passthrough("server") == {"mem_fraction": 0.5, "fast": True, "name": "x"}
    assert config.plugin("server").port == 8 and config.train.lr == 2
    assert config.origin("server.mem_fraction") == "--server-mem-fraction 0.5"


def test_a_flag_of_a_backend_selects_it_unless_another_one_was_selected(loaded):
    config = loaded("--server-mem-fraction", "0.5")
    assert config.get("run.engine") == "server" and config.plugins == ("server",)
    assert config.origin("run.engine") == "selected by --server-mem-fraction 0.5"
    assert "--engine server" in refused(loaded, "--engine", "embedded", "--server-mem-fraction", "0.5")


def test_a_flag_of_several_plugins_enables_the_one_that_it_names_else_the_feature(manifests):
    """``--server-drafts`` is an option of the engine and of a feature that offers it on every engine."""
    drafts = option(0, flag="--server-drafts", help="drafts")
    both = [make_dataclass("Options", [("drafts", int, drafts)], frozen=True, kw_only=True) for _ in range(2)]
    manifests = [
        *manifests[:-1],
        replace(manifests[-1], config=both[0], passthrough={}),
        replace(manifests[1], name="draft", config=both[1]),
    ]

    def loaded(*argv):
        config = load([*argv, "--server-drafts", "2"], manifests=manifests, environment={})
        return config.get("run.engine"), config.plugins

    assert loaded() == ("server", ("server",))
    assert loaded("--engine", "embedded") == ("embedded", ("draft",))
    assert loaded("--plugins", "draft") == ("embedded", ("draft",))


def test_pass_through_keys_in_a_file(loaded, written):
    path = written("engine: server\nserver: {mem_fraction: 0.5, port: 3, nested: {a: [1]}}")
    config = loaded("--config", path)
    assert config.passthrough("server") == {"mem_fraction": 0.5, "nested": {"a": [1]}}
    assert config.plugin("server").port == 3


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--lr"], "--lr needs a value"),
        (["--lr", "-1"], "train.lr cannot be -1; it must be >= 0"),
        (["--lr", "nan"], "finite"),
        (["--rollout-batch-size", "2.5"], "'2.5'; it must be a whole number >= 1"),
        (["--rollout-top-p", "0"], "> 0, <= 1"),
        (["--rollout-top-k", "-2"], ">= -1"),
        (["--kl-loss-type", "k9"], "one of k1, k2, k3 or low_var_kl"),
        (["--engine", "embeded"], "did you mean embedded"),
        (["--rollout-shuffle=1"], "write --rollout-shuffle or --no-rollout-shuffle"),
        (["--rollout-stop-token-ids", "1,x"], "'1,x'"),
        (["stray"], "unexpected argument 'stray'"),
        (["--eval-interval", "1", "--eval-prompt-data", "a.jsonl", "b.jsonl"], "separated by commas"),
    ],
)
def test_a_wrong_value_is_one_sentence(loaded, argv, says):
    sentence = refused(loaded, *argv).split("\n\nthe complete command line:\n")[0]
    assert says in sentence and "\n" not in sentence


def test_ppo_is_answered_with_what_to_use(loaded):
    message = refused(loaded, "--advantage-estimator", "ppo")
    assert "needs a critic" in message and "reinforce_plus_plus" in message


def test_values_of_every_kind(loaded):
    config = loaded(
        "--rollout-stop", "a,b", "--rollout-stop", '["c,d"]', "--rollout-stop-token-ids", "1,2", "--save", "runs/x",
        "--eps-clip-high", "none", "--no-profile", "--min-lr=1e-7", "--lr-decay-style", "cosine",
        "--rollout-top-k", "-1",
    )  # fmt: skip
    assert config.rollout.stop == ("a", "b", "c,d")
    assert config.rollout.stop_token_ids == (1, 2)
    assert str(config.run.save) == "runs/x"
    assert config.algorithm.eps_clip_high is None and config.run.profile is False
    assert config.train.min_lr == 1e-7 and config.rollout.top_k == -1


def test_the_moe_spelling_of_the_auxiliary_loss(loaded):
    assert loaded("--moe-aux-loss-coeff", "0.1").train.aux_loss_coef == 0.1
