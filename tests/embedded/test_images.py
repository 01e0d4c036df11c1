"""Images in engine, trainer and run, compared with Transformers' own generation and forward."""

from __future__ import annotations

import asyncio
import inspect
import json

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from miles_core.contracts.engine import Request, Sampling
from miles_core.contracts.trainer import Callbacks
from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_core.errors import MilesError
from miles_core.plugin.facts import Fact, Facts
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.manifest import IMAGES, IMAGES_SINCE, review
from miles_embedded.model.image_processor import make_processor
from miles_embedded.model.load import load_model
from miles_embedded.testing.images import IMAGE_PARTS, draw_image, image, vision_checkpoint, vision_tokenizer
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig

READS = [kind for kind in IMAGES if Version(transformers.__version__) >= Version(IMAGES_SINCE[kind])]
pytestmark = pytest.mark.skipif(
    "qwen2_5_vl" not in READS,
    reason=f"embedded cannot run a model of type qwen2_5_vl with Transformers {transformers.__version__} and images",
)

A, B, C = image(1), image(2, 90, 60), image(3)


class Case:
    """A tiny model in both implementations, and its processor."""

    def __init__(self, family, directory):
        self.path = vision_checkpoint(family, directory)
        self.tokenizer, self.mark = vision_tokenizer(family), IMAGE_PARTS[family].mark
        self.processor = make_processor(self.path, self.tokenizer)
        load = AutoModelForImageTextToText.from_pretrained
        self.reference = load(self.path, dtype=torch.float32, attn_implementation="eager").eval()
        self.arguments = inspect.signature(type(self.reference).forward).parameters

    def prompt(self, text, *media):
        return self.tokenizer.encode(self.processor.expand(text, media))

    def inputs(self, tokens, media):
        """Return the arguments of Transformers' own forward."""
        ids = torch.tensor([list(tokens)])
        found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if media:
            given = [self.processor.inputs(m) for m in media]
            found |= {name: torch.cat(pad_sides([g[name] for g in given])) for name in given[0]}
            kinds = ("mm_token_type_ids", "token_type_ids")
            found |= {name: (ids == 60).int() for name in kinds if name in self.arguments}
        return found


def pad_sides(tensors):
    """Pad pixel values of several images to common sides, as Pixtral's processor does."""
    if tensors[0].dim() < 4:
        return tensors
    height, width = (max(t.shape[axis] for t in tensors) for axis in (-2, -1))
    return [torch.nn.functional.pad(t, (0, width - t.shape[-1], 0, height - t.shape[-2])) for t in tensors]


@pytest.fixture(scope="module", params=READS)
def case(request, tmp_path_factory):
    if request.param == "mistral3":
        pytest.importorskip("torchvision")
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def make_engine(case, **more):
    settings = Settings(str, eos=[], max_running_requests=4, max_context=100, processor=case.processor, **more)
    return EmbeddedEngine(load_model(case.path, "float32"), settings)


def ask(engine, *requests):
    async def main():
        return await asyncio.gather(*map(engine.generate, requests))

    return asyncio.run(main())


def request(tokens, key, *media, count=8):
    return Request(tokens, Sampling(count, temperature=0, ignore_eos=True), key=key, media=media)


def test_generation_equals_that_of_transformers(case):
    one, two = case.prompt(f"HI{case.mark}HOW?", A), case.prompt(f"X{case.mark}A{case.mark}", B, A)
    requests = [
        request(one, 0, A), request(one, 1, C), request(two, 2, B, A), request([3, 4, 5], 3), request(one, 4, A, count=5),
    ]  # fmt: skip
    for asked, found in zip(requests, ask(make_engine(case), *requests), strict=True):
        count = asked.sampling.max_new_tokens
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "eos_token_id": None}
        made = case.reference.generate(
            **case.inputs(asked.tokens, asked.media), **options, output_logits=True, return_dict_in_generate=True
        )
        expected = torch.cat(made.logits).log_softmax(-1).max(1)
        assert list(found.tokens) == expected.indices.tolist()
        torch.testing.assert_close(torch.tensor(found.log_probs).float(), expected.values, rtol=0, atol=1e-5)


def test_scores_of_given_text_equal_those_of_transformers(case):
    engine, media = make_engine(case), [(B, A), (), (A,)]
    sequences = [
        [*case.prompt(f"X{case.mark}A{case.mark}", B, A), 7, 60, 9],
        [3, 4, 5],
        case.prompt(f"{case.mark}?", A),
    ]
    scored = asyncio.run(engine.score(sequences, 1.0, media))
    sequences[0], scored[0] = (
        sequences[0][:-2],
        scored[0][:-2],
    )  # Transformers would look for an image of the last placeholder
    for tokens, items, found in zip(sequences, media, scored, strict=True):
        with torch.no_grad():
            logits = case.reference(**case.inputs(tokens, items)).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found), expected, rtol=4e-6, atol=1e-5)
    with pytest.raises(MilesError, match="placeholder tokens"):
        asyncio.run(engine.score([[3, 4]], 1.0, [(A,)]))


def test_a_prefix_is_shared_by_tokens_and_digests(case):
    engine = make_engine(case)
    tokens = case.prompt(f"{case.mark}?", A)

    async def main():
        keys = [request(tokens, key, media, count=20) for key, media in enumerate((A, A, C))]
        calls = [asyncio.ensure_future(engine.generate(r)) for r in keys]
        while not engine.rows:
            await asyncio.sleep(0)
        held = engine.runner.cache.prefixes.size
        await engine.pause("retract")  # computes prompts and responses again
        await engine.resume()
        return held, [await call for call in calls]

    held, (first, second, other) = asyncio.run(main())
    assert held == 2 and first.tokens == second.tokens and first.log_probs[0] != other.log_probs[0]
    (again,) = ask(make_engine(case), request(tokens, 0, A, count=20))
    assert again.tokens == first.tokens


def test_requests_that_the_engine_cannot_read_are_refused(case):
    tokens = case.prompt(f"{case.mark}?", A)
    with pytest.raises(MilesError, match=r"has 0 placeholder tokens \(60\) for 1 images, which need \d+ in"):
        ask(make_engine(case), request([3, 4], 0, A))
    text = EmbeddedEngine(load_model(case.path, "float32"), Settings(str, max_context=100))
    with pytest.raises(MilesError, match="this engine was built for text; start the run with --media"):
        ask(text, request(tokens, 0, A))


def make_samples(case):
    """Make groups with and without images; the last two differ only in their image."""
    prompts = [
        (case.prompt(f"HI{case.mark}HOW?", A), [(A,), (A,)]),
        (case.prompt(f"X{case.mark}A{case.mark}", B, A), [(B, A)]),
        ([3, 4, 5], [(), ()]),
        (case.prompt(f"HI{case.mark}HOW?", A), [(C,), (A,)]),
    ]
    draw, found = torch.Generator().manual_seed(3), []
    for group, (tokens, all_media) in enumerate(prompts):
        for media in all_media:
            tail = torch.randint(2, 60, (3 + len(found),), generator=draw).tolist()
            found.append(Sample(tokens=tokens + tail, response_length=len(tail), group_index=group, index=len(found)))
            found[-1].media = media
    return found


@pytest.mark.parametrize("tower", [False, True])
def test_log_probs_and_gradients_equal_those_of_transformers(case, tower):
    samples, model = make_samples(case), load_model(case.path, "float32", train_towers=tower)
    trainer = EmbeddedTrainer(model, TrainerConfig(OptimizerConfig(), recompute=tower), processor=case.processor)
    trainer.bind(Callbacks(trainer.forward, None, trainer.optimizer_step))
    micro, ctx = trainer.prepare(collate(samples), list(range(len(samples))), "train", False)
    output = trainer.forward(model, micro, ctx)
    factors = torch.randn(len(micro.tokens), generator=torch.Generator().manual_seed(4))
    (output.log_probs * factors).sum().backward()
    case.reference.zero_grad()
    start = 0
    for sample in samples:
        ids = torch.tensor(list(sample.tokens))
        logits = case.reference(**case.inputs(sample.tokens, sample.media)).logits[0]
        expected = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[sample.prompt_length - 1 :, 0]
        own = slice(start + sample.prompt_length, start + len(ids))
        torch.testing.assert_close(output.log_probs[own], expected, rtol=4e-6, atol=1e-5)
        (expected * factors[own]).sum().backward()
        start += len(ids)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    wanted = {n: p.grad for n, p in case.reference.named_parameters() if p.grad is not None}
    language = {n for n in wanted if n.startswith(("model.language_model.", "lm_head."))}
    assert found.keys() == (wanted.keys() if tower else language) and language < wanted.keys()
    scale = max(float(g.abs().max()) for g in wanted.values())
    assert all(torch.allclose(found[n], wanted[n], rtol=1e-4, atol=1e-5 * scale) for n in found)
    assert len(ctx.rows) < len(micro.tokens)  # siblings with the same images share their prompt


def test_a_placeholder_that_the_model_samples_is_a_token(case):
    """Its embedding is its own, in the prompt that continues it too."""
    tokens = case.prompt(f"{case.mark}?", A)
    sample = Sample(tokens=[*tokens, 60, 7, 9], response_length=3, media=(A,))
    trainer = EmbeddedTrainer(load_model(case.path, "float32"), TrainerConfig(), processor=case.processor)
    trainer.bind(Callbacks(trainer.forward, None, trainer.optimizer_step))
    scored = trainer.log_probs(collate([sample]), "old")["log_probs"][-1]
    (found,) = ask(make_engine(case), request([*tokens, 60, 7], 0, A, count=1))
    inputs = case.inputs(tokens, (A,))
    with torch.no_grad():
        out = case.reference(**inputs, use_cache=True)
        positions = [torch.tensor([[len(tokens) + step]]) for step in range(2)]
        if hasattr(case.reference.model, "get_rope_index"):
            names = ("mm_token_type_ids", "image_grid_thw")
            last = case.reference.model.get_rope_index(inputs["input_ids"], **{n: inputs[n] for n in names})[0].max()
            positions = [(last + 1 + step).expand(3, 1, 1) for step in range(2)]
        for token, position in zip((60, 7), positions, strict=True):
            name = "cache" if "cache" in out else "past_key_values"  # before Transformers 5.24
            cache = {name: out[name]}
            out = case.reference(input_ids=torch.tensor([[token]]), position_ids=position, **cache)
    expected = out.logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(scored, expected[9], rtol=0, atol=1e-5)
    assert list(found.tokens) == [int(expected.argmax())]


def write_run(case, folder):
    rows = []
    for i in range(4):
        (folder / f"{i}.png").write_bytes(draw_image(i))
        part = {"type": "image_url", "image_url": {"url": f"{i}.png"}}
        rows.append({"input": [{"role": "user", "content": [part, {"type": "text", "text": "HOW MANY?"}]}]})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "hf_checkpoint": case.path,
        "prompt_data": folder / "prompts.jsonl",
        "label_key": None,
        "apply_chat_template": True,
        "media": True,
        "dtype": "float32",
    }


def checkpoint_tensors(directory):
    root = directory / "checkpoints" / "step_00000002"
    return {(p.name, n): t for p in sorted(root.rglob("*.safetensors")) for n, t in load_file(p).items()}


def test_a_run_agrees_with_its_engine_and_continues_as_if_it_had_not_stopped(toy_run, tmp_path, tmp_path_factory):
    case = Case("qwen2_5_vl", tmp_path_factory.mktemp("run"))
    options = write_run(case, tmp_path) | {"train_vision_tower": True}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run = toy_run(directory=whole, steps=2, **options)
    assert len(run.metrics) == 2 and all(record["mismatch/abs_log_prob_max"] < 2e-4 for record in run.metrics)
    toy_run(directory=parts, steps=1, **options)
    toy_run(directory=None, load=parts, save=None, steps=2, **options)
    one, two = checkpoint_tensors(whole), checkpoint_tensors(parts)
    assert one and one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


@pytest.mark.parametrize(
    ("family", "plugins", "more"),
    [
        ("qwen2_5_vl", ["lora"], {"lora_rank": 4}),
        ("qwen3_vl_moe", ["r3"], {}),
        ("qwen2_5_vl", ["fp8"], {"rollout_precision": "fp8", "train_precision": "fp8", "emulate_precision": True}),
    ],
    ids=["lora", "r3", "fp8"],
)
def test_other_parts_of_a_run_work_with_images(toy_run, tmp_path, tmp_path_factory, family, plugins, more):
    options = write_run(Case(family, tmp_path_factory.mktemp("run")), tmp_path)
    run = toy_run(plugins, steps=2, verify_logprobs=True, **options, **more)
    assert [record["mismatch/abs_log_prob_max"] < 2e-4 for record in run.metrics] == [True, True]


@pytest.mark.parametrize(
    ("kind", "more", "words"),
    [
        ("qwen3", {}, "passes images to gemma3, glm4v, internvl, llava, llava_next, mistral3"),
        ("llava_onevision", {}, "passes images to"),
        ("gemma3", {"plugin.true_on_policy": True}, "no attention in both directions within an image"),
        ("qwen2_5_vl", {"plugin.speculative": True, "engine": "embedded"}, "drafts do not see the images"),
    ],
)
def test_the_plan_refuses_what_cannot_read_images(kind, more, words):
    values = {"model.type": kind, "data.media": True, **more}
    facts = [Fact(name, value, "test") for name, value in values.items()]
    (problem,) = review(Facts(facts), {"model_type": kind}).problems
    assert words in problem.because
    text = [fact for fact in facts if fact.name != "data.media"]
    assert not review(Facts(text), {"model_type": kind}).problems


LOOK = """
from base64 import b64encode
from miles_core.data import read_parts
from miles_core.plugin import Plugin
from miles_embedded.testing.images import draw_image

plugin = Plugin("look", "a second image after the first answer", "0", "~=0.1", provides={"generate": {"look": "make"}})

def make(run):
    return generate

async def generate(sample, ask):
    first = await ask(messages=sample.prompt, sampling={"max_new_tokens": 4, "stop": ()})
    if first.response.finish == "stop":
        return ask.transcript.samples(sample)
    first = ask.transcript.cut(first, 3)
    if first.tokens[-1] in ask.tokenizer.all_special_ids:
        return ask.transcript.samples(sample)
    url = "data:image/png;base64," + b64encode(draw_image(sample.index, 60 + 30 * (sample.index % 2), 60)).decode()
    parts = read_parts([{"type": "text", "text": "LOOK"}, {"type": "image_url", "image_url": {"url": url}}])
    tokens = ask.renderer.extend(first.tokens, [{"role": "user", "content": parts}])[len(first.tokens):]
    await ask(tokens, after=first, sampling={"max_new_tokens": 5}, media=[p["media"] for p in parts if "media" in p])
    return ask.transcript.samples(sample)
"""


@pytest.mark.parametrize("family", [kind for kind in ("qwen2_5_vl", "gemma3") if kind in READS])
def test_images_that_follow_an_answer_are_trained_like_those_of_the_prompt(toy_run, tmp_path, tmp_path_factory, family):
    options = write_run(Case(family, tmp_path_factory.mktemp("run")), tmp_path)
    (tmp_path / "look.py").write_text(LOOK)
    run = toy_run([str(tmp_path / "look.py")], steps=2, verify_logprobs=True, generate="look", **options)
    assert [record["mismatch/abs_log_prob_max"] < 2e-4 for record in run.metrics] == [True, True]
    assert all(record["rollout/turns"] > 1.5 for record in run.metrics)
