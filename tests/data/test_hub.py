"""Names of the hub: what is in the cache is used, what is not says how to get it. No test reaches the network."""

import shlex
from pathlib import Path

import pytest

from miles_core.config.load import load
from miles_core.data import hub
from miles_core.data.prompts import Prompts
from miles_core.errors import CheckpointError, DataError
from miles_core.run.prepare import localise


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """``cached(kind, name, file, text)`` puts a file into a cache of this test."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def write(kind, name, file, text):
        repository = tmp_path / "hub" / f"{kind}--{name.replace('/', '--')}"
        path = repository / "snapshots" / "abc" / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("abc")
        return path

    return write


def test_a_model_by_name_is_the_directory_in_the_cache(cached, tmp_path, monkeypatch):
    config = cached("models", "org/small", "config.json", "{}")
    found = localise(load(["--hf-checkpoint", "org/small"]))
    assert found.model.hf_checkpoint == str(config.parent) and found.model.model_name == "small"
    (tmp_path / "org").mkdir()
    monkeypatch.chdir(tmp_path)  # where it is a path that does not exist, it is a slip of the pen
    assert localise(load(["--hf-checkpoint", "org/small"])).model.hf_checkpoint == "org/small"


def test_what_is_not_in_the_cache_says_how_to_get_it(cached):
    with pytest.raises(CheckpointError, match=r"--hf-checkpoint org/none: it is not in the hub's cache .*hf download"):
        localise(load(["--hf-checkpoint", "org/none"]))
    with pytest.raises(DataError, match=r"hf://datasets/org/none/a.jsonl: it is not in the hub's cache"):
        hub.file("hf://datasets/org/none/a.jsonl")
    with pytest.raises(DataError, match="write hf://datasets/ORG/NAME/FILE"):
        hub.file("hf://org/none")


def test_prompts_of_a_data_set(cached):
    cached("datasets", "org/sums", "data/train.jsonl", '{"input": "1+1"}\n{"input": "1+2"}\n')
    rows = Prompts("hf://datasets/org/sums/data/train.jsonl@[1:]")
    assert [row.prompt for row in rows] == ["1+2"]


def test_the_command_of_the_readme_names_a_model_and_data_of_the_hub():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (command,) = (b for b in readme.replace("\\\n", " ").splitlines() if b.startswith("miles train") and "hf://" in b)
    config = load(shlex.split(command)[2:])
    assert hub.is_model(config.model.hf_checkpoint)
    held_out = config.evaluation.prompt_data
    assert all(hub.FILE.fullmatch(name) for name in (config.data.prompt_data, *held_out)) and held_out
