"""Bias-based balancing: the rule of arXiv 2408.15664, and its way to the engine and through checkpoints."""

import re

import pytest
import torch
import transformers

from miles_core.plugin import PlanError
from miles_embedded import routed_blocks
from miles_embedded.model.load import build_empty
from miles_embedded.testing.families import FAMILIES
from miles_experts.bias import NAMES, correction_biases, update_biases
from miles_experts.review import WITH_BIAS

RATE = 0.01


def test_the_bias_follows_the_sign_of_the_error():
    bias = torch.tensor([0.5, 0.0, -0.5, 1.0])
    update_biases([bias], [torch.tensor([10.0, 0.0, 4.0, 6.0], dtype=torch.float64)], RATE)
    torch.testing.assert_close(bias, torch.tensor([0.49, 0.01, -0.49, 0.99]))


@pytest.mark.parametrize("family", [f for f in FAMILIES if "towers" not in f])
def test_the_table_lists_the_families_with_a_bias(family):
    name, values = FAMILIES[family]
    config = getattr(transformers, name)(**values)
    model = build_empty(config, False)
    with_bias = any(n.rpartition(".")[2] in NAMES for n in model.state_dict())
    assert with_bias == (config.model_type in WITH_BIAS)
    if with_bias:
        assert len(correction_biases(model)) == len(routed_blocks(model))


def biases_of(model):
    return {n: t for n, t in model.state_dict().items() if "correction_bias" in n}


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2"])
def test_a_run_balances_syncs_and_resumes(toy_run, family, tmp_path):
    options = {"family": family, "moe_router_bias_update_rate": RATE, "lr": 0.0}
    done = toy_run(["experts"], steps=2, directory=tmp_path / "run", **options)
    trainer, engine = done.parts[0].learner.rank.trainer, done.parts[0].engine
    found = biases_of(trainer.model)
    start = biases_of(transformers.AutoModelForCausalLM.from_pretrained(done.run.config.model.hf_checkpoint))
    moved = [(found[n] - start[n].float()).abs().max() for n in found]
    assert all(RATE * 0.5 < m <= 2.01 * RATE for m in moved), "two optimizer steps"
    assert all(torch.equal(t, biases_of(engine.model)[n]) for n, t in found.items())

    more = toy_run(["experts"], steps=3, load=tmp_path / "run", save=None, directory=None, **options)
    straight = toy_run(["experts"], steps=3, directory=tmp_path / "straight", **options)
    ours, theirs = (biases_of(r.parts[0].learner.rank.trainer.model) for r in (more, straight))
    assert all(torch.equal(t, theirs[n]) for n, t in ours.items())


def test_families_without_the_bias_are_refused_with_those_that_have_it(plan):
    with pytest.raises(PlanError) as error:
        plan(["experts"], moe_router_bias_update_rate=RATE)
    message = str(error.value)
    assert re.search(r"qwen3_moe choose experts by their scores alone; .*DeepSeek-V3.*--aux-loss-coef", message)
    assert "this would do:\n    --moe-router-bias-update-rate 0" in message
