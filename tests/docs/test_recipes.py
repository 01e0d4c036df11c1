"""Every recipe is planned, on a machine that has nothing of what the large ones need."""

import asyncio
import json
import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest

from miles_core.config.load import load
from miles_core.data.sample import Sample
from miles_core.plugin import ConfigError
from miles_core.run.prepare import prepare
from miles_testing import toy_run

ROOT = Path(__file__).parents[2]
INDEX = runpy.run_path(str(ROOT / "recipes" / "write_index.py"))
#: Recipes that change what ``miles demo`` trains, and those for a model of their own.
OF_THE_DEMO = ("agent", "async", "fp8-r3", "lora", "ppo")
SMALL = ("coevolution", "dapo", "dpo", "gsm8k", "reasoning-gym", "reward-model", "sft", "sums", "tools")
#: The plugin of a recipe that has another name.
PLUGIN = {
    "fp8-r3": "fp8",
    "agent": "endpoint",
    "async": "tis",
    "sums": "tis",
    "sft": "offline",
    "dpo": "offline",
    "reward-model": "offline",
    "dapo": "tis",
    "gsm8k": "tis",
    "reasoning-gym": "environments",
}
SMOLLM2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
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


def test_every_recipe_has_a_page_with_its_command_and_a_row_in_the_index():
    names = INDEX["list_recipes"]()
    assert names == sorted([*OF_THE_DEMO, *SMALL, *INDEX["PLANNED"]])
    index = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    for name in names:
        page = (ROOT / "recipes" / name / "README.md").read_text(encoding="utf-8")
        assert f"--config recipes/{name}/run.yaml" in page and f"]({name}/README.md) |" in index, name
        assert "**Read.**" in page and "**Cost.**" in page, name
        assert name in INDEX["PLANNED"] or f"({name}/README.md) | {INDEX['describe'](name)} |" in index, (
            "write the index"
        )


@pytest.mark.parametrize("name", [*OF_THE_DEMO, *SMALL])
def test_a_small_recipe_is_planned(name, tmp_path, monkeypatch):
    from miles_tools.demo.inputs import train_arguments

    monkeypatch.chdir(ROOT)
    shutil.copy(ROOT / "tests/published/qwen3-30b-a3b.json", tmp_path / "config.json")
    if name in SMALL:
        (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    own = ["--config", f"recipes/{name}/run.yaml", "--hf-checkpoint", str(tmp_path)]
    words = train_arguments(tmp_path, 0, [], own) if name in OF_THE_DEMO else own
    plan, _ = prepare(load([*words, "--device", "cpu"]))
    assert PLUGIN.get(name, name) in plan.order


@pytest.mark.parametrize("name", INDEX["PLANNED"])
def test_a_recipe_for_a_cluster_is_planned(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    shutil.copy(ROOT / "tests" / "published" / f"{name}.json", tmp_path / "config.json")
    words = ["--config", f"recipes/{name}/run.yaml", "--hf-checkpoint", str(tmp_path)]
    plan, _ = prepare(load(words), [f"hardware={INDEX['PLANNED'][name]}"])
    (table,) = (note for note in plan.reviews if note.startswith("memory of a GPU"))
    assert "take turns on the same GPUs" in table
    assert ", not run" in INDEX["describe"](name).lower()


GSM8K = {"question": "Ann has 2 apples and gets 3. How many?", "answer": "She has 2 + 3 = <<2+3=5>>5.\n#### 5"}
DAPO = {
    "prompt": [{"role": "user", "content": "What is 2 + 3? The last line is Answer: $Answer"}],
    "reward_model": {"ground_truth": "5", "style": "rule"},
}
#: Recipe -> its rows, and options for short steps.
PUBLISHED = {
    "gsm8k": ([GSM8K] * 4, {}),
    "dapo": ([DAPO] * 4, {"overlong_buffer_len": 4, "over_sampling_batch_size": 2}),
    "reasoning-gym": ([], {"eval_environments_size": 2}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_trains_on_rows_of_the_published_form(name, tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    rows, options = PUBLISHED[name]
    if not rows:
        pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(ROOT)
    files = {}
    if rows:
        parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), tmp_path / "rows.parquet")
        files["prompt_data"] = tmp_path / "rows.parquet"
    if name == "gsm8k":
        files["eval_prompt_data"] = f"{tmp_path}/rows.parquet@[0:2]"
    if name == "dapo":  # the tiny model answers nothing right, and its groups would be replaced for ever
        (tmp_path / "keep.py").write_text("def keep(args, group):\n    return True\n")
        files["dynamic_sampling_filter_path"] = f"{tmp_path}/keep.py:keep"
    short = {"rollout_batch_size": 2, "sizes": {"max_position_embeddings": 1024}, "family": "llama"}
    short |= {"rollout_max_response_len": 8, "n_samples_per_prompt": 2, "save_interval": None, "lr": None}
    own = {"config": f"recipes/{name}/run.yaml", "custom_rm_path": None, "prompt_data": None}
    run = toy_run((), tmp_path / "run", steps=1, **(own | short | files | options))
    step = next(record for record in run.metrics if record["step"] == 1)
    assert step["rollout/samples"] == 4 and step["reward/max"] >= 0


@pytest.mark.parametrize(
    ("response", "expected"), [("2 + 3 = 5", 1.0), ("It is 1,000, or 5.0.", 1.0), ("5 apples of 6", 0.0), ("five", 0.0)]
)
def test_the_reward_of_gsm8k_reads_the_published_answer(response, expected):
    reward = runpy.run_path(str(ROOT / "recipes/gsm8k/reward.py"))["reward"]
    sample = Sample(response=response, label=GSM8K["answer"])
    assert asyncio.run(reward(None, sample)) == expected
