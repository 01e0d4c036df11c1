"""Large prompt files: a sample of their rows is checked before a run, and positions of rows are stored."""

import hashlib
import json
import logging
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.data import prompt_file, prompt_index, prompts
from miles_core.data.prompts import Prompts
from miles_core.errors import DataError
from miles_core.rollout import queue
from miles_core.rollout.queue import Limits, PromptQueue, encode_rows, examine


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """The directory of stored results; files with four rows count as large, and three rows are checked."""
    for module in (prompt_index, prompts):
        monkeypatch.setattr(module, "ROWS", 4)
    monkeypatch.setattr(prompt_index, "SAMPLE", 3)
    monkeypatch.setenv("MILES_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/prompts"


def write(path, count, **more):
    path.write_text("\n".join(json.dumps({"input": f"q{i}", "answer": i, **more}) for i in range(count)) + "\n\n")
    return str(path)


def test_the_sample_has_equal_distances_and_both_ends(stored):
    assert list(prompt_index.sample_rows(3)) == [0, 1, 2]
    assert prompt_index.sample_rows(4) == [0, 1, 3] and prompt_index.sample_rows(101) == [0, 50, 100]


def test_a_later_run_reads_positions_and_digest_without_checking_rows(tmp_path, stored, monkeypatch):
    path = write(tmp_path / "a.jsonl", 5)
    first = Prompts(path)
    assert len(list(stored.iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr(Prompts, "check", lambda *_: pytest.fail("a row is checked again"))
        again = Prompts(path)
        assert again.state() == first.state() and len(again) == 5
    assert [row.prompt for row in again.next(6)] == ["q0", "q1", "q2", "q3", "q4", "q0"]
    assert again[3].place == f"{path}:4"
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


LINE = st.sampled_from(
    [
        '{"input": "a"}',
        '{"input": "é\\u2028"}',
        ' {"input": "b"}',
        '{"input": "c"}\t',
        "",
        " ",
        "\r",
        '{"input": "d"}\r',
    ]
)


@given(
    lines=st.lists(LINE, max_size=9),
    end=st.booleans(),
    block=st.integers(1, 40),
    part=st.tuples(*[st.none() | st.integers(-4, 9)] * 2),
)
@settings(max_examples=200)
def test_rows_and_digest_are_those_of_a_reader_line_by_line(tmp_path_factory, lines, end, block, part):
    path = tmp_path_factory.mktemp("d") / "a.jsonl"
    path.write_bytes(("\n".join(lines) + "\n" * end).encode())
    expected = [(n, line) for n, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()][slice(*part)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_file, "_BLOCK", block)
        file = prompt_file.JsonlFile(path, slice(*part), lambda *_: None, "")
    assert [file.read(i) for i in range(len(file))] == [(json.loads(line), f"{path}:{n}") for n, line in expected]
    assert file.digest == hashlib.sha256(b"".join(line.strip() + b"\n" for _, line in expected)).hexdigest()


class Letters:
    """A template: a token per letter."""

    calls = 0

    def __init__(self):
        self.known = {}

    def __call__(self, text, encoded=None):
        self.calls += 1
        return list(map(ord, text))

    def encode_texts(self, texts):
        return [None] * len(texts)


def open_large(tmp_path, rows, longest=None, context=None, check=None):
    """Open and examine a file whose rows 0, 2 and 5 are checked; return the queue of its prompts."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(row if row.startswith("{") else json.dumps({"input": row}) + "\n" for row in rows))
    config, limits, render = (
        SimpleNamespace(rollout=SimpleNamespace(max_prompt_len=longest)),
        Limits(context, "the model's"),
        Letters(),
    )
    source = Prompts(str(path))
    examine(source, render, config, limits, "--prompt-data")
    assert render.calls == 3 and len(source) == 6
    return PromptQueue(source, encode_rows(render, config, limits, check))


def test_rows_that_were_not_checked_are_left_out_with_a_warning_that_names_the_line(tmp_path, stored, caplog):
    rows = ["a", '{"input": 7}\n', "c", '{"input": \n', "e" * 9, "f"]
    prompts = open_large(tmp_path, rows, context=5)
    caplog.clear()  # another test may have set a level at which opening is logged
    with caplog.at_level(logging.WARNING):
        assert [p.text for p in prompts.next(4)] == ["a", "c", "f", "a"]
    assert [record.getMessage().partition("a.jsonl:")[2][:30] for record in caplog.records] == [
        "2: the prompt 'input' is 7; it",
        "4: malformed JSON: Expecting v",
        "5: the prompt of 9 tokens leav",
    ]
    state = prompts.state(held=range(3))
    again = open_large(tmp_path, rows, context=5)
    again.load_state(state)
    assert [p.text for p in again.next(4)] == ["a", "c", "f", "a"]


def test_labels_that_were_not_checked_are_checked_when_they_are_read(tmp_path, stored, caplog):
    def check(row):
        if row.prompt in "bc":
            raise DataError(f"{row.place}: no response equals the label")

    prompts = open_large(tmp_path, [*"abcdef"], check=check)  # row 2, "c", was checked before the run
    caplog.clear()
    assert [p.text for p in prompts.next(3)] == ["a", "d", "e"]
    assert [record.getMessage().partition("a.jsonl:")[2][:20] for record in caplog.records] == [
        "2: no response equals"[:20],
        "3: no response equals"[:20],
    ]


def test_long_prompts_that_were_not_examined_are_left_out_when_they_are_read(tmp_path, stored, caplog):
    prompts = open_large(tmp_path, ["a", "b" * 7, "c", "d", "e" * 9, "f"], longest=5)
    caplog.clear()
    assert [p.text for p in prompts.next(5)] == ["a", "c", "d", "f", "a"] and prompts.left_out == 2
    assert not caplog.records


def test_an_invalid_row_of_the_sample_and_a_changed_file_end_the_run(tmp_path, stored):
    with pytest.raises(DataError, match=r"a\.jsonl:3: the prompt 'input' is 7"):
        open_large(tmp_path, ["a", "b", '{"input": 7}\n', "d", "e", "f"])
    with pytest.raises(DataError, match=r"1 of 3 prompts leave no room .* the longest has 9 .*a\.jsonl:6"):
        open_large(tmp_path, [*"abcde", "f" * 9], context=5)
    prompts = open_large(tmp_path, [*"abcdef"])
    (tmp_path / "a.jsonl").write_text('{"input": "z"}\n' * 6)
    with pytest.raises(DataError, match="was changed while the run reads it"):
        prompts.next(2)


def test_a_file_of_invalid_rows_ends_the_run(tmp_path, stored, monkeypatch):
    monkeypatch.setattr(queue, "GIVE_UP", 2)
    prompts = open_large(tmp_path, ["a", "b", "c", "d" * 9, "e" * 9, "f"], longest=5)
    assert len(prompts.next(3)) == 3
    with pytest.raises(DataError, match=r"the last 2 prompts of the source are all longer .* or invalid"):
        prompts.next(1)
