"""Adapters on Megatron-Core's joined and divided matrices: they train as the embedded trainer's do, whatever the parallel sizes.

Needs megatron-core; runs on a CPU with its local modules, and gloo.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from miles_core.trainer import Callbacks
from miles_embedded import build_empty, checkpoint_config
from miles_lora import LoraOptions
from miles_lora.hooks import merge
from miles_lora.sharded import ShardedAdapters
from miles_testing import Setup, tiny_checkpoint, toy_run
from miles_testing.tiny import random_checkpoint
from miles_testing.yardstick import make_batch, weighted

pytest.importorskip("peft")
INSTALLED = bool(find_spec("megatron")) and find_spec("megatron.core") is not None
pytestmark = [pytest.mark.skipif(not INSTALLED, reason="needs megatron-core"), pytest.mark.slow]
OPTIONS = LoraOptions(rank=4, target_modules=("all-linear", "all-experts"))
SETUP = replace(Setup(), micro_batch_size=3, recompute=True, lr=1e-2, weight_decay=0.0)


def attach(checkpoint, options=OPTIONS):
    return ShardedAdapters(build_empty(checkpoint_config(str(checkpoint), False), False), options, "0")


def train(checkpoint, saved=None, load=False, steps=2, **sizes):
    """Adapters, exported weights and log-probabilities of a rank after some steps."""
    from miles_megatron.testing import make, may_have_children

    may_have_children()
    adapters = attach(checkpoint)
    trainer = make(checkpoint, SETUP, on_chunk=adapters.attach, **sizes)
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    batch = make_batch()
    groups = batch.group.tolist()
    part = batch.select([i for i, g in enumerate(groups) if g % trainer.world.replicas == trainer.world.replica])
    if load:
        trainer.load(saved)
    metrics = [trainer.step(part) for _ in range(steps)]
    if saved is not None and not load:
        trainer.save(saved)
    columns = {kind: trainer.log_probs(part, kind)["log_probs"] for kind in ("old", "ref")}
    units = {n: t.clone() for unit in trainer.units(everywhere=True) for n, t in unit.tensors.items()}
    return (
        adapters.matrices(),
        units,
        columns,
        [m["train/grad_norm"][0] for m in metrics],
        float(adapters.squared_norm()),
    )


def train_with(checkpoint, saved, sizes):
    """``train`` on a rank, and again from what it saved."""
    found = train(checkpoint, saved, **sizes)
    return found, train(checkpoint, saved, load=True, steps=0, **sizes)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def alone(checkpoint, tmp_path_factory):
    """One rank, and where it saved its state."""
    directory = tmp_path_factory.mktemp("alone") / "saved"
    return train(checkpoint, directory), directory


def close(ours, theirs, atol):
    assert ours.keys() == theirs.keys()
    for name, pair in theirs.items():
        for mine, other in zip(ours[name], pair, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=atol, msg=name)


def test_one_rank_trains_what_the_embedded_trainer_trains(checkpoint, alone):
    from miles_core.trainer import OptimizerConfig
    from miles_embedded import load_model, mark_constant
    from miles_embedded.trainer.build import data_parallel
    from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
    from miles_lora.adapter import attach as attach_here
    from miles_lora.hooks import Trained
    from miles_lora.targets import find_targets

    model = load_model(checkpoint)
    mark_constant(model.parameters())
    targets = find_targets(model, OPTIONS.target_modules)
    trained = Trained(model, targets, attach_here(targets, OPTIONS, "0", raw_inputs=False), OPTIONS)
    adamw = OptimizerConfig(lr=SETUP.lr, weight_decay=0.0, betas=SETUP.betas, eps=SETUP.eps, clip_grad=SETUP.clip_grad)
    config = TrainerConfig(optimizer=adamw, temperature=SETUP.temperature)
    trainer = EmbeddedTrainer(model, config, None, None, data_parallel("no_shard", torch.device("cpu")))
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    norms = [trainer.step(make_batch())["train/grad_norm"][0] for _ in range(2)]
    (matrices, units, _, found, squared), _ = alone
    assert found == pytest.approx(norms, rel=1e-3)
    close(matrices, trained.matrices(), 2e-3)
    assert squared == pytest.approx(float(trained.squared_norm()), rel=1e-2)
    merged = {n: t for unit in merge(trained, trainer.units(everywhere=True)) for n, t in unit.tensors.items()}
    assert merged.keys() == units.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(units[name], tensor, rtol=0, atol=2e-3, msg=name)


def test_the_reference_model_is_the_base(alone, checkpoint):
    from miles_megatron.testing import make

    (_, _, columns, _, _), _ = alone
    base = make(checkpoint, SETUP).log_probs(make_batch(), "old")["log_probs"]
    torch.testing.assert_close(columns["ref"], base, rtol=0, atol=1e-6)
    assert (columns["old"] - base).abs().max() > 1e-3


@pytest.mark.parametrize(
    "sizes",
    [
        # alone, these two show less than both together do
        pytest.param({"tp": 2, "sequence": True}, marks=pytest.mark.thorough, id="tensor"),
        pytest.param({"ep": 2}, marks=pytest.mark.thorough, id="expert"),
        pytest.param({"tp": 2, "etp": 1, "ep": 2, "sequence": True}, id="tensor and expert"),
        pytest.param({"pp": 2}, id="pipeline"),
        pytest.param({"cp": 2}, id="context"),
        pytest.param({}, id="data"),
    ],
)
def test_two_ranks_train_what_one_trains(ranks, checkpoint, alone, sizes, tmp_path):
    (matrices, units, _, norms, squared), _ = alone
    for (mine, theirs, _, grad_norms, total), loaded in ranks.run(train_with, checkpoint, tmp_path / "saved", sizes):
        assert grad_norms == pytest.approx(norms, rel=1e-3) and total == pytest.approx(squared, rel=1e-2)
        close(mine, matrices, 2e-3)
        for name, tensor in units.items():
            torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=2e-3, msg=name)
        close(loaded[0], mine, 0)
    again = train(checkpoint, tmp_path / "saved", load=True, steps=0)  # on one rank
    close(again[0], mine, 0)


def test_runs_save_resume_and_export_adapters(tmp_path):
    """A whole run: engine and trainer agree, peft's files are written, checkpoints contain adapters only, and a run goes on from them."""
    from megatron.core.dist_checkpointing import load_tensors_metadata
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    options = {
        "trainer": "megatron",
        "lora_target_modules": "all-linear,all-experts",
        "lr": 1e-2,
        "verify_logprobs": True,
    }
    options |= {"kl_loss_coef": 0.1, "micro_batch_size": 4}
    done = toy_run(["megatron", "lora"], steps=3, export_hf=tmp_path / "hf", **options)
    assert all(record["verify/abs_log_prob"] < 1e-4 for record in done.metrics)
    assert done.metrics[-1]["train/lora_delta_norm"] > 0.1 and done.metrics[-1]["train/ref_kl"] > 0
    policy = done.directory / "checkpoints" / "step_00000003" / "policy"
    held = load_tensors_metadata(str(policy / "trainer" / "state"))
    assert [n for n in held if ".lora_A" in n] and not [n for n in held if "decoder." in n or "embedding" in n]
    base = AutoModelForCausalLM.from_pretrained(done.run.policy.hf_checkpoint, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, policy / "plugins" / "lora").merge_and_unload().state_dict()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).state_dict()
    for name, tensor in plain.items():
        torch.testing.assert_close(adapted[name], tensor, rtol=0, atol=1e-5, msg=name)
    first = toy_run(["megatron", "lora"], steps=2, **options)
    again = toy_run(["megatron", "lora"], steps=3, load=first.directory, save=None, directory=None, **options)
    assert again.metrics[-1]["train/loss"] == done.metrics[-1]["train/loss"]
    start = toy_run(["megatron", "lora"], steps=1, **options | {"lr": 0.0}, lora_adapter=policy / "plugins" / "lora")
    assert start.metrics[-1]["train/lora_delta_norm"] == pytest.approx(done.metrics[-1]["train/lora_delta_norm"])


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A model with gated delta nets, whose first projection joins two matrices by groups of rows, and a gated shared expert."""
    import transformers

    from miles_embedded.testing.families import FAMILIES

    name, values = FAMILIES["qwen3_next"]
    config = getattr(transformers, name)(**values, rms_norm_eps=1e-2)
    return random_checkpoint(config, tmp_path_factory.mktemp("hybrid") / "model")


def test_projections_of_delta_nets_are_adapted_as_in_the_embedded_trainer(ranks, hybrid, tmp_path):
    found = train(hybrid, tmp_path / "saved")
    test_one_rank_trains_what_the_embedded_trainer_trains(hybrid, (found, tmp_path / "saved"))
    assert {name.split(".linear_attn.")[-1] for name in found[0] if "linear_attn" in name} == {
        "in_proj_qkvz.weight",
        "in_proj_ba.weight",
        "out_proj.weight",
    }
    for sizes in ({"tp": 2, "sequence": True}, {"cp": 2}):
        for (mine, units, _, norms, _), loaded in ranks.run(train_with, hybrid, tmp_path / str(len(sizes)), sizes):
            assert norms == pytest.approx(found[3], rel=1e-5)
            close(mine, found[0], 1e-5)
            close(loaded[0], mine, 0)
            for name, tensor in found[1].items():
                torch.testing.assert_close(units[name], tensor, rtol=0, atol=1e-5, msg=name)


def test_a_run_adapts_delta_nets_and_continues_as_if_it_had_not_stopped(hybrid, tmp_path):
    options = {"trainer": "megatron", "hf_checkpoint": hybrid, "lr": 1e-2, "dtype": "float32", "verify_logprobs": True}
    options |= {"lora_target_modules": "all-linear,all-experts"}
    whole = toy_run(["lora", "r3"], steps=3, **options)
    assert all(record["verify/abs_log_prob"] < 1e-4 for record in whole.metrics)
    toy_run(["lora", "r3"], tmp_path / "parts", steps=2, **options)
    again = toy_run(["lora", "r3"], None, steps=3, load=tmp_path / "parts", save=None, **options)
    for name in ("train/loss", "train/grad_norm", "train/lora_delta_norm"):
        assert again.metrics[-1][name] == whole.metrics[-1][name]
