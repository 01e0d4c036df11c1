"""The groups of ranks, and where this process stands among them."""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from miles_core.plugin import ConfigError
from miles_core.trainer import World
from miles_megatron.sizes import Sizes


def start_groups(s: Sizes, seed: int) -> World:
    """Make Megatron-Core's groups. A process that nobody has put into a group of processes makes one of its own.

    Args:
        s: parallel sizes; ``s.ranks`` must be the number of processes.
        seed: of Megatron-Core's random-number states.

    Raises:
        ConfigError: there are more or fewer processes than the plan says.
    """
    _prefer_the_cudnn_of_torch()
    from megatron.core import parallel_state

    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo", init_method=f"tcp://127.0.0.1:{_port()}", rank=0, world_size=1
        )  # fmt: skip
    if dist.get_world_size() != s.ranks:
        raise ConfigError(
            f"the plan divides the model among {s.ranks} ranks, and {dist.get_world_size()} processes were started"
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if _started.get("groups") != (s, dist.group.WORLD):
        _start(s)
        _started["groups"] = (s, dist.group.WORLD)
    if torch.cuda.is_available():
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(seed)
    return World(dist.get_rank(), s.ranks, parallel_state.get_data_parallel_rank(), s.dp)


def _prefer_the_cudnn_of_torch() -> None:
    """TransformerEngine looks for a cuDNN of the machine first. Beside torch's own, which is loaded already, another version finds no
    kernel of fused attention, and attention then stores its scores."""
    spec = find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / "cudnn" / "lib").is_dir():
            os.environ.setdefault("CUDNN_HOME", str(Path(place) / "cudnn"))


#: What this process's groups were made for: the sizes, and torch.distributed's group of all ranks.
_started: dict[str, Any] = {}


def _start(s: Sizes) -> None:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=s.tp,
        pipeline_model_parallel_size=s.pp,
        virtual_pipeline_model_parallel_size=s.virtual if s.virtual > 1 else None,
        context_parallel_size=s.cp,
        expert_model_parallel_size=s.ep,
        expert_tensor_parallel_size=s.etp,
        create_gloo_process_groups=not torch.cuda.is_available(),
    )


def _port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
