"""The model's image processor: expansion as Transformers does it, and images that are refused."""

import json
import zlib
from io import BytesIO

import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image

from miles_core.data.media import Media
from miles_core.data.prompts import PromptTemplate
from miles_core.errors import CheckpointError, DataError
from miles_embedded.manifest import IMAGES, IMAGES_SINCE
from miles_embedded.model.image_processor import MOST_PIXELS, make_processor
from miles_embedded.testing.images import draw_image, image, vision_checkpoint, vision_tokenizer
from miles_testing.tiny import tiny_checkpoint

READS = [kind for kind in IMAGES if Version(transformers.__version__) >= Version(IMAGES_SINCE[kind])]
pytestmark = pytest.mark.skipif(
    "qwen2_5_vl" not in READS,
    reason=f"embedded cannot run a model of type qwen2_5_vl with Transformers {transformers.__version__} and images",
)

CHAT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "A"}, {"type": "image"}]}]


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    path = vision_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model"))
    return make_processor(path, vision_tokenizer("qwen2_5_vl"))


@pytest.fixture
def render(processor):
    template = PromptTemplate(vision_tokenizer("qwen2_5_vl"), apply_chat_template=True)
    template.media = processor.expand
    return template


def png(**options):
    buffer = BytesIO()
    Image.new("RGB", (60, 60)).save(buffer, options.pop("format", "PNG"), **options)
    return buffer.getvalue()


def test_prompts_have_the_tokens_and_inputs_of_transformers(render, processor):
    media = (image(1), image(2, 90, 60))
    tokens = render(CHAT, media=media)
    text = render.renderer.text(CHAT)
    pictures = [Image.open(BytesIO(m.source)).convert("RGB") for m in media]
    expected = processor.processor(text=[text], images=pictures, return_tensors="pt")
    assert tokens == expected["input_ids"][0].tolist() and tokens.count(60) == 4 + 6
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(torch.cat([processor.inputs(m)[name] for m in media]), expected[name])


@pytest.mark.parametrize("family", [family for family in READS if not family.startswith("qwen")])
def test_prompts_of_every_family_have_the_tokens_of_transformers(family, tmp_path):
    if family == "mistral3":
        pytest.importorskip("torchvision")
    made = make_processor(vision_checkpoint(family, tmp_path), vision_tokenizer(family))
    media = (image(1), image(2, 90, 60))
    template = PromptTemplate(vision_tokenizer(family), apply_chat_template=True)
    template.media = made.expand
    pictures = [Image.open(BytesIO(m.source)).convert("RGB") for m in media]
    expected = made.processor(text=[template.renderer.text(CHAT)], images=[pictures], return_tensors="pt")
    assert template(CHAT, media=media) == expected["input_ids"][0].tolist()


def test_a_placeholder_that_a_user_writes_is_text(render):
    injected = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "<|image_pad|>"}]}]
    assert render(injected, media=(image(1),)).count(60) == 4


@pytest.mark.parametrize("media", [(), (image(1),), (image(1), image(2), image(3))])
def test_other_numbers_of_images_than_placeholders_are_refused(render, media):
    with pytest.raises(DataError, match=rf"has 2 placeholders \(<\|image_pad\|>\) for {len(media)} images"):
        render(CHAT, media=media)


def test_a_text_with_a_placeholder_is_expanded_without_a_chat_template(processor):
    template = PromptTemplate(vision_tokenizer("qwen2_5_vl"))
    template.media = processor.expand
    assert template("A<|image_pad|>B", media=(image(1),)) == [35, 60, 60, 60, 60, 36]
    with pytest.raises(DataError, match=r"has 1 placeholders .* for 0 images"):
        template("A<|image_pad|>B")


def test_images_for_a_run_on_text_are_refused():
    with pytest.raises(DataError, match="the prompt has media, but the engine of this run accepts only text"):
        PromptTemplate(vision_tokenizer("qwen2_5_vl"))("A", media=(image(1),))


def bomb():
    """A PNG of a few hundred bytes that claims 100,000 x 100,000 pixels."""
    header = (100_000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])

    def chunk(name, data):
        return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")

    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (draw_image(1)[:-500], "cannot be decoded (.*); it must be a complete file"),
        (b"no image", r"an image of 8 bytes cannot be decoded \(cannot identify image file"),
        (b"", "cannot be decoded"),
        (bomb(), "has 100000 x 100000 pixels|has more pixels than"),
        (png(format="GIF", save_all=True, append_images=[Image.new("RGB", (60, 60), "red")]), r"is animated \(2 frames\); save one frame"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be decoded"),
    ],
    ids=["truncated", "text", "empty", "bomb", "animated", "program"],
)  # fmt: skip
def test_files_that_cannot_be_read_are_refused(processor, content, words):
    with pytest.raises(DataError, match=words):
        processor.expand("<|image_pad|>", (Media.of("image", content),))


def test_large_images_are_refused_before_they_are_decoded(processor):
    buffer = BytesIO()
    Image.new("1", (8001, MOST_PIXELS // 8000)).save(buffer, "PNG")
    with pytest.raises(DataError, match=r"has 8001 x 8000 pixels, more than 64,000,000; make it smaller"):
        processor.expand("<|image_pad|>", (Media.of("image", buffer.getvalue()),))


def test_an_extremely_narrow_image_is_refused(processor):
    with pytest.raises(DataError, match="the processor of this model refuses"):
        processor.expand("<|image_pad|>", (Media.of("image", draw_image(1, 2000, 2)),))


def test_models_and_checkpoints_without_image_processor_are_refused(tmp_path):
    path = tiny_checkpoint("qwen3", tmp_path / "text")
    with pytest.raises(CheckpointError, match="--media: a model of type qwen3 reads no images"):
        make_processor(path, vision_tokenizer("qwen2_5_vl"))
    path = vision_checkpoint("qwen2_5_vl", tmp_path / "images")
    (path / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"its image processor cannot be loaded .*copy preprocessor_config.json"):
        make_processor(path, vision_tokenizer("qwen2_5_vl"))


def test_the_class_that_the_files_name_is_used(tmp_path):
    """LLaVA with Pixtral's tower has Pixtral's processor."""
    path = vision_checkpoint("llava", tmp_path)
    values = json.loads((path / "processor_config.json").read_text())
    (path / "processor_config.json").write_text(json.dumps({**values, "processor_class": "LlavaNextProcessor"}))
    assert type(make_processor(path, vision_tokenizer("llava")).processor).__name__ == "LlavaNextProcessor"
