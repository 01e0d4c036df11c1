"""The checkpoint's MTP layer in training: the policy does not notice, two ranks compute what one computes, nothing of it is lost.

Needs megatron-core; runs on a CPU with its local modules, and gloo.
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_core.plugin import CheckpointError, PlanError
from miles_core.train.data_shard import merge_metrics
from miles_core.trainer import Callbacks, MtpRequest
from miles_megatron.testing import make, may_have_children
from miles_testing import Setup, toy_files, toy_run
from miles_testing.toy import plan
from miles_testing.yardstick import make_batch, weighted

INSTALLED = bool(find_spec("megatron")) and find_spec("megatron.core") is not None
pytestmark = [pytest.mark.skipif(not INSTALLED, reason="needs megatron-core"), pytest.mark.slow]

WISH = MtpRequest("mtp", "draft", 0.2, clip_grad=0.1)
#: Both norms are clipped.
SETUP = replace(Setup(), micro_batch_size=3)
FIRST = "model.layers.2."


@pytest.fixture(scope="module")
def checkpoint(with_mtp):
    return with_mtp("qwen3_moe")


def started(checkpoint, mtp=WISH, **sizes):
    trainer = make(checkpoint, SETUP, mtp=mtp, **sizes)
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    return trainer


def weights(trainer):
    return {n: t.clone() for unit in trainer.units(everywhere=True) for n, t in unit.tensors.items()}


def worked(checkpoint, directory=None, **sizes):
    """Replica, metrics of two steps and the weights; saved in between."""
    may_have_children()
    trainer, batch = started(checkpoint, **sizes), make_batch()
    part = [i for i, g in enumerate(batch.group.tolist()) if g % trainer.world.replicas == trainer.world.replica]
    metrics = [trainer.step(batch.select(part))]
    if directory is not None:
        trainer.save(directory)
    return trainer.world.replica, [*metrics, trainer.step(batch.select(part))], weights(trainer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def alone(checkpoint, saved):
    return worked(checkpoint, saved)


def test_the_policy_is_the_same_to_the_bit(checkpoint, alone):
    trainer = started(checkpoint, None)
    metrics = [trainer.step(make_batch()) for _ in range(2)]
    for with_it, without in zip(alone[1], metrics, strict=True):
        assert with_it.keys() - without.keys() == {"train/mtp", "train/grad_norm/draft"}
        assert {name: with_it[name] for name in without} == without and without["train/grad_norm"][0] > 1
        assert with_it["train/grad_norm/draft"][0] > 0.1
    found = weights(trainer)
    assert all(torch.equal(alone[2][name], tensor) for name, tensor in found.items())
    assert {name for name in alone[2] if name.startswith(FIRST)} == alone[2].keys() - found.keys() != set()


def test_a_learning_rate_of_its_own(checkpoint, alone):
    trainer = started(checkpoint, replace(WISH, lr=1e-9))
    trainer.step(make_batch())
    stored, found = load_file(checkpoint / "model.safetensors"), weights(trainer)
    for name, tensor in found.items():
        assert torch.allclose(tensor, stored[name], rtol=0, atol=1e-6) == name.startswith(FIRST), name


SIZES = {"tensor": {"tp": 2, "sequence": True}, "pipeline": {"pp": 2}, "context": {"cp": 2}, "expert": {"ep": 2}}


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(SIZES[name], marks=() if name == "tensor" else pytest.mark.thorough, id=name) for name in SIZES],
)
def test_two_ranks_compute_what_one_computes(ranks, checkpoint, alone, sizes, tmp_path):
    directory = tmp_path if "pp" in sizes else None
    everyone = ranks.run(worked_with, checkpoint, directory, sizes)
    replicas = {replica: metrics for replica, metrics, _ in everyone}
    for step, expected in enumerate(alone[1]):
        metrics = merge_metrics([each[step] for each in replicas.values()])
        assert metrics == pytest.approx(merge_metrics([expected]), rel=2e-5)
    for _, _, found in everyone:
        same(found, alone[2])
    if directory is not None:  # of two stages, read by one process
        trainer = started(checkpoint)
        trainer.load(directory)
        trainer.step(make_batch())
        same(weights(trainer), alone[2])


def worked_with(checkpoint, directory, sizes):
    return worked(checkpoint, directory, **sizes)


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5)


def test_resuming_continues_to_the_bit(checkpoint, alone, saved):
    trainer = started(checkpoint)
    trainer.load(saved)
    trainer.step(make_batch())
    assert all(torch.equal(tensor, alone[2][name]) for name, tensor in weights(trainer).items())


@pytest.mark.parametrize("chosen", ["deepseek_v3", "glm4_moe_lite"])
def test_what_is_exported_is_what_was_loaded_and_then_what_was_trained(with_mtp, tmp_path, chosen):
    """These checkpoints have copies of the embedding and the output layer in the layer, which stay copies."""
    checkpoint = with_mtp(chosen, copies=True)
    stored = load_file(checkpoint / "model.safetensors")
    trainer = started(checkpoint)
    trainer.export(tmp_path / "same", None)
    found = load_file(tmp_path / "same/model.safetensors")
    assert found.keys() == stored.keys() and all(torch.equal(found[name], stored[name]) for name in stored)
    trainer.step(make_batch())
    trainer.export(tmp_path / "other", None)
    found = load_file(tmp_path / "other/model.safetensors")
    assert found.keys() == stored.keys() and not any(
        torch.equal(found[n], stored[n]) for n in stored if "bias" not in n
    )
    assert torch.equal(found[f"{FIRST}embed_tokens.weight"], found["model.embed_tokens.weight"])
    assert torch.equal(found[f"{FIRST}shared_head.head.weight"], found["lm_head.weight"])


def test_a_tensor_that_is_missing_is_named(checkpoint, tmp_path):
    stored = load_file(checkpoint / "model.safetensors")
    del stored[f"{FIRST}eh_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(CheckpointError, match=rf"no tensor {FIRST}eh_proj.weight"):
        started(tmp_path)


@pytest.fixture(scope="module")
def toy_model(with_mtp):
    """The toy run's model with an MTP layer."""
    return with_mtp("qwen3_moe", toy_files() / "model")


def test_a_run_is_that_of_the_embedded_trainer(toy_model):
    """Drafts on the embedded engine, routes replayed by the policy's routers alone; the engine drafts with what was trained."""
    given = {"hf_checkpoint": toy_model, "enable_mtp_training": True, "spec_lookahead": 3, "draft_lr": 1e-2}
    given |= {"rollout_max_response_len": 12, "aux_loss_coef": 0.1}
    plugins = ["speculative", "r3", "tis"]
    mine, theirs = toy_run(plugins, trainer="megatron", **given), toy_run(plugins, **given)
    exact = ("reward/mean", "speculative/accept_rate", "r3/tokens_differing")
    close = ("train/mtp", "train/grad_norm", "train/grad_norm/draft", "train/load_balance", "train/expert_imbalance")
    for one, other in zip(mine.metrics, theirs.metrics, strict=True):
        assert [one[name] for name in exact] == [other[name] for name in exact]
        assert [one[name] for name in close] == pytest.approx([other[name] for name in close], rel=5e-3)
        assert one["mismatch/abs_log_prob"] < 1e-4
    sent = dict(mine.engine.model.named_parameters())
    trained = {n: t for n, t in weights(mine.trainer).items() if n.startswith(FIRST) and ".experts." not in n}
    assert len(trained) > 8 and all(torch.equal(sent[name], tensor) for name, tensor in trained.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "add --enable-mtp-training"),
        ({"online_sft_interval": 1}, "the policy's whole distribution"),
        ({"draft_ema_decay": 0.5}, "the running mean"),
        ({"reinit_draft_interval": 2}, "copies the policy's last layer"),
    ],
    ids=str,
)
def test_what_the_embedded_trainer_alone_does_is_refused(toy_model, options, message):
    given = {"enable_mtp_training": True, **options} if options else {}
    with pytest.raises(PlanError, match=message):
        plan(["speculative"], trainer="megatron", hf_checkpoint=toy_model, **given)
