"""Additional layers after a model's own decoder layers, which the model's forward does not run.

Checkpoints store such layers under the indices that follow the last decoder layer. Here they are further entries of the model's list
of layers, so parameters, export, loading, precision and optimizer handle them by their checkpoint names like other layers. The plugin
that adds a layer runs it, with the call of the pass.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from miles_core.errors import CheckpointError
from miles_embedded.model.onednn import use_fast_linear
from miles_embedded.model.operations import operations_of, use_operations
from miles_embedded.model.parts import backbone, decoder_layers, text_configuration
from miles_embedded.model.views import Loader
from miles_formats.convert.decode import open_quantized


def new_layer(model: nn.Module) -> nn.Module:
    """Make an untrained layer of the same type as the model's last one, with the next index; does not add it to the model.

    Raises:
        CheckpointError: the model runs every layer of its list, or its layers need more than hidden states and positions.
    """
    layers: Any = getattr(backbone(model), "layers", None)
    runs = inspect.getsource(inspect.unwrap(type(backbone(model)).forward))
    rotary = getattr(backbone(model), "rotary_emb", None)
    plain = rotary is not None and len(inspect.signature(rotary.forward).parameters) == 2
    if "num_hidden_layers]" not in runs or not plain or any("Indexer" in type(m).__name__ for m in model.modules()):
        raise CheckpointError(
            f"{type(model).__name__} cannot have additional layers: its code runs every layer of its list, or its layers need "
            "more than hidden states and positions"
        )
    config = copy.deepcopy(text_configuration(model))
    count = len(decoder_layers(model))
    number = len(layers)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == count:  # an entry per layer
            setattr(config, name, [*value, *value[-1:] * (number + 1 - count)])
    last: Any = decoder_layers(model)[-1]
    with torch.random.fork_rng(devices=[]):  # leave the run's random state unchanged
        made: nn.Module = type(last)(config, number).eval()
    dtypes = {name: tensor.dtype for name, tensor in last.state_dict().items()}
    usual = next(last.parameters())
    for name, tensor in (*made.named_parameters(), *made.named_buffers()):
        tensor.data = tensor.data.to(usual.device, dtypes.get(name, usual.dtype))
    return made


def add_layer(model: nn.Module, layer: nn.Module) -> str:
    """Append ``layer``, made by ``new_layer``, to the model's layers, with the model's operations; returns the prefix of its tensor names."""
    layers: Any = backbone(model).layers
    layers.append(layer)
    use_fast_linear(layer)
    use_operations(layer, operations_of(model))
    return next(name for name, module in model.named_modules() if module is layer) + "."


def run_layer(model: nn.Module, layer: nn.Module, x: Tensor, positions: Tensor, call: Any) -> Tensor:
    """Run one layer on x [n, hidden] at positions [n], as the model's forward would; ``call`` is the call of the pass."""
    where = positions.unsqueeze(0)
    rotary: Any = backbone(model).rotary_emb
    states = x.unsqueeze(0)
    out = layer(
        states,
        attention_mask=None,
        position_ids=where,
        position_embeddings=rotary(states, where),
        use_cache=False,
        call=call,
    )
    return (out[0] if isinstance(out, tuple) else out)[0]


def read_layer(model: nn.Module, path: str | Path, prefix: str, without: Collection[str] = ()) -> None:
    """Read the checkpoint tensors whose names start with ``prefix`` into ``model``.

    Args:
        model: the model, which already has the layer.
        path: a Hugging Face checkpoint; a quantised one is dequantised.
        prefix: the result of ``add_layer``.
        without: tensor names, relative to the prefix, to skip.

    Raises:
        CheckpointError: the checkpoint lacks tensors of the layer, or has tensors that the layer lacks.
    """
    loader = Loader(model)
    for name, tensor in _tensors(Path(path), prefix):
        if name.removeprefix(prefix) not in without:
            loader.put(name, tensor)
    missing = [name for name in loader.missing() if name.startswith(prefix)]
    if missing:
        raise CheckpointError(f"{path} lacks {len(missing)} tensors of {prefix}*, the first is {missing[0]}")


def _tensors(path: Path, prefix: str) -> Iterator[tuple[str, Tensor]]:
    quantized = open_quantized(path, "--hf-checkpoint")
    if quantized is not None:
        yield from ((n, t) for n, t in quantized.tensors(torch.float32) if n.startswith(prefix))
        return
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            yield from ((n, opened.get_tensor(n)) for n in opened.keys() if n.startswith(prefix))  # noqa: SIM118 - not a dict
