"""Creates Megatron-Core's process groups."""

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
    """Create Megatron-Core's process groups. Without an initialised torch.distributed, this process forms a group of one.

    Args:
        s: parallel sizes; ``s.ranks`` must equal the number of processes.
        seed: seed of Megatron-Core's random-number states.

    Returns:
        this process's rank and data-parallel rank.

    Raises:
        ConfigError: the number of processes differs from ``s.ranks``.
    """
    _prefer_the_cudnn_of_torch()
    from megatron.core import parallel_state

    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo", init_method=f"tcp://127.0.0.1:{_port()}", rank=0, world_size=1
        )  # fmt: skip
    if dist.get_world_size() != s.ranks:
        raise ConfigError(
            f"the plan assumes {s.ranks} training ranks, but {dist.get_world_size()} processes were started"
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
    """Point TransformerEngine to torch's cuDNN.

    By default it prefers a system cuDNN. If its version differs from torch's, which is already loaded, no fused attention kernel is found
    and attention stores its scores."""
    spec = find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / "cudnn" / "lib").is_dir():
            os.environ.setdefault("CUDNN_HOME", str(Path(place) / "cudnn"))


#: The parallel sizes and the world group for which this process's groups were created.
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
