"""Layouts of rows, and the errors for rows that cannot be trained on."""

import json

import pytest

from miles_core.plugin import DataError
from miles_offline.rows import OfflineRows

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
OTHER = {"role": "assistant", "content": "b"}


def open_rows(path, *rows, paired=False, input_key="input", label_key=None, labelled=False, margins=False):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return OfflineRows(str(path), paired, input_key, label_key, False, 0, labelled, margins)


@pytest.mark.parametrize(
    ("row", "options", "prompt", "answers"),
    [
        ({"messages": [USER, ANSWER]}, {}, [], {"messages": [USER, ANSWER]}),
        ({"talk": [USER, ANSWER]}, {"input_key": "talk"}, [], {"talk": [USER, ANSWER]}),
        ({"prompt": "q", "completion": "a"}, {}, "q", {"completion": "a"}),
        ({"prompt": [USER], "completion": [ANSWER]}, {}, [USER], {"completion": [ANSWER]}),
        ({"input": "q", "label": "a"}, {"label_key": "label"}, "q", {"label": "a"}),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, {"paired": True}, "q", {"chosen": "a", "rejected": "b"}),
        (
            {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
            {"paired": True},
            [USER],
            {"chosen": [ANSWER], "rejected": [OTHER]},
        ),
    ],
)
def test_layouts(tmp_path, row, options, prompt, answers):
    (found,) = open_rows(tmp_path / "rows.jsonl", row, **options)
    assert (found.prompt, found.label) == (prompt, answers)


@pytest.mark.parametrize(
    ("row", "paired", "message"),
    [
        (
            {"text": "a"},
            False,
            "a row needs the column 'messages' or the columns 'prompt' and 'completion', and its columns are: 'text'",
        ),
        (
            {"prompt": "q", "chosen": "a"},
            True,
            "a row needs the columns 'prompt', 'chosen' and 'rejected', and its columns are: 'prompt', 'chosen'",
        ),
        ({"prompt": "q", "completion": ""}, False, "the column 'completion' is empty"),
        ({"prompt": "", "completion": "a"}, False, "the column 'prompt' is empty"),
        ({"prompt": "q", "completion": 3}, False, "the column 'completion' is 3, not a text or a list of messages"),
        (
            {"prompt": "q", "completion": [ANSWER]},
            False,
            "the column 'prompt' is a text and the column 'completion' is a list of messages",
        ),
        ({"completion": "a"}, False, "the column 'completion' is a text, but there is no column 'prompt'"),
        ({"messages": [USER]}, False, "no message in the column 'messages' has the role 'assistant'"),
        (
            {"messages": [USER, {"role": "assistant", "content": ""}]},
            False,
            "message 1 in the column 'messages' is an assistant message without",
        ),
        (
            {"messages": [USER, ANSWER], "tools": "add"},
            False,
            "the column 'tools' is 'add'; it must be a list of schemas",
        ),
        ({"messages": [USER, ANSWER], "images": ["a.png"]}, False, "the column 'images' is not empty"),
        ({"messages": [USER, "a"]}, False, "message 1 in the column 'messages' is 'a'"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, True, "the columns 'chosen' and 'rejected' are equal"),
        (
            {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER, USER]},
            True,
            "the column 'chosen' is the beginning of the other one",
        ),
    ],
)
def test_a_defect_is_described_with_its_row_and_column(tmp_path, row, paired, message):
    good = {"prompt": "q", "chosen": "a", "rejected": "b"} if paired else {"prompt": "q", "completion": "a"}
    with pytest.raises(DataError) as error:
        list(open_rows(tmp_path / "rows.jsonl", good, row, paired=paired))
    text = str(error.value)
    assert f"rows.jsonl:2: {message}" in text and "\n" not in text


@pytest.mark.parametrize(("prompt", "answer"), [("q", "a"), ([USER], [ANSWER])])
def test_an_answer_has_a_label(tmp_path, prompt, answer):
    rows = [{"ask": prompt, "completion": answer, "label": label} for label in (True, False)]
    found = list(open_rows(tmp_path / "rows.jsonl", *rows, labelled=True, input_key="ask"))
    assert [row.metadata for row in found] == [{"label": True}, {"label": False}]
    assert all((row.prompt, row.label) == (prompt, {"completion": answer}) for row in found)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "q", "completion": "a"},
            "a row needs the columns 'prompt', 'completion' and 'label', and its columns are: 'prompt', 'completion'",
        ),
        (
            {"completion": [USER, ANSWER], "label": True},
            "a row needs the columns 'prompt', 'completion' and 'label', and its columns are: 'completion', 'label'",
        ),
        (
            {"prompt": "q", "completion": "a", "label": 1},
            "the column 'label' is 1; it must be true (the completion is desirable) or false",
        ),
        ({"prompt": "q", "completion": "a", "label": "true"}, "the column 'label' is 'true'; it must be true"),
    ],
)
def test_a_defect_of_a_label_is_described(tmp_path, row, message):
    with pytest.raises(DataError) as error:
        list(open_rows(tmp_path / "rows.jsonl", {"prompt": "q", "completion": "a", "label": False}, row, labelled=True))
    assert f"rows.jsonl:2: {message}" in str(error.value)


def test_schemas_of_functions_are_read_from_a_list_or_its_text(tmp_path):
    schemas = [{"type": "function", "function": {"name": "add"}}]
    rows = [{"messages": [USER, ANSWER], "tools": tools} for tools in (schemas, json.dumps(schemas), None)]
    found = [row.metadata for row in open_rows(tmp_path / "rows.jsonl", *rows)]
    assert found == [{"tools": schemas}, {"tools": schemas}, {}]


def test_margins(tmp_path):
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    rows = open_rows(tmp_path / "rows.jsonl", pair | {"margin": 2}, pair, paired=True, margins=True)
    assert [row.metadata["margin"] for row in rows] == [2.0, 0.0]


@pytest.mark.parametrize("margin", ["2", True, float("nan")])
def test_a_margin_is_a_number(tmp_path, margin):
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "margin": margin}
    with pytest.raises(
        DataError, match=rf"rows.jsonl:1: the column 'margin' is {margin!r}; it must be a finite number"
    ):
        open_rows(tmp_path / "rows.jsonl", row, paired=True, margins=True)
