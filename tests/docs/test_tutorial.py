"""The tutorial and the notebook work: their blocks run one after the other, on a toy model and with fewer steps."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles_core.api import arguments, plan, train
from miles_core.errors import ConfigError, DataError, PlanError
from miles_core.observe.metrics import read

ROOT = Path(__file__).parents[2]
MODEL = "SmolLM2-135M-Instruct"
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
#: What the pages say -> what is run, for time's sake.
SMALLER = {
    "2000": "8",
    "64)": "2)",
    "num-rollout 20": "num-rollout 1",
    "num-rollout 40": "num-rollout 2",
    "num_rollout=20": "num_rollout=1",
    "num_rollout=40": "num_rollout=2",
    "batch-size: 16": "batch-size: 2",
    "per-prompt: 8": "per-prompt: 2",
    '_batch_size": 16': '_batch_size": 2',
    '_prompt": 8': '_prompt": 2',
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A toy in the place of the real model: bytes as tokens, a chat template."""
    from miles_testing.tiny import tiny_checkpoint
    from miles_tools.demo.model import make_tokenizer

    directory = tmp_path_factory.mktemp("model") / MODEL
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tiny_checkpoint("llama", directory, vocab_size=len(tokenizer), max_position_embeddings=512, **ids)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def here(model, tmp_path, monkeypatch):
    """A working directory with the model in it, and a TensorBoard that notes what it is given."""
    (tmp_path / MODEL).symlink_to(model)
    (tmp_path / "tensorboard.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = SimpleNamespace(add_scalar=lambda name, value, step: seen.names.add(name), close=lambda: None, names=set())
    board = SimpleNamespace(SummaryWriter=lambda log_dir: seen)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    return seen


def smaller(text, used):
    for said, run in SMALLER.items():
        if said in text:
            used.add(said)
            text = text.replace(said, run)
    return text


def test_the_blocks_of_the_tutorial_run_one_after_the_other(here, shell, capsys):
    text, used = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8"), set()
    blocks = re.findall(r"^```(python|shell|yaml)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    namespace = {"__name__": "__main__"}
    for language, code in blocks:
        code, named = smaller(code, used), re.match(r"# (\w+\.\w+)\n", code)
        if named:
            Path(named[1]).write_text(code)
        elif language == "shell":
            shell(code)
        else:
            exec(compile(code, "docs/tutorial.md", "exec"), namespace)
    records = read("runs/sums/metrics.jsonl")
    assert (
        [r["step"] for r in records] == [0, 1, 2]
        and "reward/part/right" in records[1]
        and "eval/part/right" in records[0]
    )
    assert "reward/mean" in here.names and Path("runs/sums/report.html").is_file()
    assert Path("sums-model/model.safetensors").is_file() and read("runs/tool/metrics.jsonl")[-1]["step"] == 1
    assert namespace["result"].step == 2 and len(namespace["answers"]) == 2
    assert "finished" in capsys.readouterr().out and used == {said for said in SMALLER if said in text}
    generate = runpy.run_path("calculator.py")["generate"]
    assert asyncio.run(with_a_tool(generate)) == ("<<2+3>> 5 it is 5.", 18)


async def with_a_tool(generate):
    """What the tutorial's function makes of a model that calls the tool once."""
    turns = iter(["<<2+3>>", " it is 5."])

    async def ask(tokens, params):
        assert params["max_new_tokens"] == 30 - (len(tokens) - 1)
        return SimpleNamespace(tokens=[*map(ord, next(turns))])

    tokenizer = SimpleNamespace(decode=lambda t, **_: "".join(map(chr, t)), encode=lambda text, **_: [*map(ord, text)])
    sample = SimpleNamespace(tokens=[1], metadata={})
    done = await generate(SimpleNamespace(generate=ask, tokenizer=tokenizer), sample, {"max_new_tokens": 30})
    assert done.metadata == {"calls": 1} and done.tokens[0] == 1
    return done.response, done.response_length


def test_the_cells_of_the_notebook_run_inside_of_a_running_event_loop(here):
    cells = json.loads((ROOT / "examples/first_task.ipynb").read_text(encoding="utf-8"))["cells"]
    namespace = {"__name__": "__main__"}

    async def kernel():
        for cell in cells:
            code = smaller("".join(cell["source"]), set())
            if cell["cell_type"] != "code":
                continue
            magic, _, rest = code.partition("\n")
            if magic.startswith("%%writefile "):
                Path(magic.split()[1]).write_text(rest)
            else:
                exec(compile(code, "first_task.ipynb", "exec"), namespace)

    asyncio.run(kernel())
    result = namespace["result"]
    assert result.step == result.of == 2 and result.why == "finished" and result.export.name == "notebook-model-40"
    assert result.checkpoint.is_dir() and result.series("reward/mean")[0] == [1, 2]
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code")


def test_options_of_python_are_the_flags():
    given = {"rollout_batch_size": 4, "shuffle": True, "self_check": False, "rollout_stop": ["a", "b"], "lr": None}
    assert arguments(given) == [
        "--rollout-batch-size=4",
        "--shuffle",
        "--no-self-check",
        "--rollout-stop=a",
        "--rollout-stop=b",
    ]


def test_what_is_wrong_is_an_exception(here, tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)did you mean --rollout-batch-size\?.*--lr fast: train.lr cannot be"):
        train(rolout_batch_size=4, lr="fast")
    with pytest.raises(PlanError, match="this run cannot start"):
        plan(hf_checkpoint=MODEL, train_precision="int4")
    (tmp_path / "bad.py").write_text("async def reward(args, sample):\n    return 'much'\n")
    (tmp_path / "p.jsonl").write_text('{"input": "a"}\n')
    with pytest.raises(DataError, match="must be a number") as raised:
        train(
            hf_checkpoint=MODEL, prompt_data="p.jsonl", custom_rm_path="bad.py", rollout_max_response_len=2, quiet=True
        )
    assert "checkpoint: none" in raised.value.__notes__[0]
