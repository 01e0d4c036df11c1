"""Routers whose weights are FP32 in a BF16 model: loaded, multiplied, trained, saved and exported in FP32.

Most tests need megatron-core; they run on a CPU with its local modules, and gloo.
"""

from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_core.trainer import Callbacks, CheckpointFiles, MtpRequest
from miles_megatron import families
from miles_megatron.testing import make, may_have_children
from miles_testing import Setup
from miles_testing.yardstick import make_batch, weighted

INSTALLED = bool(find_spec("megatron")) and find_spec("megatron.core") is not None
needs_megatron = pytest.mark.skipif(not INSTALLED, reason="needs megatron-core")

#: Families whose routers multiply in FP32 in a BF16 model of Transformers.
IN_FP32 = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "nemotron_h")
#: Families whose routers keep the checkpoint's FP32: those, and MiniMax-M2's, as in SGLang.
WIDE = (*IN_FP32, "minimax_m2")
ROUTER = "gate.weight"


def convert(source, directory, routers):
    """The checkpoint in BF16, except its correction biases, with routers in the type ``routers``."""
    directory.mkdir()
    (directory / "config.json").write_text((source / "config.json").read_text())
    stored = load_file(source / "model.safetensors")
    for name, tensor in stored.items():
        if "correction_bias" not in name:
            stored[name] = tensor.to(routers if name.endswith(ROUTER) else torch.bfloat16)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture
def in_fp32(checkpoints, tmp_path):
    """GLM-4-MoE in BF16 with routers in FP32."""
    return convert(checkpoints("glm4_moe"), tmp_path / "from", torch.float32)


def make_trainer(checkpoint, sizes, **more):
    trainer = make(checkpoint, Setup(), dtype=torch.bfloat16, **sizes, **more)
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    return trainer


def everything(trainer):
    return {n: t.clone() for unit in trainer.units(everywhere=True) for n, t in unit.tensors.items()}


def router_of_transformers(checkpoint):
    """The first router of Transformers' BF16 model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    return next(m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter"))


@pytest.mark.parametrize("chosen", families.FAMILIES)
def test_the_families_are_those_of_transformers_and_minimax(config_of, checkpoints, chosen):
    experts = families.read(config_of(chosen)).experts
    if experts is not None:
        assert experts.wide_router == (chosen in WIDE)
    if experts is not None and chosen != "minimax_m2":
        x = torch.ones(2, config_of(chosen)["hidden_size"], dtype=torch.bfloat16)
        assert (router_of_transformers(checkpoints(chosen))(x)[0].dtype == torch.float32) == (chosen in IN_FP32)


@needs_megatron
@pytest.mark.slow
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chosen", WIDE)
def test_an_export_has_the_types_and_bytes_of_the_checkpoint(checkpoints, tmp_path, chosen, stored):
    checkpoint = convert(checkpoints(chosen), tmp_path / "from", stored)
    trainer = make_trainer(checkpoint, {})
    trainer.log_probs(make_batch(), "ref")
    trainer.export(tmp_path / "to", None)
    before, after = CheckpointFiles(checkpoint), CheckpointFiles(tmp_path / "to")
    assert before.entries.keys() == after.entries.keys()
    assert {entry.dtype for name, entry in before.entries.items() if name.endswith(ROUTER)} == {stored}
    for name, entry in before.entries.items():
        assert after.entries[name].dtype == entry.dtype, name
        assert torch.equal(before.read(name), after.read(name)), name


@needs_megatron
@pytest.mark.slow
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chosen", IN_FP32)
def test_logits_and_gradients_are_those_of_transformers(checkpoints, tmp_path, chosen, stored):
    checkpoint = convert(checkpoints(chosen), tmp_path / "from", stored)
    theirs, trainer = router_of_transformers(checkpoint).float(), make_trainer(checkpoint, {})
    ours = trainer.routers._seats[0].router
    assert ours.weight.dtype == stored
    torch.manual_seed(0)
    x, other = (torch.randn(50, 1, theirs.hidden_dim, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    other.data.copy_(x)
    logits, expected = ours.gating(x), theirs(other)[0]
    assert logits.dtype == torch.float32 and torch.equal(logits.squeeze(1), expected)
    weight = torch.randn_like(expected)
    found = torch.autograd.grad((logits.squeeze(1) * weight).sum(), (x, ours.weight))
    for one, right in zip(found, torch.autograd.grad((expected * weight).sum(), (other, theirs.weight)), strict=True):
        torch.testing.assert_close(
            one, right.to(one.dtype), rtol=1e-2 if one.dtype == torch.bfloat16 else 1e-6, atol=1e-5
        )


@needs_megatron
@pytest.mark.slow
def test_an_mtp_layer_keeps_its_router(with_mtp, checkpoints, tmp_path):
    checkpoint = convert(with_mtp("glm4_moe"), tmp_path / "from", torch.float32)
    trainer = make_trainer(checkpoint, {}, mtp=MtpRequest("mtp", "draft", 0.2, clip_grad=0.1))
    stored, name = load_file(checkpoint / "model.safetensors"), "model.layers.2.mlp.gate.weight"
    assert torch.equal(everything(trainer)[name], stored[name])
    trainer.step(make_batch())
    change = everything(trainer)[name] - stored[name]
    assert change.dtype == torch.float32 and change.any()


def saved(checkpoint, directory, sizes):
    """The weights after one step, whose state is saved, and after the next one."""
    may_have_children()
    trainer = make_trainer(checkpoint, sizes)
    trainer.step(make_batch())
    first = everything(trainer)
    trainer.save(directory)
    trainer.step(make_batch())
    return first, everything(trainer)


@needs_megatron
@pytest.mark.slow
def test_a_resumed_trainer_continues_with_the_same_bits(in_fp32, tmp_path):
    first, second = saved(in_fp32, tmp_path / "state", {})
    routers = [name for name in first if name.endswith(ROUTER)]
    assert routers and all(not torch.equal(first[n], first[n].bfloat16().float()) for n in routers)
    trainer = make_trainer(in_fp32, {})
    trainer.load(tmp_path / "state")
    for expected in (first, second):
        found = everything(trainer)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        trainer.step(make_batch())


@needs_megatron
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp": 2, "sequence": True}, {"ep": 2}, {"pp": 2}], ids=str)
def test_two_ranks_train_routers_as_one_does(ranks, in_fp32, tmp_path, sizes):
    expected = saved(in_fp32, tmp_path / "one", {})[1]
    before = load_file(in_fp32 / "model.safetensors")
    for _, found in ranks.run(saved, in_fp32, tmp_path / "two", sizes):
        for name in (name for name in expected if name.endswith(ROUTER)):
            assert found[name].dtype == torch.float32
            moved, right = found[name] - before[name], expected[name] - before[name]
            assert float((moved - right).norm() / right.norm()) < 0.3, name  # sums of BF16 gradients differ
