"""Images in the results of tools: media of the conversation, or an error for a model that reads text only."""

import json

import pytest

from miles_tool_calls.functions import to_parts

REWARD = "def reward(args, sample):\n    return float(sample.index % 2)\n"
DRAW = '''
def draw(shade: int) -> object:
    """Draw a picture."""
    from PIL import Image
    return ["here it is", Image.new("RGB", (60, 60), (shade, 0, 0))]
'''


@pytest.fixture
def run(toy_run, tmp_path):
    (tmp_path / "mine.py").write_text(DRAW)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "p.jsonl").write_text(json.dumps({"input": "question"}) + "\n")

    def run(checkpoint, **options):
        given = {
            "hf_checkpoint": checkpoint,
            "prompt_data": tmp_path / "p.jsonl",
            "custom_rm_path": tmp_path / "reward.py",
            "apply_chat_template": True,
            "generate": "tools",
            "tools": f"{tmp_path}/mine.py",
            "rollout_max_response_len": 100,
            "n_samples_per_prompt": 2,
        }
        return toy_run(steps=1, **{**given, **options})

    return run


CALL = '<tool_call>{"name": "draw", "arguments": {"shade": 200}}</tool_call>'


def answer(text):
    return CALL if "<tool_response>" not in text else "It is red."


def test_a_model_that_reads_text_gets_an_error(run, checkpoint, scripted):
    scripted(answer)
    done = run(checkpoint)
    whole = "".join(done.samples[0]["pieces"])
    assert (
        "here it is\nError: the result has an image that the model cannot read: the messages have images, but this run passes"
        in whole
    )
    assert done.metrics[0]["tools/errors"] == 1 and done.metrics[0]["rollout/turns"] == 2


@pytest.fixture
def vision(checkpoint, tmp_path):
    """A tiny model that reads images, with the demonstration's tokenizer and a template for tools."""
    import transformers

    from miles_embedded.testing.image_families import IMAGE_FAMILIES
    from miles_embedded.testing.images import IMAGE_PARTS
    from miles_testing import tiny
    from miles_tools.demo.model import make_tokenizer

    tokenizer, parts = make_tokenizer(), IMAGE_PARTS["qwen2_5_vl"]
    tokenizer.add_special_tokens({"additional_special_tokens": list(parts.tokens)}, replace_extra_special_tokens=False)
    kind, values = IMAGE_FAMILIES["qwen2_5_vl"]
    text = {**values["text_config"], "vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(parts.tokens)), strict=True))
    config = getattr(transformers, kind)(**{**values, "text_config": text, **ids})
    path = tiny.random_checkpoint(config, tmp_path / "vision")
    shown = (
        "{%- for p in m.content -%}{%- if p.type == 'image' -%}MARK{%- else -%}{{ p.text }}{%- endif -%}{%- endfor -%}"
    )
    content = (
        "{%- if m.content is string -%}{{ m.content }}{%- else -%}"
        + shown.replace("MARK", parts.mark)
        + "{%- endif -%}"
    )
    tokenizer.chat_template = (checkpoint / "chat_template.jinja").read_text().replace("{{ m.content }}", content)
    tokenizer.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": parts.kind, **parts.images}))
    return path, ids["image_token_id"]


@pytest.mark.parametrize("mode", ["template", "text"])
def test_an_image_becomes_media_of_the_conversation(run, vision, scripted, monkeypatch, mode):
    from miles_embedded.engine.engine import EmbeddedEngine

    scripted(answer)
    generate, seen = EmbeddedEngine.generate, []

    async def watch(self, request):
        seen.append((list(request.tokens).count(placeholder), len(request.media)))
        self.runner.check_media(request.tokens, request.media)
        return await generate(self, request)

    monkeypatch.setattr(EmbeddedEngine, "generate", watch)
    path, placeholder = vision
    done = run(path, media=True, tool_prompt=mode, dtype="float32")
    assert {(0, 0), (4, 1)} <= set(seen)
    whole = "".join(done.samples[0]["pieces"])
    assert "here it is" in whole and whole.count("<|image_pad|>") == 4 and "Error" not in whole
    assert done.metrics[0]["tools/errors"] == 0


def test_results_without_images_are_text():
    assert to_parts(["a", 1]) is None and to_parts({"type": "text", "text": "x"}) is None
    parts = to_parts([{"type": "image_url", "image_url": {"url": "data:,x"}}, {"a": 1}])
    assert parts == [{"type": "image_url", "image_url": {"url": "data:,x"}}, {"type": "text", "text": '{"a": 1}'}]
