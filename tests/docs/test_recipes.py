"""The one-node recipes of docs/coming-from.md are planned, on a machine that has nothing of what they need."""

import json
import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest

from miles_core.config.load import load
from miles_core.plugin import ConfigError
from miles_core.run.prepare import prepare

ROOT = Path(__file__).parents[2]
COMING_FROM = runpy.run_path(str(ROOT / "docs" / "coming_from.py"))
RECIPES = COMING_FROM["RECIPES"]
BLOCKS = re.findall(r"```text\n(.*?)```", RECIPES.read_text(encoding="utf-8"), re.DOTALL)
HERE = [shlex.split(block.replace("\\\n", " ")) for block in BLOCKS if block.startswith("miles train")]
SLIME = shlex.split(next(block for block in BLOCKS if block.startswith("python3 train.py")).replace("\\\n", " "))[2:]


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "Qwen3-30B-A3B"
    directory.mkdir()
    shutil.copy(ROOT / "tests/published/qwen3-30b-a3b.json", directory / "config.json")
    return directory


def with_model(words, model):
    at = words.index("--hf-checkpoint") + 1
    return [*words[:at], str(model), *words[at + 1 :]]


@pytest.mark.parametrize("hardware", ["8xH100", "8xH200"])
@pytest.mark.parametrize("words", HERE, ids=["slime", "verl"])
def test_a_ported_recipe_is_planned(words, hardware, model):
    plan, _ = prepare(load(with_model(words[2:], model)), [f"hardware={hardware}"])
    (table,) = (note for note in plan.reviews if note.startswith("memory of a GPU"))
    assert "engine, GPU" in table and "trainer, rank" in table and "take turns on the same GPUs" in table
    assert "100% of the optimizer's state is in host memory" in table
    assert plan.fact("gpu.count") == 8 and plan.fact("colocate") is True


def test_slime_s_own_command_line_is_answered_with_the_one_that_works(model):
    with pytest.raises(ConfigError) as error:
        load(with_model(SLIME, model))
    text = str(error.value)
    assert "the command line below solves all of them" in text and "what is left" not in text
    line = shlex.split(text.rsplit("the complete command line:\n", 1)[1])[2:]
    config = load(line)
    ported = load(with_model(HERE[0][2:], model))
    theirs = {fact.name: fact.value for fact in config.facts()}
    assert [f for f in ported.facts() if f.name != "plugins" and f.value != theirs[f.name]] == []
    assert set(config.plugins) == set(ported.plugins)
    prepare(config, ["hardware=8xH100"])


def test_the_recipes_are_of_the_published_model(model):
    config = json.loads((model / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_experts"], config["num_experts_per_tok"]) == (48, 128, 8)
