"""Muon for the matrices of the hidden layers, AdamW for everything else (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

Muon keeps one momentum buffer B per matrix and steps along the nearest semi-orthogonal matrix, which five Newton-Schulz iterations
approximate (``torch.optim.Muon``):

    B = m B + (1 - m) G,   U = (1 - m) G + m B,   W = W - lr (d W + s NewtonSchulz(U))

with momentum m, weight decay d, and the size s of the update of a matrix [a, b]: 0.2 sqrt(max(a, b)) gives updates the root mean square
of AdamW's, so that its learning rates and weight decays carry over (Liu et al., arXiv 2502.16982, section 2.2, equation 4).
Embeddings, output layer, vectors and parameter groups with options of their own are stepped by AdamW. Experts that are joined in one
tensor [experts, a, b] are orthogonalized separately.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.plugin import Policy, Run, StateKey
from miles_optimizers.config import OptimizersConfig

#: policy name -> names of its embeddings and of the parameters of its output layer.
OTHERS = StateKey[dict[str, frozenset[str]]]()


def make_optimizer(run: Run, policy: Policy, groups: Sequence[dict[str, Any]]) -> MuonAdamW:
    """Provider of ``--optimizer muon``."""
    config = run.config_of(policy)

    def make_adamw(rest: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = run.hooks.make("optimizer", "adamw", run=run, policy=policy, groups=rest)
        return made

    others = run.state.get(OTHERS, {}).get(policy.name, frozenset())
    return MuonAdamW(groups, make_adamw, config.train.lr, config.plugin("optimizers"), others)


def find_embeddings(model: nn.Module) -> frozenset[str]:
    """Return the names of the embeddings and of the parameters of the output layer, which may be a value head."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    whole = [m for m in model.modules() if isinstance(m, nn.Embedding)] + ([] if output is None else [output])
    found = {id(p) for module in whole for p in module.parameters()}
    return frozenset(name for name, p in model.named_parameters() if id(p) in found)


class MuonAdamW:
    """An optimizer with torch's interface that divides parameters between Muon and AdamW.

    Args:
        groups: torch's parameter groups, with ``param_names`` and ``weight_decay``.
        make_adamw: makes AdamW for parameter groups.
        lr: peak of the learning rates that the groups receive.
        options: settings of Muon.
        others: names of matrices that AdamW steps.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        make_adamw: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        lr: float,
        options: OptimizersConfig,
        others: Collection[str] = (),
    ) -> None:
        self._ratio = 1.0 if options.muon_lr is None else options.muon_lr / lr
        self._muon_groups, rest = _divide(groups, others)
        self._muon: torch.optim.Muon | None = None
        #: one group per group of Muon: each matrix as a 2-D alias of the parameter, or of a part of it
        self._matrices: dict[Tensor, list[Tensor]] = {}
        if self._muon_groups:
            self._matrices = {p: _split(p.detach()) for group in self._muon_groups for p in group["params"]}
            parts = [{"params": [m for p in g["params"] for m in self._matrices[p]]} for g in self._muon_groups]
            self._muon = torch.optim.Muon(parts, momentum=options.muon_momentum, adjust_lr_fn=options.muon_adjust_lr)
        self._adamw = make_adamw(rest) if rest else None
        self.state: Any = defaultdict(dict) if self._adamw is None else self._adamw.state
        self.param_groups = [*self._muon_groups, *(() if self._adamw is None else self._adamw.param_groups)]
        self.defaults = {} if self._adamw is None else self._adamw.defaults

    def step(self) -> None:
        """Step all parameters with a gradient."""
        if self._muon is not None:
            for group, own in zip(self._muon_groups, self._muon.param_groups, strict=True):
                own["lr"], own["weight_decay"] = group["lr"] * self._ratio, group["weight_decay"]
                for parameter in group["params"]:
                    self._bind(parameter)
            self._muon.step()
            self._muon.zero_grad()
        if self._adamw is not None:
            self._adamw.step()

    def _bind(self, parameter: Tensor) -> None:
        """Set gradient and momentum of each matrix of a parameter to the views of the parameter's own."""
        assert self._muon is not None
        if parameter.grad is None:
            return
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        parts = zip(_split(parameter.grad), _split(state["momentum_buffer"]), strict=True)
        for matrix, (grad, momentum) in zip(self._matrices[parameter], parts, strict=True):
            matrix.grad = grad
            self._muon.state[matrix] = {"momentum_buffer": momentum}


def _split(tensor: Tensor) -> list[Tensor]:
    """Return the matrices of a tensor [a, b] or [n, a, b]."""
    return [tensor] if tensor.dim() == 2 else list(tensor.unbind(0))


def _divide(
    groups: Sequence[dict[str, Any]], others: Collection[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Divide parameter groups between Muon and AdamW."""
    found: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for group in groups:
        pairs = list(zip(group["param_names"], group["params"], strict=True))
        ours = [
            (n, p)
            for n, p in pairs
            if p.dim() in (2, 3) and min(p.shape[-2:]) > 1 and n not in others and group.get("miles_group") is None
        ]
        names = {name for name, _ in ours}
        for target, members in zip(found, (ours, [pair for pair in pairs if pair[0] not in names]), strict=True):
            if members:
                target.append({**group, "param_names": [n for n, _ in members], "params": [p for _, p in members]})
    return found
