"""Observations with pictures: how they are read, and a run whose model sees them."""

import json

import pytest
import transformers
from packaging.version import Version

from miles_core.data import Media
from miles_core.plugin import DataError
from miles_embedded.testing.images import draw_image, vision_checkpoint
from miles_environments.observation import read_observation

PICTURES = '''
from io import BytesIO
from miles_embedded.testing.images import draw_image
from miles_environments import Environment, Episode, Step, Task

class Pictures(Environment):
    """A picture for every answer; the second of Pillow, a third that is no image."""

    several_turns = True

    def __init__(self, seed, broken=False):
        self.broken = broken

    def task(self, number, level):
        return Task()

    def open(self, number, level):
        return Showing(number, self.broken)

class Showing(Episode):
    def __init__(self, number, broken):
        self.number, self.broken, self.at = number, broken, 0

    def reset(self):
        return ["A ", draw_image(self.number), " B"]

    def step(self, action):
        from PIL import Image

        self.at += 1
        picture = b"no image" if self.broken else Image.open(BytesIO(draw_image(self.number + self.at, 90, 60)))
        return Step(["C", picture], self.at, self.at == 2)
'''
reads = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="images need Transformers 5.24 or later"
)


def test_texts_and_pictures_become_a_content():
    from PIL import Image

    assert read_observation("a" * 9, 3, False) == "aaa\n[6 more characters were cut]"
    assert read_observation(["a", "b"], 3, False) == "ab"
    picture = draw_image(1)
    text, one, two = read_observation(["abcd", picture, Image.new("RGB", (2, 2))], 3, True)
    assert text["text"].startswith("abc\n") and one == {"type": "image", "media": Media.of("image", picture)}
    assert two["media"].read().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "images", "words"),
    [
        (None, True, "is None; it must be a text, or a list of texts and pictures"),
        ([], True, r"is \[\]; it must be a text"),
        ([3], True, "holds 3; a picture is one of Pillow, or the bytes of an image file"),
        ([b"x"], False, "has a picture, and this run passes only text to the model; give --media"),
    ],
)
def test_what_is_no_observation_is_refused(given, images, words):
    with pytest.raises(DataError, match=words):
        read_observation(given, 9, images)


@pytest.fixture
def pictures(toy_run, tmp_path):
    (tmp_path / "own.py").write_text(PICTURES)
    checkpoint = vision_checkpoint("qwen2_5_vl", tmp_path / "model")
    config = json.loads((checkpoint / "config.json").read_text())

    def run(more="", **options):
        given = {"hf_checkpoint": checkpoint, "prompt_data": None, "custom_rm_path": None, "generate": "environments"}
        given |= {
            "environments": f"file:{tmp_path / 'own.py'}:Pictures{more}",
            "apply_chat_template": True,
            "media": True,
        }
        given |= {"rollout_max_response_len": 4, "n_samples_per_prompt": 2, "dtype": "float32", "steps": 1}
        return toy_run(**{**given, **options})

    assert config["image_token_id"] == 60
    return run


@pytest.fixture
def ends(monkeypatch):
    """The engine of the model, whose answers end as if it had sampled the end of text."""
    from dataclasses import replace

    from miles_embedded.engine.engine import EmbeddedEngine

    generate, seen = EmbeddedEngine.generate, []

    async def end(self, request):
        self.runner.check_media(request.tokens, request.media)
        seen.append((list(request.tokens).count(60), len(request.media)))
        found = await generate(self, request)
        return replace(found, finish="stop")

    monkeypatch.setattr(EmbeddedEngine, "generate", end)
    return seen


@reads
def test_a_model_sees_the_pictures_of_its_episode(pictures, ends):
    done = pictures()
    assert {media for _, media in ends} == {1, 2} and all(places > 0 for places, _ in ends)
    assert done.metrics[0]["environments/turns"] == 2 and done.metrics[0]["environments/failed_episodes"] == 0
    assert done.metrics[0]["reward/mean"] == 3.0
    sample = done.samples[0]
    assert [part["type"] for part in sample["prompt"][0]["content"]] == ["text", "image", "text"]


@reads
def test_a_picture_that_cannot_be_read_costs_its_sample(pictures, ends, caplog):
    with pytest.raises(DataError):  # no sample is left
        pictures("?broken=true")
    assert "fails: the environment Pictures, task 0: an image of 8 bytes cannot be decoded" in caplog.text
