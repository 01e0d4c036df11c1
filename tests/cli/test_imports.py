"""What commands that only plan import: counted, because seconds depend on the machine."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Packages whose import takes seconds or much of a plan's time.
LARGE = (
    *("torch", "transformers", "numpy", "tokenizers", "huggingface_hub", "pydantic", "ray", "sglang", "asyncio"),
    "packaging.requirements",
)
#: Most modules of a plan, of Python's own library, too; an idle laptop imports as many in .3 s.
MOST = 400
CODE = """
import contextlib, io, json, sys
from miles_core.cli.main import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
    try:
        code = main(sys.argv[1:])
    except SystemExit as stopped:
        code = stopped.code
print(json.dumps({"code": code, "said": said.getvalue(), "modules": sorted(sys.modules)}))
"""
PARTS = ["--runtime", "ray", "--engine", "sglang", "--trainer", "megatron"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Returns a function: name of a published configuration -> a directory that has it as config.json."""
    root = tmp_path_factory.mktemp("models")

    def place(name):
        (root / name).mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests/published" / f"{name}.json", root / name / "config.json")
        return str(root / name)

    return place


def run(*argv):
    done = subprocess.run([sys.executable, "-c", CODE, *argv], capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def check(result, code):
    assert result["code"] == code, result["said"]
    assert [name for name in LARGE if name in result["modules"]] == []
    assert len(result["modules"]) <= MOST, len(result["modules"])


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["train", "--help", "reward"], 0),
        (["plan", "--help"], 0),
        (["plan"], 0),
        (["plan", "--plugins", "tis,r3,fp8"], 0),
        (["plan", "--hf-checkpoint", "qwen3-4b"], 0),
        (["plan", "--json", "--plugins", "tis", "--hf-checkpoint", "llama3.1-8b", "--num-rollout", "3"], 0),
        (["plan", "--plugins", "lora", "--hf-checkpoint", "qwen3-4b"], 0),
        (["plan", "--media", "--hf-checkpoint", "qwen2.5-vl-7b"], 0),
        (["plan", "--plugins", "ppo", "--hf-checkpoint", "qwen2.5-7b", "--hardware", "8xH200"], 2),
        (["plan", "--plugins", "fp8", "--rollout-precision", "fp8", "--hf-checkpoint", "qwen3-30b-a3b", "--hardware", "H200"], 2),
        (["plan", "--hf-checkpoint", "gpt-oss-20b", "--hardware", "8xH100", *PARTS, "--colocate"], 2),
        (["plan", "--hf-checkpoint", "qwen3-4b", "--hardware", "8xH100", *PARTS, "--optimizer-cpu-offload"], 0),
        (["plan", "--hf-checkpoint", "qwen3-4b", "--eps-clip", "-3"], 2),
        (["plan", "--search", "--hf-checkpoint", "qwen3-30b-a3b", "--hardware", "8xH100", "--top", "1"], 0),
        (["train", "--no-such-flag", "3"], 2),
    ],
    ids=lambda value: " ".join(value[:6]) if isinstance(value, list) else None,
)  # fmt: skip
def test_a_plan_imports_neither_torch_nor_transformers(models, argv, code):
    names = {path.stem for path in (ROOT / "tests/published").glob("*.json")}
    check(run(*(models(word) if word in names else word for word in argv)), code)


def test_what_needs_a_library_says_that_it_looks(models, tmp_path):
    config = json.loads((Path(models("qwen3-4b")) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "an_entry_of_tomorrow": 1, "num_hidden_layers": 1}))
    result = run("plan", "--hf-checkpoint", str(tmp_path))
    assert result["code"] == 0 and "transformers" in result["modules"]
    assert result["said"].count("importing transformers") == 1 and "an_entry_of_tomorrow" in result["said"]
