"""The base model under the adapters: frozen, shared by the models of a process, and possibly stored in a number format only.

With ``--lora-sync adapter`` trainer, engine and reference model of all policies with one checkpoint read the same parameters, if they
run in one process. Their adapters are separate.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from miles_core.plugin import Policy, Run, StateKey
from miles_embedded import encode_weights, mark_constant, read_weights, share_weights
from miles_embedded import make_model as load_checkpoint
from miles_formats import Codec, make_codec

#: (checkpoint, dtype, device, precision) -> the first model with these weights in this process.
BASES = StateKey[dict[tuple[str, ...], nn.Module]]()


def make_model(run: Run, policy: Policy, role: str) -> nn.Module:
    """Make the model of a policy without adapters; ``on_model`` adds them."""
    config = run.config_of(policy)
    if config.plugin("lora").sync == "merged" or role == "critic":
        return load_checkpoint(run, policy)
    codec = codec_of(run, policy, role)
    name = codec.format.name if codec.format is not None else ""
    options = config.model
    start = options.ref_load or policy.hf_checkpoint or options.hf_checkpoint or ""
    key = (str(start), options.dtype, options.device, name)
    known = run.state.setdefault(BASES, {})
    if key in known and shares(run):
        model = load_checkpoint(run, policy, partial(_share, known[key]))
    elif codec.format is not None:
        devices = _devices(options.device, config.plugin("lora").base_gpus)
        encode = partial(encode_weights, codec=codec, devices=devices)
        model = load_checkpoint(run, policy, partial(read_weights, codec=codec, devices=devices), encode)
    else:
        model = load_checkpoint(run, policy)
    mark_constant(model.parameters(), streamed=False)
    known.setdefault(key, model)
    return model


def _share(owner: nn.Module, model: nn.Module, files: object) -> bool:
    """Give a model without memory the weights of ``owner``."""
    share_weights(model, owner)
    return True


def _devices(name: str, count: int) -> list[torch.device]:
    """Return the devices of the codes: the run's first, then the other GPUs. On a CPU all are the same."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cuda" or count == 1:
        return [torch.device(name)] * count
    return [torch.device(name, number) for number in range(count)]


def codec_of(run: Run, policy: Policy, role: str) -> Codec:
    """Return the codec of the base in a model of this role: the rollout's precision for the engine, otherwise the trainer's."""
    config = run.config_of(policy)
    return make_codec(run, policy, config.rollout.precision if role == "rollout" else config.train.precision)


def shares(run: Run) -> bool:
    """Whether the models of this process share parameters: not if they are sharded over ranks, or with ``--colocate``."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not (several and torch.distributed.get_world_size() > 1) and not run.config.run.colocate
