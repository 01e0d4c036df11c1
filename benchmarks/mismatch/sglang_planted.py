"""SGLang's processes for ``sglang_defects.py``: its schedulers can make SGLang's own model compute something else, and undo it.

SGLang calls ``install`` in each of its processes (``benchmarks.engine.sglang_plugin``). The worker has one more endpoint, ``plant``, which
calls ``plant`` in every scheduler. CUDA graphs keep what they captured, so defects of decoding need an SGLang without them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from miles_sglang import worker

Undo = Callable[[], None]

#: What takes the planted defect back.
_undo: list[Undo] = []


def install() -> None:
    """Give SGLang's schedulers the method ``plant_defect``."""
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler.plant_defect = plant


class Planting(worker.Worker):
    """A worker that can plant defects."""

    def __init__(self, engine: Any, writer: asyncio.StreamWriter) -> None:
        super().__init__(engine, writer)
        self.endpoints["plant"] = self.plant

    async def plant(self, body: dict[str, Any], _: bytes) -> None:
        """Take back the last defect and plant ``body["name"]``, none if it is empty."""
        await asyncio.to_thread(self.engine.collective_rpc, "plant_defect", name=body["name"])


def plant(scheduler: Any, name: str) -> None:
    """Runs in a scheduler.

    Raises:
        RuntimeError: SGLang's model has nothing that the defect could change.
    """
    while _undo:
        _undo.pop()()
    if name:
        _undo.extend(PLANTS[name](scheduler.tp_worker.model_runner.model))
        if not _undo:
            raise RuntimeError(
                f"SGLang's {type(scheduler.tp_worker.model_runner.model).__name__} cannot have the defect {name}"
            )


def _set(owner: Any, name: str, value: Any) -> Undo:
    """Set an attribute of an instance."""
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before) if own else delattr(owner, name)


def _find(model: Any, kind: str) -> Iterator[Any]:
    return (module for module in model.modules() if type(module).__name__ == kind)


def _attention_scale(model: Any) -> Iterator[Undo]:
    for attention in _find(model, "RadixAttention"):
        yield _set(attention, "scaling", attention.scaling * 1.02)


def _epsilon(model: Any) -> Iterator[Undo]:
    for norm in model.modules():
        if hasattr(norm, "variance_epsilon"):
            yield _set(norm, "variance_epsilon", 0.05)


def _rotation(change: Callable[[Any], torch.Tensor]) -> Callable[[Any], Iterator[Undo]]:
    """Change the frequencies [dim / 2] of rotations."""

    def plant(model: Any) -> Iterator[Undo]:
        for rotary in {id(m): m for m in model.modules() if hasattr(m, "cos_sin_cache")}.values():
            cache = rotary.cos_sin_cache
            before = cache.clone()
            angles = torch.arange(len(cache), dtype=torch.float32)[:, None] * change(rotary).cpu()
            cache.copy_(torch.cat([angles.cos(), angles.sin()], -1))
            yield partial(cache.copy_, before)

    return plant


def _late_positions(model: Any) -> Iterator[Undo]:
    forward = model.forward

    def changed(ids: Any, positions: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(ids, positions + int(batch.forward_mode.is_decode()), batch, *args, **kwargs)

    yield _set(model, "forward", changed)


def _generated_logits(model: Any) -> Iterator[Undo]:
    processor = model.logits_processor
    forward = processor.forward

    def changed(ids: Any, hidden: Any, head: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        found = forward(ids, hidden, head, batch, *args, **kwargs)
        if batch.forward_mode.is_decode():
            found.next_token_logits.mul_(1.05)
        return found

    yield _set(processor, "forward", changed)


def _logits(model: Any) -> Iterator[Undo]:
    processor = model.logits_processor
    compute = processor._compute_lm_head
    yield _set(processor, "_compute_lm_head", lambda *args, **kwargs: compute(*args, **kwargs) * 1.02)


def _never_chosen(model: Any) -> Iterator[Undo]:
    def mask(module: Any, args: Any, output: Any) -> Any:
        logits = (output[0] if isinstance(output, tuple) else output).clone()
        logits[:, 0] = -1e4
        return (logits, *output[1:]) if isinstance(output, tuple) else logits

    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            yield layer.mlp.gate.register_forward_hook(mask).remove


def _not_normalized(model: Any) -> Iterator[Undo]:
    for topk in _find(model, "TopK"):
        yield _set(topk.topk_config, "renormalize", False)


def _scaled_mlp(model: Any) -> Iterator[Undo]:
    yield model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 0.92).remove


#: Defect -> what plants it in SGLang's model.
PLANTS: dict[str, Callable[[Any], Iterator[Undo]]] = {
    "attention scale x 1.02": _attention_scale,
    "epsilon .05": _epsilon,
    "rope theta x 100": _rotation(lambda rotary: rotary._compute_inv_freq(rotary.base * 100)),
    "rotary frequencies x 1.02": _rotation(lambda rotary: rotary._compute_inv_freq(rotary.base) * 1.02),
    "generated: position + 1": _late_positions,
    "generated: logits x 1.05": _generated_logits,
    "logits x 1.02": _logits,
    "MLP of one layer x .92": _scaled_mlp,
    "one expert never chosen": _never_chosen,
    "top-k weights not normalized": _not_normalized,
}


if __name__ == "__main__":
    worker.main(int(sys.argv[1]), int(sys.argv[2]), Planting)
