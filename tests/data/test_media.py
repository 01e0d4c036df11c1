"""Images, video and sound: no row that holds one becomes a prompt."""

import json
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from miles_core.data import prompts
from miles_core.data.media import find_media, is_media_key
from miles_core.data.parquet import ParquetFile
from miles_core.errors import DataError

Prompts = partial(prompts.Prompts, open_parquet=ParquetFile)

TEXT = [{"role": "user", "content": [{"type": "text", "text": "What is 1 + 1?"}]}]


def chat(*parts, **more):
    return [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, *parts], **more}]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (chat({"type": "image"}), "a part of type 'image'"),
        (chat({"type": "image_url", "image_url": {"url": "data:"}}), "a part of type 'image_url'"),
        (chat({"type": "input_image", "file_id": "f"}), "a part of type 'input_image'"),
        (chat({"type": "video", "video": "v.mp4"}), "a part of type 'video'"),
        (chat({"type": "input_audio", "input_audio": {"data": "="}}), "a part of type 'input_audio'"),
        (chat({"image": "cat.png"}), "an entry 'image'"),
        (chat({"type": "tool_result", "content": [{"type": "image", "source": {}}]}), "a part of type 'image'"),
        (chat(images=["cat.png"]), "an entry 'images'"),
        (chat(audio={"path": "a.wav", "bytes": None}), "an entry 'audio'"),
        (chat(pixel_values=[[0.0]]), "an entry 'pixel_values'"),
    ],
)
def test_a_chat_with_media_is_refused_with_row_and_column(tmp_path, prompt, words):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"messages": p}) + "\n" for p in (TEXT, prompt)))
    with pytest.raises(
        DataError, match=rf"p.jsonl:2: the prompt 'messages' holds {words}, but a run passes only text to a model"
    ):
        Prompts(str(path), input_key="messages")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("images", ["cat.png"]),
        ("image", {"bytes": "=", "path": None}),
        ("videos", ["v.mp4"]),
        ("audio_path", "a.wav"),
        ("pixel_values", [[0.5]]),
        ("image_grid_thw", [[1, 2, 2]]),
        ("input_features", [[0.5]]),
        ("multi_modal_data", {"image": ["cat.png"]}),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_with_media_is_refused_unless_it_is_empty(tmp_path, kind, column, value):
    def stored(name, last):
        rows = [{"input": "a", column: None}, {"input": "b", column: last}]
        path = tmp_path / f"{name}.{kind}"
        if kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pq.write_table(pa.Table.from_pylist(rows), path)
        return str(path)

    assert len(Prompts(stored("empty", [] if isinstance(value, list) else None))) == 2
    full = stored("full", value)
    with pytest.raises(
        DataError, match=rf"full.*(:2|row 1): the column '{column}' is not empty, but a run passes only text"
    ):
        Prompts(full)
    assert len(Prompts(f"{full}@[:1]")) == 1


def test_text_is_no_media():
    assert not find_media(TEXT) and not find_media(chat({"type": "text", "text": "an image"}, images=[], image=None))
    assert not find_media([{"role": "user", "content": "<image> type: video", "tools": [{"type": "image_search"}]}])
    assert not any(map(is_media_key, ("input", "prompt", "speech", "text", "label", "imagery", "metadata", "answer")))
