"""Large prompt files are checked and rendered once."""

import json
from types import SimpleNamespace

import pytest

from miles_core.data import prompt_index
from miles_core.data.prompts import Prompts
from miles_core.errors import DataError
from miles_core.rollout import queue


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """The directory of stored results; files with four rows count as large."""
    monkeypatch.setattr(prompt_index, "ROWS", 4)
    monkeypatch.setenv("MILES_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/prompts"


def write(path, count, **more):
    path.write_text("\n".join(json.dumps({"input": f"q{i}", "answer": i, **more}) for i in range(count)) + "\n\n")
    return str(path)


def test_a_later_run_reads_positions_and_digest_without_checking_rows(tmp_path, stored, monkeypatch):
    path = write(tmp_path / "a.jsonl", 5)
    first = Prompts(path)
    assert len(list(stored.iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr(Prompts, "_check", lambda *_: pytest.fail("a row is checked again"))
        again = Prompts(path)
        assert again.state() == first.state() and len(again) == 5
    assert [row.prompt for row in again.next(6)] == ["q0", "q1", "q2", "q3", "q4", "q0"] and again[
        3
    ].place == f"{path}:4"
    part = Prompts(f"{path}@[1:4]")
    assert [row.prompt for row in part] == ["q1", "q2", "q3"] and part.state() != first.state()
    with pytest.raises(DataError, match="no key 'absent' for the label"):
        Prompts(path, label_key="absent")  # a check with other columns


def test_a_file_that_changed_is_checked_again(tmp_path, stored):
    path = write(tmp_path / "a.jsonl", 5)
    Prompts(path)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"prompt": "no input"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:7: no key 'input'"):
        Prompts(path)


def test_damaged_results_and_a_directory_that_is_not_writable_cost_time_only(tmp_path, stored, monkeypatch, caplog):
    path = write(tmp_path / "a.jsonl", 5)
    Prompts(path)
    (file,) = stored.iterdir()
    file.write_bytes(file.read_bytes()[:40])
    assert len(Prompts(path)) == 5 and file.stat().st_size > 100
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MILES_CACHE", str(tmp_path / "file"))
    with caplog.at_level("INFO"):
        assert len(Prompts(path)) == 5
    assert "the next run checks the prompts again" in caplog.text


def test_small_files_leave_nothing(tmp_path, stored):
    Prompts(write(tmp_path / "a.jsonl", 0 + 1))
    assert not stored.exists()


class Letters:
    """A template: a token per letter."""

    calls = 0

    def __init__(self, name="letters"):
        self.name = name

    def __call__(self, text):
        self.calls += 1
        return list(map(ord, text))

    def identity(self):
        return [self.name]


def test_lengths_of_prompts_are_stored_for_a_tokenizer_and_template(tmp_path, stored, monkeypatch):
    monkeypatch.setattr(queue, "ROWS", 4)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"input": "x" * n}) + "\n" for n in (1, 9, 2, 3)))

    def examine(render, longest=None, context=None):
        prompts = Prompts(str(path))
        config = SimpleNamespace(rollout=SimpleNamespace(max_prompt_len=longest))
        queue.examine(prompts, render, config, queue.Limits(context, "the model's"), "--prompt-data")
        return len(prompts)

    first, again, other = Letters(), Letters(), Letters("other")
    assert (examine(first), examine(again, longest=5), examine(other)) == (4, 3, 4)
    assert (first.calls, again.calls, other.calls) == (4, 0, 4)
    with pytest.raises(DataError, match=r"2 of 4 prompts leave no room .* the longest has 9 .*a\.jsonl:2"):
        examine(again, context=3)
    with pytest.raises(DataError, match="all 4 prompts are longer"):
        examine(again, longest=0)
