"""Flags of plugins that are not installed."""

import runpy
from pathlib import Path

import pytest

from miles_core.config.load import load
from miles_core.errors import ConfigError
from miles_core.plugin.discovery import discover
from miles_tools.command_line import COMPLETE
from miles_tools.foreign import not_installed

ROOT = Path(__file__).parents[3]
STANDARD = tuple(plugin for plugin in discover().values() if plugin.standard)


def answer(line):
    with pytest.raises(ConfigError) as failure:
        load(line.split(), manifests=STANDARD, environment={})
    return str(failure.value)


def test_the_table_is_current():
    made = runpy.run_path(str(ROOT / "docs" / "write_plugin_flags.py"))["table"]()
    assert made == Path(not_installed.__file__).with_suffix(".toml").read_text(encoding="utf-8"), (
        "run: python docs/write_plugin_flags.py > miles_tools/foreign/not_installed.toml"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--lora-rank 8",
            "--lora-rank belongs to the plugin lora, which is not installed: pip install miles-plugin-lora",
        ),
        ("--fp8-format e4m3", "the plugin fp8 or mxfp8, which is not installed"),
        (
            "--sglang-mem-fraction-static 0.7",
            "pip install miles-plugin-sglang (in a checkout: pip install ./plugins/sglang)",
        ),
    ],
)
def test_a_flag_names_the_package_to_install(line, message):
    assert message in answer(line)


def test_the_complete_line_keeps_flags_that_work_after_the_installation():
    text = answer("--plugins mxfp8 --rollout-mxfp8 --train-mxfp8 --eps_clip 0.2")
    assert "pip install miles-plugin-mxfp8" in text and "left out" not in text
    line = text.partition(COMPLETE)[2]
    assert all(word in line for word in ("--plugins mxfp8", "--rollout-mxfp8", "--train-mxfp8", "--eps-clip 0.2"))
