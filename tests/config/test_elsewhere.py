from __future__ import annotations

import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from miles_core.config import elsewhere
from miles_core.config.load import load
from miles_core.config.schema import collect
from miles_core.errors import ConfigError
from miles_core.plugin.manifest import Plugin


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--use-tis", "belongs to the plugin tis, which is not installed: pip install miles-plugin-tis"),
        ("--rollout-fp8", "pip install miles-plugin-fp8"),
        ("--sglang-mem-fraction-static", "pip install miles-plugin-sglang"),
        ("--sglang-speculative-algorithm", "pip install miles-plugin-speculative"),
        ("--use-zero-copy-sync", "pip install miles-plugin-zero-copy"),
        ("--partial-rollout", "does not exist here: "),
        ("--colocate", "drop the flag"),
        ("--rollout_batch_size", "it is spelt --rollout-batch-size"),
        ("--use-kl-loss", "--kl-loss-coef"),
        ("--batch-size", "did you mean"),
        ("--zzz", "miles train --help"),
    ],
)
def test_an_unknown_flag_is_explained(flag, says):
    assert says in elsewhere.explain_flag(flag, collect([]))


def test_an_installed_plugin_is_not_offered_for_installation():
    manifest = Plugin(name="tis", summary="", version="1", core=">=0")
    message = elsewhere.explain_flag("--tis-nonsense", collect([manifest]))
    assert "pip" not in message and "unknown flag --tis-nonsense" in message


def test_an_absent_part_names_its_plugin():
    schema = collect([])
    message = elsewhere.explain_value(schema.find("engine"), "sglang", schema)
    assert message and "pip install miles-plugin-sglang" in message
    assert elsewhere.explain_value(schema.find("engine"), "nothing", schema) is None


def test_an_absent_plugin_is_explained():
    assert "pip install miles-plugin-r3" in elsewhere.explain_plugin("r3", collect([]))
    assert "did you mean mxfp8" in elsewhere.explain_plugin("mxpf8", collect([]))


def test_the_table_holds_no_flag_that_core_has():
    """An entry for a flag that exists would never be shown."""
    table = tomllib.loads(Path(elsewhere.__file__).with_suffix(".toml").read_text())
    patterns = [*table["flags"], *(pattern for patterns in table["plugins"].values() for pattern in patterns)]
    for spelling in collect([]).spellings():
        for pattern in patterns:
            assert not fnmatchcase(spelling, pattern) or pattern == "--moe-*", (spelling, pattern)


def test_every_flag_that_a_sentence_recommends_exists():
    import re

    table = tomllib.loads(Path(elsewhere.__file__).with_suffix(".toml").read_text())
    known = {
        *collect([]).spellings(),
        *table["flags"],
        *(p for patterns in table["plugins"].values() for p in patterns),
    }
    sentences = [*table["flags"].values(), *(text for values in table["values"].values() for text in values.values())]
    for sentence in sentences:
        assert sentence.strip() and not sentence.endswith(".")
        for flag in re.findall(r"--[a-z0-9-]+", sentence):
            assert flag in known, (flag, sentence)


def test_a_variable_of_an_absent_plugin_is_explained():
    absent, installed = collect([]), collect([Plugin(name="int4", summary="", version="1", core=">=0")])
    given = {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1", "OPEN_TRAINING_INT4_GROUP_SIZE": "32", "OTHER": "1"}
    said = elsewhere.explain_environment(given, absent)
    assert len(said) == 2 and "environment variable OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1" in said[0]
    assert "pip install miles-plugin-int4, or unset it" in said[1]
    assert elsewhere.explain_environment(given, installed) == []  # its manifest declares what they set
    assert elsewhere.explain_environment({"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "0"}, absent) == []
    with pytest.raises(ConfigError, match="OPEN_TRAINING_INT4_GROUP_SIZE=32: it belongs to the plugin int4"):
        load([], manifests=[], environment={"OPEN_TRAINING_INT4_GROUP_SIZE": "32"})
