"""Two sides that run different models are refused before anything is generated."""

from types import SimpleNamespace

import pytest
import transformers

from miles_core.errors import CheckpointError
from miles_core.mismatch.same_model import COMPARED, compare_models
from miles_core.plugin.detect import model_facts
from miles_embedded.model.load import facts_of
from miles_testing.tiny import FAMILIES, ROUTER_FAMILIES, tiny_checkpoint
from miles_testing.toy import toy_files

ELSEWHERE = """
from miles_embedded import plugin as EMBEDDED
from miles_core.plugin.manifest import Plugin
from miles_embedded.testing.process_engine import ProcessEngine

plugin = Plugin(
    "elsewhere", "the embedded engine in another process", "0", "~=0.1",
    provides={{"engine": {{"elsewhere": "make"}}}}, capabilities={{"engine": EMBEDDED.capabilities["engine"]}},
)


def make(run):
    return ProcessEngine({checkpoint!r})
"""

OTHER_MODEL = """
from miles_embedded.model.load import load_model
from miles_core.plugin.manifest import Plugin

plugin = Plugin("other", "another model for the engine", "0", "~=0.1", provides={{"model": {{"other": "make"}}}})


def make(policy, role):
    return load_model({checkpoint!r} if role == "rollout" else policy.hf_checkpoint)
"""


def other(**sizes):
    return str(toy_files(**sizes) / "model")


@pytest.mark.parametrize(
    ("kind", "sizes", "difference"),
    [
        (OTHER_MODEL, {"num_experts": 16}, "model.num_experts is 4 and 16"),
        (OTHER_MODEL, {"num_hidden_layers": 3}, "model.moe_layers is 2 and 3, model.layers is 2 and 3"),
        (OTHER_MODEL, {"num_experts_per_tok": 3}, "model.top_k is 2 and 3"),
        (ELSEWHERE, {"num_experts": 16}, "model.num_experts is 4 and 16"),  # a process starts in some seconds
    ],
)
def test_an_engine_with_another_model_is_refused_before_the_run(toy_run, tmp_path, kind, sizes, difference):
    (tmp_path / "engine.py").write_text(kind.format(checkpoint=other(**sizes)))
    flags = {"engine": "elsewhere"} if kind is ELSEWHERE else {}
    with pytest.raises(CheckpointError) as refused:
        toy_run([str(tmp_path / "engine.py"), "r3"], directory=tmp_path / "run", **flags)
    text = str(refused.value)
    assert difference in text and "\n" not in text
    assert f"the engine ({flags.get('engine', 'embedded')})" in text and "--hf-checkpoint" in text
    assert not (tmp_path / "run" / "metrics.jsonl").read_text() and not (tmp_path / "run" / "rollouts").exists()


def test_weights_of_another_model_are_refused(toy_run):
    with pytest.raises(
        CheckpointError, match=r"the trainer \(embedded\) are different models: model.num_experts is 4 and 16"
    ):
        toy_run(ref_load=other(num_experts=16))


@pytest.mark.parametrize("family", [*FAMILIES, *ROUTER_FAMILIES])
def test_every_familys_checkpoint_and_module_say_the_same(family, tmp_path):
    """Else sound runs would be refused. The file is what Transformers wrote; the module has its class's defaults."""
    name, values = (FAMILIES | ROUTER_FAMILIES)[family]
    config = getattr(transformers, name)(**values)
    config.save_pretrained(tmp_path)
    stored = {f.name: f.value for f in model_facts(str(tmp_path))}
    ours = facts_of(SimpleNamespace(config=transformers.AutoConfig.from_pretrained(tmp_path)))
    assert {n: stored[f"model.{n}"] for n in COMPARED} == {n: ours[f"model.{n}"] for n in COMPARED}


def sides(trainer, engine, checkpoint):
    run = SimpleNamespace(config=SimpleNamespace(run=SimpleNamespace(trainer="t", engine="e")))
    policy = SimpleNamespace(hf_checkpoint=str(checkpoint))
    return run, policy, trainer, engine


def test_a_side_that_says_nothing_is_not_compared(tmp_path):
    path = tiny_checkpoint("qwen3_moe", tmp_path / "model")
    compare_models(*sides({}, {}, path))
    compare_models(*sides({"model.top_k": 2}, {"model.num_experts": 4}, path))


def test_engine_and_trainer_are_compared_where_config_json_is_silent(tmp_path):
    path = tiny_checkpoint("qwen3", tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"the trainer \(t\) and the engine \(e\) .* model.top_k is 2 and 4"):
        compare_models(*sides({"model.top_k": 2}, {"model.top_k": 4}, path))
