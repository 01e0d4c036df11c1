"""Prompts in parquet files, alone and next to JSONL."""

import json
from decimal import Decimal
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from miles_core.data import prompts
from miles_core.data.parquet import ParquetFile
from miles_core.errors import DataError

Prompts = partial(prompts.Prompts, open_parquet=ParquetFile)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def names(rows):
    return [row.prompt for row in rows]


def test_without_the_reader_parquet_is_refused(tmp_path):
    pq.write_table(pa.table({"input": ["a"]}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"not \.parquet"):
        prompts.Prompts(str(tmp_path / "p.parquet"))


def test_a_file_that_is_not_parquet(tmp_path):
    (tmp_path / "p.parquet").write_text("x")
    with pytest.raises(DataError, match="not a readable parquet file"):
        Prompts(str(tmp_path / "p.parquet"))


def test_parquet_with_chats(tmp_path):
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b", "name": "n"}]]
    table = pa.table({"messages": chats, "answer": [1, 2], "metadata": [{"k": 1}, None], "unused": ["x", "y"]})
    path = tmp_path / "p.parquet"
    pq.write_table(table, path)
    prompts = Prompts(str(path), input_key="messages", label_key="answer")
    rows = prompts.next(2)
    assert rows[0].prompt == chats[0]
    assert rows[1].prompt == chats[1]
    assert [row.label for row in rows] == [1, 2]
    assert [row.metadata for row in rows] == [{"k": 1}, {}]
    assert rows[1].place == f"{path} row 1"
    with pytest.raises(DataError, match=r"row 0: no key 'input' .*'messages', 'answer', 'metadata', 'unused'"):
        Prompts(str(path))


def test_several_files_and_slices(tmp_path):
    ten = write(tmp_path / "ten.jsonl", [{"input": f"q{i}"} for i in range(10)])
    more = write(tmp_path / "more.jsonl", [{"input": "x"}, {"input": "y"}])
    table = pa.table({"input": ["r", "s", "t"]})
    pq.write_table(table, tmp_path / "p.parquet")
    prompts = Prompts([f"{ten}@[-2:]", more, f"{tmp_path / 'p.parquet'}@[1:9]"])
    assert names(prompts) == ["q8", "q9", "x", "y", "s", "t"]
    assert next(iter(prompts)).place == f"{ten}:9"
    assert prompts[4].place.endswith("row 1")


def test_a_binary_column_of_parquet_is_text(tmp_path):
    pq.write_table(pa.table({"input": [b"what?", "café".encode()]}), tmp_path / "d.parquet")
    assert [row.prompt for row in Prompts(str(tmp_path / "d.parquet"))] == ["what?", "café"]
    pq.write_table(pa.table({"input": [b"\xff\xfe"]}), tmp_path / "e.parquet")
    with pytest.raises(DataError, match=r"e.parquet row 0: the column 'input' holds bytes that are not UTF-8"):
        Prompts(str(tmp_path / "e.parquet"))


@pytest.mark.parametrize(
    ("names", "kind", "said"),
    [
        (["input", "label"], "ns", "row 0: the column 'label' cannot be read .*anosecond.*; store it as a string"),
        (["input", "input"], "s", "it has 2 columns 'input'; rename all but one"),
    ],
)
def test_columns_of_parquet_that_python_cannot_have(tmp_path, names, kind, said):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array([1], pa.timestamp(kind))], names=names)
    pq.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(DataError, match=said):
        Prompts(str(tmp_path / "p.parquet"), label_key="label")


def test_numbers_of_parquet_keep_their_digits(tmp_path):
    """A float32 of 0.1 is not the float64 with the same bits, and a decimal is a number."""
    columns = {
        "input": ["a", "b"],
        "single": pa.array([0.1, 2.0], pa.float32()),
        "half": pa.array([0.1, 2.0], pa.float16()),
        "list": pa.array([[0.1], [0.3]], pa.list_(pa.float32())),
        "struct": pa.array([{"x": 0.1, "y": "k"}, None], pa.struct([("x", pa.float32()), ("y", pa.string())])),
        "decimal": pa.array([Decimal("2.00"), Decimal("0.10")], pa.decimal128(5, 2)),
        "long": pa.array([Decimal("0.1000000000000000000001")] * 2, pa.decimal128(30, 22)),
    }
    pq.write_table(pa.table(columns), tmp_path / "p.parquet")
    read = {key: [row.label for row in Prompts(f"{tmp_path}/p.parquet@[:1]", label_key=key)] for key in columns}
    del read["input"]
    assert read == {
        "single": [0.1], "half": [0.1], "list": [[0.1]], "struct": [{"x": 0.1, "y": "k"}], "decimal": [2],
        "long": ["0.1000000000000000000001"],
    }  # fmt: skip
    assert [row.label for row in Prompts(f"{tmp_path}/p.parquet", label_key="decimal")] == [2, 0.1]


def test_entries_of_a_struct(tmp_path):
    rows = [{"ground_truth": "2", "style": "rule"}, {"ground_truth": "3", "style": "rule"}]
    table = pa.table(
        {"input": ["a", "b"], "reward_model": rows, "text": list(map(json.dumps, rows)), "d.e": ["x", "y"]}
    )
    pq.write_table(table, tmp_path / "p.parquet")
    for key, labels in [
        ("reward_model.ground_truth", ["2", "3"]),
        ("text.ground_truth", ["2", "3"]),
        ("d.e", ["x", "y"]),
    ]:
        prompts = Prompts(f"{tmp_path}/p.parquet", label_key=key, metadata_key="reward_model")
        assert [row.label for row in prompts] == labels and prompts[0].metadata == rows[0]
    with pytest.raises(
        DataError, match=r"row 0: no key 'reward_model.answer' .*'reward_model.ground_truth', 'reward_model.style'"
    ):
        Prompts(f"{tmp_path}/p.parquet", label_key="reward_model.answer")
