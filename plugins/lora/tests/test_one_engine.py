"""One embedded engine for the adapters of several policies: the same samples as an engine each, and when the plan chooses it."""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from miles_core.contracts.trainer import Context
from miles_core.plugin import MilesError
from miles_embedded import VARIANTS, TokenVariants
from miles_embedded.engine.decoder import AsyncSteps
from miles_embedded.engine.shared import SharedBatch, SharedEngine
from miles_lora import LoraOptions, one_engine, stacks
from miles_lora.adapter import Adapter
from miles_lora.one_engine import why_separate
from miles_lora.stacks import Stack
from miles_testing import plan, toy_run
from miles_testing.doubles import remote

TURNS = """
async def generate(args, sample, sampling_params):
    sample.policy = ["solver", "judge", "base"][sample.group_index % 3]
    turn = await args.ask(policy=sample.policy)
    sample.tokens, sample.response_length = turn.tokens, len(turn.response.tokens)
    sample.rollout_log_probs = turn.response.log_probs
    if sample.policy == "base":  # a frozen policy plays, but does not learn
        sample.policy, sample.loss_mask = "judge", [0] * sample.response_length
    return sample
"""
POLICIES = {"solver": {"lora": {"rank": 4, "alpha": 5}}, "judge": {}, "base": {"role": "frozen", "generates": True}}
INT4 = {"train_precision": "int4", "rollout_precision": "int4", "int4_group_size": 32, "emulate_precision": True}
FP8 = {"train_precision": "fp8", "rollout_precision": "fp8", "emulate_precision": True}
SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
CASES = {
    "dense": (["lora"], {"family": "qwen3"}),
    "mixture of experts": (["lora"], {"family": "qwen3_moe"}),
    "int4": (["lora", "int4"], {"family": "qwen3_moe", "sizes": SIZES, **INT4}),
    "fp8": (["lora", "fp8"], {"family": "qwen3_moe", "sizes": SIZES, **FP8}),
    "asynchronous": (["lora"], {"family": "qwen3", "schedule": "async", "partial_rollout": True}),
}


@pytest.fixture
def train(tmp_path):
    def train(plugins, name="run", **options):
        (tmp_path / "turns.py").write_text(TURNS)
        options = {
            "lora_sync": "adapter",
            "lora_target_modules": "all-linear",
            "lora_rank": 8,
            "lr": 1e-2,
            "policies": POLICIES,
            "custom_generate_function_path": tmp_path / "turns.py",
            "rollout_batch_size": 6,
            "steps": 3,
            **options,
        }
        return toy_run(plugins, tmp_path / name, **options)

    return train


def samples_of(done):
    return {(s["step"], s["index"]): s for s in done.samples}


@pytest.mark.parametrize("case", CASES)
def test_one_engine_generates_what_an_engine_each_does(case, train):
    plugins, options = CASES[case]
    one = train(plugins, "one", **options)
    each = train(plugins, "each", lora_separate_engines=True, **options)
    assert {type(part.engine) for part in one.parts} == {SharedEngine}
    assert len({id(part.engine.batch) for part in one.parts}) == 1
    assert not any(isinstance(part.engine, SharedEngine) for part in each.parts)
    names = ("solver", "judge")
    if case == "asynchronous":  # what a step trains on, and by which versions, depends on time
        assert all(one.metrics[-1][f"{name}/mismatch/abs_log_prob"] < 0.5 for name in names)
        return
    assert all(m[f"{name}/mismatch/abs_log_prob"] < 1e-5 for m in one.metrics for name in names)
    found, expected = samples_of(one), samples_of(each)
    assert found.keys() == expected.keys() and len(found) > 20
    for key, sample in found.items():
        assert sample["tokens"] == expected[key]["tokens"], key
        np.testing.assert_allclose(sample["rollout_log_probs"], expected[key]["rollout_log_probs"], atol=2e-5)
    for ours, theirs in zip(one.metrics, each.metrics, strict=True):
        for name in ("solver/train/grad_norm", "judge/train/lora_delta_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3)


def test_static_steps_generate_the_same(train, monkeypatch):
    """The groups that CUDA graphs use, which have one shape for all spreads of the policies."""
    make, batches = SharedBatch.__init__, []

    def make_static(self, *given):
        make(self, *given)
        self.async_steps, self.prompts.used = AsyncSteps(self, used=True), True
        batches.append(self)

    plain = samples_of(train(["lora"], "plain"))
    monkeypatch.setattr(SharedBatch, "__init__", make_static)
    static = samples_of(train(["lora"], "static"))
    (batch,) = batches
    assert batch.async_steps.used and batch.prompts.used, batch.async_steps.refused + batch.prompts.refused
    assert plain.keys() == static.keys()
    assert all(sample["tokens"] == static[key]["tokens"] for key, sample in plain.items())


def adapter(rank, alpha, fill):
    made = Adapter(torch.zeros(6, 5), LoraOptions(rank=rank, alpha=alpha))
    for number, matrix in enumerate(made.parameters()):
        matrix.data = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(10 * fill + number))
    return made


def test_a_stack_adds_the_adapter_of_each_token(monkeypatch):
    """Adapters of other ranks and scales, one of which is replaced."""
    adapters = [adapter(2, 3.0, 0), adapter(4, 16.0, 1), adapter(3, 1.0, 2)]
    stack = Stack("layer", adapters[0])
    stack.put(0, adapter(4, 1.0, 7), 1)
    for variant, each in enumerate(adapters):
        stack.put(variant, each, 4)
    index, x, output = torch.tensor([2, 0, 0, 1, 2, 0, 2]), torch.randn(1, 7, 5), torch.randn(1, 7, 6)
    ctx = Context("rollout", (), torch.arange(7))
    monkeypatch.setattr(stacks, "active_context", lambda: ctx)
    with torch.no_grad():
        each = [adapters[v](output[:, i].clone(), x[:, i]) for i, v in enumerate(index.tolist())]
    expected = torch.stack(each, 1)
    for static in (False, True):
        ctx.attached[VARIANTS] = TokenVariants(index, 4, static=static)
        torch.testing.assert_close(stack(output, x), expected, atol=1e-5, rtol=1e-5)
    ctx.attached[VARIANTS] = TokenVariants(index, 4, only=1)
    assert torch.equal(stack(output.clone(), x), adapters[1](output.clone(), x))
    ctx.attached[VARIANTS] = TokenVariants(index, 4)
    with pytest.raises(MilesError, match=r"layer computes 5 rows for 7 tokens.*--lora-separate-engines"):
        stack(output[:, :5], x[:, :5])
    assert all(stack.holds(variant, each) for variant, each in enumerate(adapters))
    adapters[2].lora_B.data[0, 0] += 1
    assert not stack.holds(2, adapters[2])


TWO = {"solver": {}, "judge": {}}


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({}, "one engine decodes the policies solver, judge in one batch"),
        ({"policies": POLICIES}, "one engine decodes the policies solver, judge, base in one batch"),
        ({"lora_separate_engines": True}, "decode in an engine each: --lora-separate-engines"),
        ({"lora_sync": "merged"}, "decode in an engine each: with --lora-sync merged"),
        (
            {"plugins": ["lora", remote.__file__], "runtime": "remote"},
            "--runtime remote starts engines in different processes",
        ),
        ({"colocate": True}, "with --colocate each engine sleeps"),
        ({"plugins": ["lora", "true_on_policy"]}, "add in another order than those of the trainer"),
        ({"lora_target_modules": "all-linear,all-experts"}, "adapters of joined experts are added to the weights"),
        ({"lora_target_modules": "down_proj"}, "adapters of joined experts are added to the weights"),
        (
            {"policies": {**TWO, "other": {"lora": {"target_modules": ["q_proj"]}}}},
            "the policy other decodes in an engine of its own: its --lora-target-modules is not that of solver",
        ),
    ],
)
def test_the_plan_says_which_engine_decodes(options, note):
    found = plan(**{"plugins": ["lora"], "lora_sync": "adapter", "policies": TWO, **options})
    assert any(note in line for line in found.reviews), found.reviews


def test_the_plan_knows_that_more_policies_are_added():
    nim = {"generate": "nim", "prompts": "nim", "rm_type": "game", "custom_rm_path": None, "prompt_data": "1-6"}
    found = plan(plugins=["coevolution", "lora"], lora_sync="adapter", **nim)
    note = "one engine decodes the policies policy, those that coevolution adds in one batch"
    assert any(note in line for line in found.reviews), found.reviews


def test_layers_with_a_state_need_an_engine_each():
    facts = {"lora.sync": "adapter", "runtime": "inline", "lora.target_modules": "all-linear"}
    assert why_separate(facts.get, {"layer_types": ["full_attention"]}) == ""
    assert "state" in why_separate(facts.get, {"layer_types": ["full_attention", "linear_attention"]})


@pytest.mark.parametrize("options", [{}, {"policies": {"solver": {}, "teacher": {"role": "frozen"}}}])
def test_the_plan_says_nothing_about_one_engine(options):
    found = plan(plugins=["lora"], lora_sync="adapter", **options)
    assert not any("engine of its own" in line or "one engine" in line for line in found.reviews)


def test_policies_with_adapters_of_experts_have_an_engine_each(train, monkeypatch):
    """Also if their names do not show what they are."""
    monkeypatch.setattr(one_engine, "_names_experts", lambda value: False)
    done = train(["lora"], lora_target_modules="down_proj,q_proj", steps=1)
    assert not any(isinstance(part.engine, SharedEngine) for part in done.parts)


def test_policies_with_a_decoder_of_a_plugin_have_an_engine_each(train):
    """Also if it is a plugin that the plan does not know."""
    done = train(["lora"], steps=1)
    run, part = copy(done.run), done.parts[0]
    assert one_engine.shares_engine(run, part.policy, part.engine.model)
    run.hooks = SimpleNamespace(find_provided=lambda kind: ["drafts", "plain"])
    assert not one_engine.shares_engine(run, part.policy, part.engine.model)


def test_policies_with_other_targets_have_an_engine_each(train):
    policies = {"solver": {}, "judge": {}, "base": {"lora": {"target_modules": ["q_proj"]}}}
    done = train(["lora"], policies=policies, steps=1)
    kinds = [isinstance(part.engine, SharedEngine) for part in done.parts]
    assert kinds == [True, True, False]
