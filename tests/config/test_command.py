import argparse
from pathlib import Path

import pytest

from miles_core import api
from miles_core.cli.main import main
from miles_core.config.command import parse_own
from miles_core.errors import ConfigError

PLACE = ["--hf-checkpoint", "model"]


def test_own_options_are_separated_from_those_of_runs():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--hardware")
    parser.add_argument("--json", action="store_true")
    argv = ["--lr", "1", "--hardware", "H200", "--json", "--hardware=B200", "--seed", "1"]
    options, rest, command = parse_own(parser, argv, "plugins check")
    assert options.hardware == "B200" and rest == ["--lr", "1", "--seed", "1"]
    assert command.words == ("miles", "plugins", "check", "--hardware", "H200", "--json", "--hardware=B200")
    assert {"--hardware", "--json", "--help"} == set(command.flags)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["train", "--num-rolout", "3"], "miles train --num-rollout 3"),
        (["plan", "--hardware", "H200", "--num-rolout", "3"], "miles plan --hardware H200 --num-rollout 3"),
        (["plan", "--hardwar", "H200", "--lr", "1"], "miles plan --hardware H200 --lr 1"),
        (["plan", "--serch", *PLACE], "miles plan --search --hf-checkpoint model"),
        (["plan", "--search", "--lrr", "1", *PLACE], "miles plan --search --lr 1 --hf-checkpoint model"),
        (["verify", "--budgt", *PLACE], "miles verify --budget --hf-checkpoint model"),
        (["verify", "--num-rolout", "3"], "miles verify --num-rollout 3"),
        (["convert", "--to", "fp8", "--model-dir", "a", "--save-dir", "b", "--fp8-skip-layer", "c"],
         "miles convert --to fp8 --model-dir a --save-dir b --fp8-skip-layers c"),
        (["launch", "slurm", "--hardware", "8xH200", "--num-rolout", "3"], "miles launch slurm --hardware 8xH200 --num-rollout 3"),
        (["simulate", "--compare", "sync", "--num-rolout", "3"], "miles simulate --compare sync --num-rollout 3"),
        (["demo", "--device", "cpu", "--num-rolout", "3"], "miles demo --device cpu --num-rollout 3"),
        (["plugins", "explain", "r3", "--lrr", "1"], "miles plugins explain r3 --lr 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_corrected_line_is_one_of_the_same_command(argv, line, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    assert capsys.readouterr().err.endswith(f"the complete command line:\n  {line}\n")
    assert not list(Path().iterdir())


def test_a_call_from_python_is_not_answered_with_a_command_line():
    with pytest.raises(ConfigError, match="did you mean --num-rollout") as raised:
        api.plan(num_rolout=3)
    assert "miles train" not in str(raised.value)
