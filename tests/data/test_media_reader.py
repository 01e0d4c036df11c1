"""Images taken out of the rows of prompt files, and rows that are refused."""

import base64
import json
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from miles_core.data import prompts
from miles_core.data.column import TOKENS, Column
from miles_core.data.media import Media
from miles_core.data.parquet import ParquetFile
from miles_core.errors import DataError
from miles_core.rollout.queue import Prompt

Prompts = partial(prompts.Prompts, open_parquet=ParquetFile, media=True)
A, B = b"first image", b"second image"
URI = "data:image/png;base64," + base64.b64encode(B).decode()
IMAGE = {"type": "image"}


def text(value):
    return {"type": "text", "text": value}


def chat(*content):
    return [{"role": "user", "content": list(content)}]


def write(tmp_path, *rows):
    (tmp_path / "a.png").write_bytes(A)
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def contents(row):
    return [media.read() for media in row.media]


@pytest.mark.parametrize(
    ("part", "content"),
    [
        ({"type": "image_url", "image_url": {"url": URI, "detail": "low"}}, B),
        ({"type": "image_url", "image_url": "a.png"}, A),
        ({"type": "input_image", "image_url": URI}, B),
        ({"type": "image", "image": "a.png"}, A),
        ({"type": "image", "path": "a.png"}, A),
        ({"type": "image", "url": URI}, B),
        ({"image": "a.png", "text": None}, A),
    ],
)
def test_parts_of_messages_become_media(tmp_path, part, content):
    (row,) = Prompts(write(tmp_path, {"input": chat(text("What?"), part)}))
    assert row.prompt == chat(text("What?"), IMAGE) and contents(row) == [content]


def test_a_column_fills_the_places_of_the_prompt_in_order(tmp_path):
    marked = [{"role": "user", "content": "<image>left, right<image>?"}]
    parts = chat(IMAGE, text("and"), IMAGE)
    rows = Prompts(write(tmp_path, *({"input": p, "images": ["a.png", {"url": URI}]} for p in (marked, parts))))
    assert rows[0].prompt == chat(IMAGE, text("left, right"), IMAGE, text("?")) and rows[1].prompt == parts
    assert contents(rows[0]) == contents(rows[1]) == [A, B]
    assert rows[0].media == rows[1].media and len(set(rows[0].media)) == 2


def test_a_text_keeps_its_own_placeholders(tmp_path):
    (row,) = Prompts(write(tmp_path, {"input": "<|image_pad|> What?", "image": "a.png"}))
    assert row.prompt == "<|image_pad|> What?" and contents(row) == [A]


def test_bytes_of_parquet_files_and_structs_of_datasets_are_read(tmp_path):
    (tmp_path / "a.png").write_bytes(A)
    rows = [
        {"input": [{"role": "user", "content": "<image>?"}], "images": [{"bytes": B, "path": None}]},
        {"input": [{"role": "user", "content": "<image><image>"}], 
         "images": [{"bytes": bytes([255, 0]), "path": "x"}, {"bytes": None, "path": "a.png"}]},
        {"input": [{"role": "user", "content": "text only"}], "images": []},
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    found = list(Prompts(str(tmp_path / "p.parquet")))
    assert [contents(row) for row in found] == [[B], [bytes([255, 0]), A], []]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input": chat(IMAGE)}, "the prompt has 1 places for images or more, and no column holds images"),
        ({"input": chat(IMAGE, IMAGE), "images": ["a.png"]}, "2 places for images or more, and the column 'images' has fewer"),
        ({"input": chat(text("?")), "images": ["a.png"]}, "the column 'images' has 1 images and the prompt 0 places for them"),
        ({"input": chat({"type": "image", "image": "b.png"})}, r"a part of type 'image': the file .*b.png cannot be read \(No such file"),
        ({"input": chat({"type": "image_url", "image_url": {"url": "https://x.org/a.png"}})}, "the address https://x.org/a.png; download the image"),
        ({"input": chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}})}, "a data URI that is not valid base64"),
        ({"input": chat({"type": "input_image", "file_id": "f"})}, "has 'file_id'; give an image as path"),
        ({"input": chat({"type": "video", "video": "v.mp4"})}, "holds a part of type 'video', but only images are passed"),
        ({"input": chat({"type": "input_audio", "input_audio": {"data": "="}})}, "holds a part of type 'input_audio', but only images"),
        ({"input": chat(text("?")), "videos": ["v.mp4"]}, "the column 'videos' is not empty, but only images"),
        ({"input": chat(IMAGE), "images": ["a.png"], "image": "a.png"}, "the columns 'images' and 'image' hold images; keep one"),
        ({"input": chat(IMAGE), "images": [3]}, "the column 'images' holds 3; give an image"),
        ({"input": [{"role": "user", "content": "?", "images": ["a.png"]}]}, "a message holds an entry 'images'; write it as a part"),
    ],
)  # fmt: skip
def test_other_rows_are_refused_with_row_and_column(tmp_path, row, words):
    found = Prompts(write(tmp_path, {"input": "text"}, row))
    with pytest.raises(DataError, match=rf"p.jsonl:2: .*{words}"):
        found[1]


def test_a_file_that_changes_is_refused_while_the_run_reads_it_and_when_it_is_resumed(tmp_path):
    path = write(tmp_path, {"input": chat({"type": "image", "path": "a.png"})})
    first = Prompts(path)
    state, (media,) = (list(first), first.state())[1], first[0].media
    same = Prompts(path)
    list(same)
    same.load_state(state)
    (tmp_path / "a.png").write_bytes(b"another image")
    with pytest.raises(DataError, match=r"p.jsonl:1: an image of the row was changed while the run reads it"):
        first[0]
    with pytest.raises(DataError, match=r"a.png was changed after the run read it"):
        media.read()
    other = Prompts(path)
    list(other)
    with pytest.raises(DataError, match="cannot resume: the content of the images was"):
        other.load_state(state)


def test_prompts_in_use_are_saved_with_their_media():
    media = (Media.of("image", A), Media("image", "0" * 64, "/a.png"))
    prompt = Prompt(chat(IMAGE, IMAGE), Column(TOKENS, [1, 2]), None, {}, 3, media=media)
    again = Prompt.from_json(json.loads(json.dumps(prompt.to_json())), 3)
    assert again.media == media and [m.source for m in again.media] == [A, "/a.png"]
    assert all(sample.media[0] is media[0] for sample in prompt.samples(4))
