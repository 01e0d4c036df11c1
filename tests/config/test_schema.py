from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest

from miles_core.config.schema import collect
from miles_core.errors import PluginError
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.options import option


def make(name: str, config: type | None = None, **fields: object) -> Plugin:
    return Plugin(name=name, summary="", version="1", core=">=0", config=config, **fields)


def options(**fields: object) -> type:
    """A config dataclass with these annotated options."""
    return dataclasses.make_dataclass("Options", [(name, kind, value) for name, (kind, value) in fields.items()])


def test_types_are_understood():
    found = collect([])
    assert found.find("train.global_batch_size").inner is int and found.find("train.global_batch_size").optional
    assert found.find("run.save").inner is Path
    assert found.find("rollout.stop").is_list and found.find("data.shuffle").is_bool
    assert found.find("algorithm.kl_loss_type").choices == ("k1", "k2", "k3", "low_var_kl")
    assert found.find("engine") is found.find("run.engine")
    assert found.find("nope") is None


def test_names_that_plugins_add_become_choices():
    found = collect([make("s", provides={"engine": {"server": "m:f"}}, formats={"small": "m:F"})])
    assert found.find("engine").choices == ("server",)
    assert found.find("train.precision").choices == ("bf16", "small")
    assert found.find("engine").providers == {"server": ("s",)}


def test_a_flag_declared_alike_appears_once():
    one = options(size=(int, option(1, help="a size", choices=(1, 2))))
    two = options(size=(int, option(1, help="a size", choices=(1, 3))))
    flag = collect([make("one", one), make("two", two)]).flags["--size"]
    assert flag.owners == ("one", "two")
    assert {o.choices for o in flag.options} == {(1, 2, 3)}


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ((str, option("1", help="a size")), "type"),
        ((int, option(2, help="a size")), "default"),
        ((int, option(1, help="another")), "help"),
    ],
)
def test_a_flag_declared_differently_is_a_conflict_that_names_both(other, what):
    plugins = [make("one", options(size=(int, option(1, help="a size")))), make("two", options(size=other))]
    with pytest.raises(PluginError, match=f"--size is declared by one .* and by two .* with different {what}"):
        collect(plugins)


def test_one_owner_may_not_declare_a_flag_twice():
    group = options(a=(int, option(1, flag="--x", help="h")), b=(int, option(1, flag="--x", help="h")))
    with pytest.raises(PluginError, match="--x"):
        collect([make("one", group)])


def test_aliases_environment_and_prefixes_have_one_owner():
    values = {"rollout.precision": "bf16"}
    for field, key in (("aliases", "--lr"), ("aliases", "--fast"), ("environment", "FAST"), ("passthrough", "--f-")):
        value = {"aliases": values, "environment": "train.lr", "passthrough": "one"}[field]
        plugins = [make("one", **{field: {key: value}}), make("two", **{field: {key: value}})]
        with pytest.raises(PluginError, match=key):
            collect(plugins)


def test_an_option_alias_may_not_hide_a_flag():
    group = options(a=(int, option(1, help="h", aliases=("--lr",))))
    with pytest.raises(PluginError, match="--lr is declared by"):
        collect([make("one", group)])


def test_references_to_options_nobody_has_name_the_plugin():
    with pytest.raises(
        PluginError, match=r"one: its alias --a sets rollout\.precison.*did you mean rollout\.precision"
    ):
        collect([make("one", aliases={"--a": {"rollout.precison": "x"}})])
    with pytest.raises(PluginError, match="one: its environment variable A"):
        collect([make("one", environment={"A": "no.such"})])


def test_a_plugin_may_not_take_a_core_table():
    with pytest.raises(PluginError, match="rollout"):
        collect([make("rollout")])


def test_a_field_that_is_no_option_and_one_without_default():
    @dataclass
    class Plain:
        size: int = 1

    @dataclass
    class Needed:
        size: int = option(help="a size")

    with pytest.raises(PluginError, match="not made with"):
        collect([make("one", Plain)])
    with pytest.raises(PluginError, match="no default"):
        collect([make("one", Needed)])


def test_the_longest_pass_through_prefix_wins():
    found = collect([make("a", passthrough={"--a-": "a"}), make("ab", passthrough={"--a-b-": "ab"})])
    assert found.passthrough_of("--a-b-c-d") == ("ab", "c_d")
    assert found.passthrough_of("--a-c") == ("a", "c")
    assert found.passthrough_of("--a-") is None


def test_cores_own_manifest_adds_nothing():
    assert (
        collect([make("core", provides={"engine": {"embedded": "m:f"}})]).options.keys() == collect([]).options.keys()
    )
