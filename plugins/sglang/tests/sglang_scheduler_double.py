"""A double of SGLang's scheduler side that holds a real small model, laid out as SGLang lays models out.

Query, key and value are one parameter, gate and up are one, the experts of a layer are two, and a model may have an output layer of its
own although its checkpoint ties it. ``load_weights`` finds the place of each tensor by its name, as SGLang's models do. The numbers
are computed by Transformers' modules, whose parameters are views of the fused ones: what was not loaded is not computed with.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from sglang_double import DoubleLink, Manager
from torch import Tensor, nn

from miles_core.data import Encoded
from miles_embedded import load_model
from miles_embedded.model.parts import backbone
from miles_embedded.model.views import export

#: Part of a checkpoint's name -> fused name, and the number of the part.
_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


class SchedulerModel(nn.Module):
    """A model of a checkpoint with random weights until it is updated, as SGLang holds it with ``load_format="dummy"``.

    Args:
        checkpoint: of Llama, Qwen3 or Qwen3-MoE.
        own_head: it has an output layer of its own, even where the checkpoint ties it.
        takes_head: ``load_weights`` loads ``lm_head.weight``; otherwise it passes over that name, as SGLang's Llama does where the
            configuration ties the two.

    Attributes:
        module: Transformers' model, which computes with these parameters.
    """

    def __init__(self, checkpoint: Path, own_head: bool = False, takes_head: bool = True) -> None:
        super().__init__()
        self.takes_head = takes_head
        model: Any = load_model(checkpoint, "float32")
        self.__dict__["module"] = model  # no submodule: its parameters are views of those here
        self.config = model.config
        self._places: dict[str, Tensor] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(99)
            self._hold(model, own_head)
            for parameter in self.parameters():
                parameter.uniform_(-0.5, 0.5)

    def _hold(self, model: Any, own_head: bool) -> None:
        if own_head:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        tied = model.lm_head.weight is backbone(model).embed_tokens.weight
        fused: dict[str, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in model.named_parameters():
            if name == "lm_head.weight" and tied:
                continue
            if ".experts." in name:
                self._hold_experts(name, parameter)
                continue
            part = next((p for p in _FUSED if f".{p}." in name), None)
            target = name.replace(part, _FUSED[part][0]) if part else name
            fused.setdefault(target, []).append((name, parameter))
        for target, parts in fused.items():
            parts.sort(key=lambda entry: _FUSED.get(entry[0].split(".")[-2], ("", 0))[1])
            whole = nn.Parameter(torch.cat([p.detach() for _, p in parts]))
            self.register_parameter(target.replace(".", "/"), whole)
            for (name, parameter), view in zip(parts, whole.data.split([len(p) for _, p in parts]), strict=True):
                parameter.data = self._places[name] = view

    def _hold_experts(self, name: str, parameter: nn.Parameter) -> None:
        """``experts.gate_up_proj`` [experts, 2 * width, hidden] is SGLang's ``w13_weight``, ``experts.down_proj`` its ``w2_weight``."""
        whole = nn.Parameter(parameter.detach().clone())
        self.register_parameter(name.replace(".", "/"), whole)
        parameter.data = whole.data
        stem = name.rpartition(".")[0]
        for number, expert in enumerate(whole.data):
            if name.endswith("gate_up_proj"):
                gate, up = expert.chunk(2)
                self._places[f"{stem}.{number}.gate_proj.weight"] = gate
                self._places[f"{stem}.{number}.up_proj.weight"] = up
            else:
                self._places[f"{stem}.{number}.down_proj.weight"] = expert

    def named_parameters(self, *more: Any, **named: Any) -> Any:
        """Under SGLang's names, which have dots."""
        return ((name.replace("/", "."), p) for name, p in super().named_parameters(*more, **named))

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "lm_head.weight" and (not self.takes_head or name not in self._places):
                continue  # as SGLang's models: without a word
            self._places[name].copy_(tensor)


class SchedulerManager(Manager):
    """A manager whose schedulers hold a ``SchedulerModel``."""

    def __init__(self, made: SchedulerModel, checkpoint: Path, arguments: Mapping[str, Any]) -> None:
        self._made = made
        super().__init__(checkpoint, arguments)

    def computing(self, checkpoint: Path) -> Any:
        return self._made.__dict__["module"]

    @property
    def scheduled(self) -> Any:
        return self._made

    def _load(self) -> None:
        """The engine in front computes with the memory that was loaded into; it only has to forget its cached keys."""
        units = [
            Encoded(name, {name: t}) for unit in export(self.computing(Path())) for name, t in unit.tensors.items()
        ]
        updating = asyncio.get_running_loop().create_task(self.engine.update_weights(units, int(self.version)))
        updating.add_done_callback(lambda task: task.result())


class SchedulerLink(DoubleLink):
    """A link to such an SGLang.

    Args:
        make: checkpoint -> the model that a start of SGLang has.
    """

    def __init__(self, make: Callable[[Path], SchedulerModel], checkpoint: Path, arguments: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, arguments)
        self._make = make

    def managed(self) -> Manager:
        return SchedulerManager(self._make(self.checkpoint), self.checkpoint, self.arguments)
