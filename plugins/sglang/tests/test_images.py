"""Images on SGLang: on a double that takes what SGLang's processor of the Qwen-VL models takes, and on a real SGLang where one is given."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from sglang_double import DoubleLink, stand_in_for_sglang
from test_loader import Model, bucket

import miles_sglang
from miles_core.engine import Request, Sampling
from miles_core.plugin import MilesError, PlanError
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.model.image_processor import make_processor
from miles_embedded.model.load import load_model
from miles_embedded.testing.images import IMAGE_PARTS, draw_image, image, vision_checkpoint, vision_tokenizer
from miles_formats import Codec
from miles_sglang import build, images
from miles_sglang.build import assemble
from miles_sglang.choices import Choices
from miles_sglang.engine import SglangEngine
from miles_sglang.images import ImageReader, PackedBody
from miles_sglang.loader import COMPLETE, load
from miles_testing.engine_contract import stored_units

#: Import path with SGLang and the packages that it pins, for the test on a real one (`make test-sglang`).
PATH = os.environ.get("MILES_TEST_SGLANG_PATH", "")
reads = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="images need Transformers 5.24 or later in the run"
)
A, B = image(1), image(2, 90, 60)


def engine_for(family: str, path: Path, **choices: Any) -> SglangEngine:
    tokenizer = vision_tokenizer(family)
    chosen = Choices(device="cpu", dtype="float32", max_context=100, max_running_requests=8, **choices)
    processor = make_processor(path, tokenizer)
    return assemble(
        path, Codec(), lambda tokens: str(tokenizer.decode(tokens)), path.parent / "work", chosen, processor=processor
    )


def requests_for(family: str, path: Path) -> list[Request]:
    """One image, two images, the first again, and text."""
    tokenizer, mark = vision_tokenizer(family), IMAGE_PARTS[family].mark
    processor, greedy = make_processor(path, tokenizer), Sampling(8, temperature=0, ignore_eos=True)
    one = tokenizer.encode(processor.expand(f"HI{mark}HOW?", (A,)))
    two = tokenizer.encode(processor.expand(f"X{mark}A{mark}", (B, A)))
    given = [(one, (A,)), (two, (B, A)), (one, (A,)), ([3, 4, 5], ())]
    return [Request(tokens, greedy, key=key, media=media) for key, (tokens, media) in enumerate(given)]


async def answer(engine: Any, requests: list[Request]) -> tuple[list[Any], list[np.ndarray]]:
    """Responses, and the scores of their tokens."""
    responses = await asyncio.gather(*map(engine.generate, requests))
    sequences = [[*r.tokens, *a.tokens] for r, a in zip(requests, responses, strict=True)]
    scores = await engine.score(sequences, 1.0, [r.media for r in requests])
    return responses, [s[-len(a.tokens) :] for s, a in zip(scores, responses, strict=True)]


async def serve(engine: SglangEngine, checkpoints: list[Path], requests: list[Request]) -> list[Any]:
    """Return the answers with the weights of each checkpoint."""
    await engine.start()
    found = []
    try:
        for version, checkpoint in enumerate(checkpoints):
            await engine.pause()
            await engine.update_weights(stored_units(checkpoint), version)
            await engine.resume()
            found.append(await answer(engine, requests))
    finally:
        await engine.stop()
    return found


def check_equal(found: list[Any], checkpoints: list[Path], requests: list[Request], family: str) -> None:
    """Compare the answers with those of the embedded engine, whose images are compared with Transformers' own code."""
    for (responses, scores), checkpoint in zip(found, checkpoints, strict=True):
        processor = make_processor(checkpoint, vision_tokenizer(family))
        settings = Settings(str, eos=[], max_running_requests=4, max_context=100, processor=processor)
        expected, wanted = asyncio.run(answer(EmbeddedEngine(load_model(checkpoint, "float32"), settings), requests))
        for one, other, score, right in zip(responses, expected, scores, wanted, strict=True):
            assert list(one.tokens) == list(other.tokens)
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
            np.testing.assert_allclose(score, right, atol=1e-5)


@reads
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_sglang_receives_the_pixels_and_positions_of_the_trainer(family: str, tmp_path: Path, monkeypatch: Any) -> None:
    stand_in_for_sglang(monkeypatch)
    checkpoints = [vision_checkpoint(family, tmp_path / str(seed), seed=seed) for seed in range(2)]
    engine, requests = engine_for(family, checkpoints[0]), requests_for(family, checkpoints[0])
    engine.link = DoubleLink(checkpoints[0], engine.link.arguments)  # type: ignore[attr-defined]
    check_equal(asyncio.run(serve(engine, checkpoints, requests)), checkpoints, requests, family)


@reads
@pytest.mark.thorough  # each starts an SGLang
@pytest.mark.skipif(not PATH, reason="SGLang is not installed")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_real_sglang_computes_what_the_embedded_engine_computes(family: str, tmp_path: Path) -> None:
    """Also after an update of the tower, whose features SGLang keeps between requests."""
    checkpoints = [vision_checkpoint(family, tmp_path / str(seed), seed=seed) for seed in range(2)]
    requests = requests_for(family, checkpoints[0])
    arguments = {"max_total_tokens": 4096, "enable_precise_embedding_interpolation": True}
    engine = engine_for(family, checkpoints[0], python_path=PATH, arguments=arguments)
    check_equal(asyncio.run(serve(engine, checkpoints, requests)), checkpoints, requests, family)


@reads
def test_requests_that_sglang_cannot_read_are_refused(tmp_path: Path) -> None:
    path = vision_checkpoint("qwen2_5_vl", tmp_path / "model")
    (request, *_), translator = requests_for("qwen2_5_vl", path), engine_for("qwen2_5_vl", path).settings.translator
    with pytest.raises(MilesError, match=r"has 0 placeholder tokens \(60\) for 1 images, which need"):
        translator.body(replace(request, tokens=[3, 4]), "0")
    with pytest.raises(MilesError, match="this engine was built for text; start the run with --media"):
        replace(translator, images=None).body(request, "0")


@reads
def test_a_sampled_placeholder_counts_as_text(tmp_path: Path) -> None:
    """Its position follows the one before it, as in the trainer; SGLang's own rule would look for another image."""
    path = vision_checkpoint("qwen2_5_vl", tmp_path / "model")
    (request, *_) = requests_for("qwen2_5_vl", path)
    reader = ImageReader.of(
        make_processor(path, vision_tokenizer("qwen2_5_vl")), json.loads((path / "config.json").read_text())
    )
    entry, payload = reader.find([*request.tokens, 62, 60, 7], request.media).message()
    body = images.unpack({"image_data": [entry]}, b"".join(payload))
    positions = body["image_data"][0]["mrope_positions"]
    assert torch.equal(positions[:, -3:].diff(), torch.ones(3, 2, dtype=torch.long)) and len(entry["offsets"]) == 1


def test_pixels_are_read_when_a_request_is_sent() -> None:
    """A request that waits holds none."""
    calls: list[Any] = []
    pixels = {"pixel_values": torch.zeros(4, 2), images.GRID: torch.tensor([[1, 2, 2]])}
    processor: Any = types.SimpleNamespace(
        inputs=lambda media: calls.append(media) or pixels, find_places=lambda *_: [np.array([1])]
    )
    body = {"rid": "0", "image_data": ImageReader(processor, 60, 2).find([3, 60, 4], (A,))}
    assert not calls
    packed = PackedBody.of(body)
    assert calls == [A] and packed.size == 4 * 2 * 4 + 3 * 8 + 9 * 8 + 8
    found = images.unpack(json.loads(json.dumps(packed.body)), b"".join(packed.payload))["image_data"][0]
    assert torch.equal(found["pixel_values"], pixels["pixel_values"]) and found["offsets"] == [[1, 1]]
    assert found["mrope_positions"].tolist() == [[0, 1, 2]] * 3 and found["mrope_position_delta"].tolist() == [[0]]


def test_an_update_drops_the_features_that_sglang_keeps(monkeypatch: Any) -> None:
    kept: dict[str, Any] = {"of the old weights": 1}
    module = types.ModuleType("sglang.srt.managers.mm_utils")
    module.embedding_cache = kept  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    load(Model(), bucket(0)[1])
    assert kept  # the update is not complete
    load(Model(), [*bucket(0)[1], (COMPLETE, torch.zeros(0, dtype=torch.uint8))])
    assert not kept


def write_run(folder: Path) -> dict[str, Any]:
    rows = []
    for i in range(4):
        (folder / f"{i}.png").write_bytes(draw_image(i, 60 + 30 * (i % 2), 60))
        parts = [{"type": "image", "image": f"{i}.png"}] * (1 + i % 2) + [{"type": "text", "text": "HOW MANY?"}]
        rows.append({"input": [{"role": "user", "content": parts}]})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared: dict[str, Any] = {"label_key": None, "apply_chat_template": True, "media": True, "dtype": "float32"}
    return {
        "hf_checkpoint": vision_checkpoint("qwen2_5_vl", folder / "model"),
        "prompt_data": folder / "prompts.jsonl",
        **shared,
    }


@reads
def test_a_run_with_sglang_agrees_with_its_trainer_through_a_death(
    toy_run: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """What replaces SGLang receives the images again."""
    stand_in_for_sglang(monkeypatch)
    monkeypatch.setattr(miles_sglang, "plugin", replace(miles_sglang.plugin, packages=()))
    links: list[DoubleLink] = []

    def make(arguments: Mapping[str, Any], *_: Any, **__: Any) -> DoubleLink:
        links.append(DoubleLink(Path(arguments["model_path"]), arguments))
        links[-1].fatal[1, "generate"] = 6
        return links[-1]

    monkeypatch.setattr(build, "ProcessLink", make)
    options = {
        "engine": "sglang",
        "device": "cpu",
        "train_vision_tower": True,
        "max_restarts": 1,
        "verify_logprobs": True,
    }
    run = toy_run(steps=2, **write_run(tmp_path), **options)
    assert [record["mismatch/abs_log_prob_max"] < 2e-4 for record in run.metrics] == [True, True]
    assert links[0].starts == 2 and links[0].manager.images.received  # type: ignore[union-attr]


def test_what_sglang_cannot_read_is_refused_with_the_reason(plan: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(miles_sglang, "plugin", replace(miles_sglang.plugin, packages=()))
    given: dict[str, Any] = {"engine": "sglang", "media": True}
    facts = ["gpu.count=1", "model.type=qwen2_5_vl"]
    if Version(transformers.__version__) >= Version("5.24"):
        assert plan(**given, facts=facts).fact("sglang.enable_precise_embedding_interpolation") is True
    for kind, words in (
        ("glm4v", "ignores the sizes"),
        ("mistral3", "sizes of undecoded"),
        ("gemma3", "for qwen2_5_vl, qwen2_vl"),
    ):
        with pytest.raises(PlanError, match=words):
            plan(**given, facts=["gpu.count=1", f"model.type={kind}"])
    for more, words in (
        ({"sglang_url": "http://host:30000"}, "takes no processed images"),
        ({"sglang_speculative_algorithm": "NGRAM"}, "drafts with images"),
        ({"sglang_language_only": True}, "one SGLang computes"),
    ):
        with pytest.raises(PlanError, match=words):
            plan(**given, **more, facts=facts)


def test_a_directory_with_sglang_is_looked_at_in_the_plan(plan: Any, tmp_path: Path) -> None:
    """SGLang pins a Transformers that is older than the one that trains, so it may be installed apart."""
    for version, words in ((None, "it has no SGLang"), ("0.4.9", "it has SGLang 0.4.9"), ("0.5.17", "")):
        folder = tmp_path / f"of {version}"
        folder.mkdir()
        if version:
            (folder / f"sglang-{version}.dist-info").mkdir()
            (folder / f"sglang-{version}.dist-info" / "METADATA").write_text(f"Name: sglang\nVersion: {version}\n")
        options = {
            "engine": "sglang",
            "sglang_python_path": str(folder),
            "facts": ["gpu.count=1", "package.sglang=none"],
        }
        if not words:
            assert "sglang" in plan(**options).order
            continue
        with pytest.raises(PlanError, match=words):
            plan(**options)


def test_sglang_s_processes_import_from_the_directory_first(monkeypatch: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", "/own")
    found = build._environment(Choices(python_path=os.pathsep.join(("/one", "/two"))), {})
    assert found["PYTHONPATH"] == os.pathsep.join(("/one", "/two", "/own"))
    assert "PYTHONPATH" not in build._environment(Choices(), {})
