from __future__ import annotations

import runpy
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from miles_core.config import foreign_flags
from miles_core.config.load import load
from miles_core.config.schema import collect
from miles_core.errors import ConfigError
from miles_core.plugin.manifest import Plugin
from miles_tools.foreign import programs


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--moe-capacity-factor", "does not exist here: "),
        ("--rollout_batch_size", "it is spelt --rollout-batch-size"),
        ("--use-kl-loss", "--kl-loss-coef"),
        ("--batch-size", "did you mean"),
        ("--lr-schedule", "did you mean --lr-decay-style (train.lr_schedule in files)?"),
        ("--learning_rate", "--learning_rate, an option of TRL; here: --lr X"),
        ("--report-to", "here: --use-wandb, --use-tensorboard"),
        ("--zzz", "miles train --help lists all flags (the flags of a plugin exist once it is installed)"),
    ],
)
def test_an_unknown_flag_is_explained(flag, says):
    assert says in foreign_flags.explain_flag(flag, collect([]))


def test_a_plugin_says_what_takes_the_place_of_a_flag_that_it_lacks():
    mine = Plugin("mine", "", "1", "~=0.1", foreign_flags={"--mine-model": "give --hf-checkpoint"})
    said = foreign_flags.explain_flag("--mine_model", collect([mine]))
    assert said == "--mine_model does not exist here: give --hf-checkpoint"


def test_an_absent_part_names_the_plugin_that_is_called_like_it(manifests):
    schema = collect(manifests)
    message = foreign_flags.explain_value(schema.find("engine"), "vllm", schema)
    assert message == (
        "engine cannot be 'vllm'; it is one of embedded or server; others come with plugins; "
        "install the package that provides it (usually miles-plugin-NAME)"
    )
    assert "nothing provides one" in foreign_flags.explain_value(collect([]).find("engine"), "vllm", collect([]))
    assert foreign_flags.explain_value(schema.find("engine"), "servr", schema) is None  # the check says: did you mean
    assert foreign_flags.explain_value(schema.find("reward.rm_type"), "nothing", schema) is None


def test_an_absent_plugin_is_explained(manifests):
    schema = collect(manifests)
    assert "pip" not in foreign_flags.explain_plugin(
        "two_words", schema
    )  # somebody else may own a package of that name
    assert "did you mean replay" in foreign_flags.explain_plugin("relpay", schema)
    assert "pip" not in foreign_flags.explain_plugin("no name", schema)
    assert foreign_flags.explain_plugin("replay no", schema).startswith("no plugin 'replay no' is installed")
    separated = foreign_flags.explain_plugin("replay replay", schema)
    assert separated == "no plugin is named 'replay replay'; separate plugins by commas: replay,replay"


def test_the_table_holds_no_flag_that_core_has():
    """An entry for a flag that exists would never be shown."""
    table = tomllib.loads(Path(foreign_flags.__file__).with_suffix(".toml").read_text())
    for spelling in collect([]).spellings():
        for pattern in table["flags"]:
            assert not fnmatchcase(spelling, pattern), (spelling, pattern)


def test_every_flag_that_a_sentence_recommends_exists():
    import re

    table = tomllib.loads(Path(foreign_flags.__file__).with_suffix(".toml").read_text())
    known = {*collect([]).spellings(), *table["flags"]}
    sentences = [*table["flags"].values(), *(text for values in table["values"].values() for text in values.values())]
    for sentence in sentences:
        assert sentence.strip() and not sentence.endswith(".")
        for flag in re.findall(r"--[a-z0-9-]+", sentence):
            assert flag in known, (flag, sentence)


def test_an_option_of_another_program_is_translated():
    given = ["actor_rollout_ref.actor.optim.lr=1e-6", "--num_generations", "4", "word"]
    with pytest.raises(ConfigError, match="3 problems") as raised:
        load(given, manifests=[])
    message = str(raised.value)
    assert "actor_rollout_ref.actor.optim.lr=1e-6 -> --lr 1e-6" in message
    assert "-> --n-samples-per-prompt 4" in message and "not known, and left out:\n  word" in message
    assert message.endswith("miles train --lr 1e-6 --n-samples-per-prompt 4")
    page = Path(__file__).parents[2] / "docs/coming-from.md"
    written = runpy.run_path(str(page.with_name("coming_from.py")))
    assert page.read_text() == written["page"](), "run: python docs/coming_from.py > docs/coming-from.md"


def test_an_option_that_has_another_meaning_here_is_told_apart():
    """There is no hint on the command line, where core's option applies."""
    core = set(collect([]).spellings())
    for program in programs():
        for theirs, here in program.names.items():
            flag = "--" + theirs.lstrip("-").replace("_", "-")
            assert flag not in core or flag in here, theirs


def test_a_variable_that_no_installed_plugin_reads_is_refused():
    names = "OPEN_TRAINING_THING_SIZE", "OPEN_TRAINING_THING_FLAG"
    given = {names[0]: "32", names[1]: "1", "OTHER": "1"}
    said = foreign_flags.explain_environment(given, collect([]))
    assert [line.partition(":")[0] for line in said] == [f"environment variable {n}={given[n]}" for n in names]
    assert said[0].endswith("no installed plugin reads it; install the one it belongs to, or unset it")
    reading = Plugin("thing", "", "1", ">=0", environment=dict.fromkeys(names, "run.profile"))
    assert foreign_flags.explain_environment(given, collect([reading])) == []
    assert foreign_flags.explain_environment({names[1]: "0"}, collect([])) == []
    with pytest.raises(ConfigError, match="OPEN_TRAINING_THING_SIZE=32: no installed plugin reads it"):
        load([], manifests=[], environment={names[0]: "32"})
