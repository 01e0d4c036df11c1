"""Each optimizer steps like the library's own on the same parameters, and its state has the size that the README states."""

import math

import pytest
import torch

from miles_core.trainer import OptimizerConfig
from miles_optimizers.adamw8bit import EightBitAdamW, block_of
from miles_optimizers.config import OptimizersConfig
from miles_optimizers.host import HostAdamW
from miles_optimizers.muon import MuonAdamW, find_embeddings

CONFIG = OptimizerConfig(lr=0.02, betas=(0.8, 0.9), eps=1e-6)
SHAPES = {"embed": (12, 8), "experts": (3, 8, 16), "matrix": (24, 16), "column": (9, 1), "norm": (8,)}


def parameters(shapes, seed=0):
    torch.manual_seed(seed)
    return {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}


def groups_of(tensors, decay=0.1):
    def group(many):
        own = {n: t for n, t in tensors.items() if (t.dim() > 1) is many}
        return {"params": [*own.values()], "param_names": [*own], "weight_decay": decay * many, "miles_group": None}

    return [group(True), group(False)]


def adamw(groups):
    return torch.optim.AdamW(groups, lr=CONFIG.lr, betas=CONFIG.betas, eps=CONFIG.eps)


def run(optimizer, tensors, steps=3):
    """Steps with gradients that depend on the step only, and a learning rate that falls as the trainer would set it."""
    for step in range(steps):
        torch.manual_seed(100 + step)
        for group in optimizer.param_groups:
            group["lr"] = CONFIG.lr / (step + 1)
        for tensor in tensors.values():
            tensor.grad = torch.randn(tensor.shape)
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def test_muon_orthogonalizes_each_hidden_matrix_and_leaves_the_rest_to_adamw():
    ours = parameters(SHAPES)
    options = OptimizersConfig(muon_lr=0.05, muon_momentum=0.7)
    optimizer = MuonAdamW(groups_of(ours), adamw, CONFIG.lr, options, others={"embed"})
    found = run(optimizer, ours)
    theirs = parameters(SHAPES)
    plain = adamw(groups_of({n: theirs[n] for n in ("embed", "column", "norm")}))
    expected = run(plain, theirs)  # gradients of all parameters, steps of three
    for name in ("embed", "column", "norm"):
        assert torch.equal(found[name], expected[name])
    whole = {"matrix": theirs["matrix"], **{str(i): theirs["experts"].detach()[i] for i in range(3)}}
    muon = torch.optim.Muon(whole.values(), lr=0.05, weight_decay=0.1, momentum=0.7, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        torch.manual_seed(100 + step)
        grads = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        muon.param_groups[0]["lr"] = 0.05 / (step + 1)
        for name, matrix in whole.items():
            matrix.grad = grads["matrix"] if name == "matrix" else grads["experts"][int(name)]
        muon.step()
    assert torch.allclose(found["matrix"], whole["matrix"], rtol=0, atol=1e-6)
    for i in range(3):
        assert torch.allclose(found["experts"][i], whole[str(i)], rtol=0, atol=1e-6)
    state = {name: set(optimizer.state[ours[name]]) for name in SHAPES}
    assert state["matrix"] == state["experts"] == {"momentum_buffer"} and "exp_avg" in state["embed"]


def test_an_update_of_muon_has_the_size_of_one_of_adamw():
    tensor = torch.zeros(64, 256, requires_grad=True)
    options = OptimizersConfig()
    optimizer = MuonAdamW(groups_of({"w": tensor}, decay=0.0), adamw, CONFIG.lr, options)
    moved = run(optimizer, {"w": tensor}, steps=1)["w"]
    assert moved.square().mean().sqrt() == pytest.approx(0.2 * CONFIG.lr, rel=0.15)  # arXiv 2502.16982, section 2.2


def test_embeddings_and_output_layers_are_found():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.inner = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4)
            self.out = torch.nn.Linear(4, 5)

        def get_output_embeddings(self):
            return self.out

    assert find_embeddings(Model()) == {"tokens.weight", "out.weight", "out.bias"}


def test_eight_bit_steps_are_those_of_torchao():
    from torchao.optim import AdamW8bit

    shapes = {"large": (32, 512), "vector": (8,)}
    ours, theirs = parameters(shapes), parameters(shapes)
    optimizer = EightBitAdamW(groups_of(ours), adamw, CONFIG)
    found = run(optimizer, ours)
    with torch.compiler.set_stance("force_eager"):
        plain = AdamW8bit(groups_of(theirs), lr=CONFIG.lr, betas=CONFIG.betas, eps=CONFIG.eps)
        for step in range(3):
            torch.manual_seed(100 + step)
            for group in plain.param_groups:
                group["lr"].fill_(CONFIG.lr / (step + 1))
            for tensor in theirs.values():
                tensor.grad = torch.randn(tensor.shape)
            plain.step()
    assert torch.equal(found["large"], theirs["large"])
    torch.testing.assert_close(found["vector"], theirs["vector"].detach())
    state = optimizer.state[ours["large"]]
    held = sum(t.nbytes for n, t in state.items() if n != "step")
    assert held == 2 * 32 * 512 * (1 + 4 / 256)
    assert {n: list(t.shape) for n, t in state.items() if n.startswith("exp_avg_")} == {
        "exp_avg_codes": [32, 512],
        "exp_avg_scale": [32, 2],
        "exp_avg_sq_codes": [32, 512],
        "exp_avg_sq_scale": [32, 2],
    }


@pytest.mark.parametrize(
    ("shape", "block"), [((4, 512), 256), ((4, 896), 128), ((2, 3, 96), 32), ((4, 48), None), ((512,), None)]
)
def test_blocks_do_not_cross_rows(shape, block):
    assert block_of(torch.empty(shape)) == block and (block is None or shape[-1] % block == 0)
    assert block_of(torch.empty(*shape, 2)[..., 0]) is None  # not contiguous


def test_small_learning_rates_still_move_eight_bit_weights_like_full_ones():
    """The error of a block's codes is bounded, so the updates of both agree to a few percent of the learning rate."""
    shapes = {"w": (16, 256)}
    ours, theirs = parameters(shapes), parameters(shapes)
    start = ours["w"].detach().clone()
    eight = run(EightBitAdamW(groups_of(ours), adamw, CONFIG), ours, steps=8)["w"]
    full = run(adamw(groups_of(theirs)), theirs, steps=8)["w"]
    assert (eight - full).norm() < 0.1 * (full - start).norm()


def test_the_host_steps_as_the_device_does():
    ours, theirs = parameters(SHAPES), parameters(SHAPES)
    optimizer = HostAdamW(groups_of(ours), CONFIG)
    found = run(optimizer, ours)
    fused = torch.optim.AdamW(groups_of(theirs), lr=CONFIG.lr, betas=CONFIG.betas, eps=CONFIG.eps, fused=True)
    expected = run(fused, theirs)
    assert all(torch.equal(found[name], expected[name]) for name in SHAPES)
    moments = optimizer.state[ours["norm"]]
    assert torch.equal(moments["exp_avg"], fused.state[theirs["norm"]]["exp_avg"]) and len(optimizer.state) == 5
    optimizer.state.pop(ours["norm"], None)
    assert ours["norm"] not in optimizer.state and len(optimizer.state) == 4
    # without a gradient nothing moves, and decay is not applied
    for tensor in ours.values():
        tensor.grad = None
    optimizer.step()
    assert all(torch.equal(found[name], tensor) for name, tensor in ours.items())
    assert math.isfinite(float(moments["exp_avg"].sum()))
