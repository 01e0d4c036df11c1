import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.data.prompt_source import Row
from miles_core.data.prompts import Prompts, epoch_order
from miles_core.errors import DataError


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def ten(tmp_path):
    rows = [{"input": f"q{i}", "answer": str(i), "metadata": {"i": i}} for i in range(10)]
    return write(tmp_path / "ten.jsonl", rows)


def names(rows):
    return [row.prompt for row in rows]


def test_rows_of_a_jsonl_file(ten):
    prompts = Prompts(ten, label_key="answer")
    assert len(prompts) == 10
    row = prompts.next(3)[2]
    assert (row.prompt, row.label, row.metadata, row.index, row.place) == ("q2", "2", {"i": 2}, 2, f"{ten}:3")
    assert Prompts(ten)[4].label is None
    assert names(prompts) == [f"q{i}" for i in range(10)]


def test_blank_lines_a_byte_order_mark_and_any_text(tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_bytes("\ufeff".encode() + '{"input": "ä\\u2028b"}\r\n\n{"input": "c d"}'.encode())
    prompts = Prompts(str(path))
    assert names(prompts) == ["ä\u2028b", "c d"]
    assert prompts[1].place == f"{path}:3"


@pytest.mark.parametrize("shuffle", [False, True])
@given(sizes=st.lists(st.integers(0, 13), max_size=6), then=st.integers(0, 25))
@settings(max_examples=25)
def test_resuming_continues_exactly(shuffle, sizes, then, tmp_path_factory):
    path = write(tmp_path_factory.mktemp("d") / "d.jsonl", [{"input": f"q{i}"} for i in range(10)])
    prompts = Prompts(path, shuffle=shuffle, seed=3)
    for size in sizes:
        assert len(prompts.next(size)) == size
    state = json.loads(json.dumps(prompts.state()))
    resumed = Prompts(path, shuffle=shuffle, seed=3)
    resumed.load_state(state)
    assert names(resumed.next(then)) == names(prompts.next(then))
    assert resumed.state() == prompts.state()


def test_every_epoch_has_every_row_once_in_another_order(ten):
    prompts = Prompts(ten, shuffle=True, seed=1)
    first, second = names(prompts.next(10)), names(prompts.next(10))
    assert prompts.epoch == 2
    assert sorted(first) == sorted(second) == [f"q{i}" for i in range(10)]
    assert first != second
    assert names(Prompts(ten, shuffle=True, seed=2).next(10)) != first


def test_the_order_of_an_epoch_never_changes():
    assert epoch_order(8, seed=1234, epoch=0).tolist() == [6, 2, 7, 1, 5, 0, 4, 3]


def test_resuming_with_other_data_is_refused(ten, tmp_path):
    state = Prompts(ten, shuffle=True, seed=1).state()
    other = write(tmp_path / "other.jsonl", [{"input": f"z{i}"} for i in range(10)])
    for prompts, message in [
        (Prompts(f"{ten}@[:9]", shuffle=True, seed=1), "the number of prompts was 10 .* and is 9 now"),
        (Prompts(other, shuffle=True, seed=1), "the content of the prompt files"),
        (Prompts(ten, seed=1), "--rollout-shuffle was True"),
        (Prompts(ten, shuffle=True, seed=2), "--seed, by which prompts are shuffled, was 1 .* is 2 now"),
    ]:
        with pytest.raises(DataError, match=message):
            prompts.load_state(state)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"input": "a"}\n{"input": \n', r":2: malformed JSON: Expecting value at column"),
        ('[{"input": "a"},\n', r":1: malformed JSON.*one object per line"),
        ('{"input": "a"}\n["a"]\n', r":2: a row must be a JSON object with keys, this is an array"),
        ('{"prompt": "a", "x": 1}\n', r":1: no key 'input' for the prompt; choose --input-key from: 'prompt', 'x'"),
        ('{"input": ""}\n', r":1: the prompt 'input' is empty"),
        ('{"input": []}\n', r":1: the prompt 'input' is empty"),
        ('{"input": 3}\n', r":1: the prompt 'input' is 3; it must be a text, or a list of messages"),
        ('{"input": ["a"]}\n', r":1: the prompt 'input' is \['a'\]"),
        ('{"input": "a", "metadata": "m"}\n', r":1: the metadata 'metadata' must be an object, this is 'm'"),
        ("\n\n", r"has no prompts: the data set is empty"),
    ],
)
def test_malformed_files(tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as error:
        Prompts(str(path))
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "b"}, ":2: no key 'answer' for the label; .* from: 'input'"),
        ({"input": "b", "answer": None}, ":2: .*null"),
    ],
)
def test_a_label_missing_on_one_row(tmp_path, row, message):
    path = write(tmp_path / "d.jsonl", [{"input": "a", "answer": 0}, row])
    with pytest.raises(DataError, match=message):
        Prompts(path, label_key="answer")
    assert len(Prompts(path)) == 2
    assert len(Prompts(f"{path}@[:1]", label_key="answer")) == 1


def test_files_that_are_none(tmp_path):
    with pytest.raises(DataError, match=r"there is no prompt file .*gone.jsonl"):
        Prompts(str(tmp_path / "gone.jsonl"))
    with pytest.raises(DataError, match="is a directory"):
        Prompts(str(tmp_path))
    (tmp_path / "p.txt").write_text("x")
    with pytest.raises(DataError, match=r"not \.txt"):
        Prompts(str(tmp_path / "p.txt"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"input": "\xe4"}\n')
    with pytest.raises(DataError, match=r"latin.jsonl:1: not UTF-8"):
        Prompts(str(tmp_path / "latin.jsonl"))
    with pytest.raises(DataError, match="empty"):
        Prompts([])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (r'{"input": "a\ud83d"}', r"d.jsonl:1: 'input' holds half of a surrogate pair"),
        (r'{"input": "a", "label": {"b": "\udc00"}}', r"d.jsonl:1: 'label' holds half"),
        ('{"input": "a", "label": ' + "7" * 5000 + "}", r"d.jsonl:1: this JSON cannot be read"),
        ('{"input": "a", "label": ' + "[" * 100_000 + "]" * 100_000 + "}", r"d.jsonl:1: this JSON cannot be read"),
    ],
    ids=["prompt", "label", "digits", "brackets"],
)
def test_rows_that_no_tokenizer_or_file_takes(tmp_path, row, message):
    (tmp_path / "d.jsonl").write_text(row + "\n")
    with pytest.raises(DataError, match=message):
        Prompts(str(tmp_path / "d.jsonl"), label_key="label" if "label" in row else None)


def test_a_file_may_go_away_while_it_is_read_and_may_not_change(tmp_path):
    path = tmp_path / "ten.jsonl"
    write(path, [{"input": f"q{i}"} for i in range(10)])
    prompts, before = Prompts(str(path)), path.read_bytes()
    path.write_bytes(before)  # written again, with the same rows
    assert names(prompts.next(2)) == ["q0", "q1"]
    path.write_bytes(before.replace(b"q", b"z"))
    with pytest.raises(DataError, match=r"ten.jsonl was changed while the run reads it"):
        prompts.next(1)
    path.write_bytes(before)
    path.unlink()
    assert prompts[4].prompt == "q4"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ten.jsonl@[a:b]", r"; ten.jsonl is there: write a part as @\[a:b\], with whole numbers"),
        ("https://x.org/p.jsonl", "no prompt file https://x.org/p.jsonl .*it is an address: download the file"),
        ("x" * 300, "names no prompt file: .*File name too long"),
    ],
)
def test_names_that_are_no_file(ten, tmp_path, monkeypatch, spec, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        Prompts(spec)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '{"low": NaN}', "[1, NaN]"])
@pytest.mark.parametrize("key", ["answer", "metadata"])
def test_numbers_that_are_not_finite_are_refused(tmp_path, key, value):
    path = tmp_path / "p.jsonl"
    row = {"input": '"a"', "answer": "1", "metadata": "{}", key: value}
    bad = ", ".join(f'"{name}": {text}' for name, text in row.items())
    path.write_text('{"input": "a", "answer": "1"}\n{' + bad + "}\n")
    with pytest.raises(DataError, match=rf"p.jsonl:2: '{key}' holds NaN or an infinite number"):
        Prompts(str(path), label_key="answer")


@pytest.mark.parametrize("row", ['{"input": "a", "input": "b"}', '{"input": "a", "metadata": {"k": 1, "k": 2}}'])
def test_a_key_that_occurs_twice_is_refused(tmp_path, row):
    path = tmp_path / "p.jsonl"
    path.write_text('{"input": "a"}\n' + row + "\n")
    with pytest.raises(DataError, match=r"p.jsonl:2: .*the key '(input|k)' occurs 2 times in one object"):
        Prompts(str(path))


@pytest.mark.parametrize(
    ("row", "key", "label"),
    [
        ({"a": {"b": "2"}}, "a.b", "2"),
        ({"a": {"b": {"c": 0}}}, "a.b.c", 0),
        ({"a": '{"b": [1]}'}, "a.b", [1]),
        ({"a": {"b": '{"c": "2"}'}}, "a.b.c", "2"),
        ({"a.b": "1", "a": {"b": "2"}}, "a.b", "1"),
        ({"a.b": {"c": "1"}, "a": {"b.c": "2"}}, "a.b.c", "1"),
        ({"a": {"b.c": "2"}}, "a.b.c", "2"),
        ({"a": {"b": "2"}}, "a", {"b": "2"}),
    ],
)
def test_a_key_reaches_into_mappings(tmp_path, row, key, label):
    path = write(tmp_path / "d.jsonl", [{"input": "q"} | row])
    assert Prompts(path, label_key=key)[0].label == label
    prompt = Prompts(
        write(tmp_path / "p.jsonl", [{"x": {"q": "text", "m": {"k": 1}}}]), input_key="x.q", metadata_key="x.m"
    )
    assert (prompt[0].prompt, prompt[0].metadata) == ("text", {"k": 1})


@pytest.mark.parametrize("row", [{"a": {"c": 1}}, {"a": "b"}, {"a": '{"b"'}, {"a": [{"b": 1}]}, {"a": None}, {"b": 1}])
def test_a_key_of_a_mapping_that_is_missing(tmp_path, row):
    path = write(tmp_path / "d.jsonl", [{"input": "q", "a": {"b": 1}}, {"input": "q"} | row])
    with pytest.raises(DataError, match=r":2: no key 'a\.b' for the label; choose --label-key from: 'input'"):
        Prompts(path, label_key="a.b")


def test_a_subclass_reads_other_columns(ten):
    class Answers(Prompts):
        def check(self, row, place):
            if "answer" not in row:
                raise DataError(f"{place}: no answer")

        def convert(self, row, at, place):
            return Row(prompt=row["answer"], index=at, place=place)

    prompts = Answers(ten, columns=("answer",))
    assert names(prompts.next(2)) == ["0", "1"] and prompts.state()["offset"] == 2
