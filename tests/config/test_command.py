from pathlib import Path

import pytest

from miles_core import api
from miles_core.cli.commands import Commands
from miles_core.cli.main import main
from miles_core.config.command import COMPLETE, CommandParser
from miles_core.errors import ConfigError

PLACE = ["--hf-checkpoint", "model"]


def test_own_options_are_separated_from_those_of_runs():
    parser = CommandParser("plugins check")
    parser.add_argument("--hardware")
    parser.add_argument("--json", action="store_true")
    argv = ["--lr", "1", "--hardware", "H200", "--json", "--hardware=B200", "--seed", "1"]
    options, rest, command = parser.parse_own(argv)
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
        (["diff", "one"], "miles diff one B"),
        (["diff", "--json"], "miles diff A B --json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_corrected_line_is_one_of_the_same_command(argv, line, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    assert capsys.readouterr().err.endswith(f"the complete command line:\n  {line}\n")
    assert not list(Path().iterdir())


#: Command -> mistakes in its flags, their values and its other words: (arguments, words of the sentence, the corrected arguments).
MISTAKES = {
    "train": [("--num-rolout 3", "did you mean --num-rollout?", "--num-rollout 3")],
    "plan": [
        ("--hardwar H200 --num-rollout 3", "did you mean --hardware", "--hardware H200 --num-rollout 3"),
        ("--num-rollout 3 --fact", "--fact needs a value: plan with this value", "--num-rollout 3 --fact NAME=VALUE"),
        ("--search --top few", "--top few: it must be a whole number", "--search --top 6"),
    ],
    "demo": [
        ("--device tpux --json", "--device cannot be 'tpux'; it is auto or cpu or cuda", "--device auto --json"),
        ("--seed=x", "--seed x: it must be a whole number", "--seed=0"),
    ],
    "plugins": [
        ("--jsn", "did you mean --json", "--json"),
        ("chek", "unexpected argument 'chek'; did you mean check?", "check"),
        ("new", "miles plugins new needs NAME (lower-case letters", "new NAME"),
        ("new x --fromat", "unknown flag --fromat; did you mean --format?", "new x --format"),
        ("new x y", "unexpected argument 'y'", "new x"),
        ("explain", "miles plugins explain needs NAME", "explain NAME"),
        ("check --json=3", "--json takes no value", "check --json"),
    ],
    "convert": [
        ("--too fp8 --model-dir a", "did you mean --to or --tools?", "--model-dir a --to fp8"),
        ("--to fp8 --dry-run", "miles convert needs --model-dir DIR", "--to fp8 --dry-run --model-dir DIR"),
        ("--to=fp88 --model-dir a --save-dir b", "did you mean fp8?", "--to=fp8 --model-dir a --save-dir b"),
        ("--to fp8 --workers 0", "--workers: '0' is not a number from 1 to 256", "--to fp8 --workers 2"),
        ("--to fp8 --shard-size", "--shard-size needs a value: maximum size", "--to fp8 --shard-size 5000000000"),
    ],
    "verify": [("--exct", "did you mean --exact", "--exact")],
    "watch": [("--prot 1 RUN", "did you mean --port", "--port 1 RUN")],
    "replay": [
        ("RUN", "miles replay needs --step N", "RUN --step 1"),
        ("RUN --stp 3", "did you mean --step", "RUN --step 3"),
        ("RUN --step x", "--step x: it must be a whole number", "RUN --step 1"),
    ],
    "diff": [("A", "miles diff needs B", "A B")],
    "report": [
        ("", "miles report needs RUN (run directory", "RUN"),
        ("--outptu x.html", "2 problems:", "RUN --output x.html"),
        ("a b --quick", "unknown flag --quick; miles report --help lists its flags", "a b"),
        ("a b --output", "--output needs a value: file of a comparison", "a b --output FILE"),
        ("a --output x", "--output is for a comparison of several runs", "a"),
    ],
    "doctor": [
        ("--modle a", "unknown flag --modle; did you mean --model?", "--model a"),
        ("--measure now", "unexpected argument 'now'", "--measure"),
        ("--model a --precision fp88", "there is no number format 'fp88'", "--model a --precision fp8"),
        ("--precision fp8", "give --model DIR", "--model DIR --precision fp8"),
        ("--lr 1", "unknown flag --lr", ""),
    ],
    "completion": [
        ("", "miles completion needs bash (the shell that reads the script)", "bash"),
        ("fsh", "shell cannot be 'fsh'; it is bash or fish or zsh; did you mean fish", "fish"),
        ("bash --all", "unknown flag --all", "bash"),
    ],
    "simulate": [("--plott a.png", "did you mean --plot", "--plot a.png")],
    "launch": [
        ("--hardware 8xH200", "miles launch needs slurm (kind of launch file)", "slurm --hardware 8xH200"),
        ("slurm", "miles launch needs --hardware GPUS (the machines", "slurm --hardware GPUS"),
        ("slrm --hardware 8xH200", "kind cannot be 'slrm'; it is slurm; did you mean slurm?", "slurm --hardware 8xH200"),
        ("slurm --hardware 8xH200 --hours x", "--hours x: it must be a whole number", "slurm --hardware 8xH200 --hours 24"),
    ],
    "serve": [
        ("--max-adapters 0", "--max-adapters: '0' is not a whole number of at least 1", "--max-adapters 8"),
        ("--hf-checkpoint a --prot 80", "unknown flag --prot; did you mean --port", "--port 80 --hf-checkpoint a"),
    ],
}  # fmt: skip


def test_every_command_is_walked():
    assert {*MISTAKES} == {*Commands.installed()}


@pytest.mark.parametrize(
    ("words", "says", "line"),
    [(f"{name} {a}", b, f"{name} {c}") for name, each in MISTAKES.items() for a, b, c in each],
)
def test_mistakes_are_answered_with_a_sentence_and_a_complete_line(words, says, line, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    out, text = capsys.readouterr()
    assert text.startswith("error: ") and says in text and "usage:" not in text + out, text
    assert text.partition(COMPLETE)[2].strip() == f"miles {line}".strip()
    assert not list(Path().iterdir())


def test_a_call_from_python_is_not_answered_with_a_command_line():
    with pytest.raises(ConfigError, match="did you mean --num-rollout") as raised:
        api.plan(num_rolout=3)
    assert "miles train" not in str(raised.value)
