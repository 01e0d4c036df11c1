"""The surface: every option of core is helped, documented and in the snapshot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.config.groups import GROUPS
from miles_core.config.load import load
from miles_core.config.schema import collect
from miles_core.config.value import check
from miles_core.errors import ConfigError

ROOT = Path(__file__).parents[2]
SNAPSHOT = Path(__file__).with_name("flags.snapshot.txt")


@pytest.fixture(scope="module")
def schema():
    return collect([])


def test_every_option_has_one_line_of_help_and_its_own_flag(schema):
    seen: dict[str, str] = {}
    for option in schema.options.values():
        text = option.info.help
        assert text and "\n" not in text and not text.endswith("."), option.path
        for spelling in (option.flag, *option.info.aliases):
            assert spelling.startswith("--") and spelling == spelling.lower() and "_" not in spelling, spelling
            assert spelling not in seen, f"{spelling}: {seen.get(spelling)} and {option.path}"
            seen[spelling] = option.path


def test_every_default_is_a_value_the_option_takes(schema):
    for option in schema.options.values():
        assert check(option, option.default, "default") == option.default, option.path


def test_every_group_has_a_summary():
    for name, group in GROUPS.items():
        assert group.__doc__ and group.__doc__.strip(), name


def test_every_flag_is_in_the_documentation(schema):
    page = (ROOT / "docs" / "flags.md").read_text()
    for spelling in (*schema.flags, *schema.aliases):
        assert f"`{spelling}" in page, spelling


def test_the_flags_are_those_of_the_snapshot(schema):
    """A flag that comes or goes is a decision: add it to the snapshot, docs/flags.md and the changelog together."""
    assert sorted([*schema.flags, *schema.aliases]) == SNAPSHOT.read_text().split()


def test_bf16_is_the_dtype_of_the_models_copy():
    config = load(["--bf16"], manifests=[])
    assert (config.model.dtype, config.origin("model.dtype")) == ("bfloat16", "--bf16")
    with pytest.raises(ConfigError, match=r"model.dtype is given twice: bfloat16 \(--bf16\) and float32"):
        load(["--bf16", "--dtype", "float32"], manifests=[])


def test_options_are_read_without_torch():
    code = (
        "import sys, miles_core.config.load, miles_tools.authoring.flags, miles_core.cli.main;"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("[]\n", "")
