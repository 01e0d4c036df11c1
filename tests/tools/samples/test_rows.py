"""Images of saved samples: those without a file are stored once, and the oldest are deleted beyond the limit."""

import asyncio
import hashlib
import os

from miles_core.data.media import Media
from miles_core.data.sample import Sample
from miles_tools.samples.files import read_rollouts
from miles_tools.samples.rows import forget_media, store_media
from miles_tools.samples.saver import SampleSaver


class Tokenizer:
    def decode(self, tokens):
        return "x"

    def convert_ids_to_tokens(self, token):
        return "x"


def make_sample(*media):
    return Sample(prompt="p", tokens=[1, 2], response="x", response_length=1, media=media)


def test_a_saved_sample_names_its_images_and_their_content_is_stored_once(tmp_path):
    file = tmp_path / "picture.png"
    file.write_bytes(b"of a file")
    here, there = Media.of("image", b"of a column"), Media.of("image", file)
    saver = SampleSaver(tmp_path / "run", Tokenizer(), 1 << 20)
    samples = [(make_sample(here, there), None, ""), (make_sample(here), None, ""), (make_sample(), None, "")]
    asyncio.run(saver.write_samples("train", 1, samples))
    saver.close()
    digest = hashlib.sha256(b"of a column").hexdigest()
    stored = {path.name: path.read_bytes() for path in (tmp_path / "run/rollouts/media").iterdir()}
    assert stored == {digest: b"of a column"}
    rows = list(read_rollouts(tmp_path / "run"))
    in_file = {"kind": "image", "digest": there.digest, "path": str(file)}
    assert [row.get("media") for row in rows] == [
        [{"kind": "image", "digest": digest}, in_file],
        [{"kind": "image", "digest": digest}],
        None,
    ]


def test_images_that_were_not_used_for_longest_are_deleted(tmp_path):
    images = [Media.of("image", bytes([n]) * 100) for n in range(4)]
    for number, image in enumerate(images):
        store_media(tmp_path, [make_sample(image)])
        os.utime(tmp_path / image.digest, (number, number))
    store_media(tmp_path, [make_sample(images[0])])  # used again
    forget_media(tmp_path, 250)
    assert {path.name for path in tmp_path.iterdir()} == {images[0].digest, images[3].digest}
    forget_media(tmp_path / "none", 0)
