"""The CUDA graphs that SGLang captures at its start. By default it captures 36 batch sizes of decode steps and, compiled, 58 sizes of
prompts. A rollout spends its time in decode steps, which read all weights whatever the size of a small batch, so that padding costs little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Largest captured batch without ``--sglang-cuda-graph-max-bs-decode``, as SGLang's own with fewer than four GPUs on GPUs of 60 GB or more.
LARGEST = 256
#: Arguments that choose the decode steps and the prompts; with one of them, SGLang's defaults hold for the others.
_DECODE = ("cuda_graph_bs_decode", "cuda_graph_config", "disable_cuda_graph_padding", "speculative_algorithm")
_PREFILL = ("cuda_graph_config", "cuda_graph_backend_prefill", "cuda_graph_bs_prefill", "cuda_graph_max_bs_prefill")


def graph_arguments(arguments: Mapping[str, Any], max_running_requests: int) -> dict[str, Any]:
    """Return the default arguments for capturing: few decode steps, no prompts.

    Args:
        arguments: the user's arguments for ``ServerArgs``.
        max_running_requests: the largest batch.
    """
    found: dict[str, Any] = {}
    if not any(arguments.get(name) for name in _PREFILL):
        found["disable_prefill_cuda_graph"] = True
    if not any(arguments.get(name) for name in _DECODE):
        largest = arguments.get("cuda_graph_max_bs_decode") or LARGEST
        found["cuda_graph_bs_decode"] = batch_sizes(min(largest, max_running_requests))
    return found


def batch_sizes(largest: int) -> list[int]:
    """Return powers of two to 16, multiples of 16 to 64, of 64 to 256 and of 128 beyond, to the largest batch, which is one of them."""
    sizes = [1, 2, 4, 8, 16, 32, 48, 64, 128, 192, 256, *range(384, largest, 128)]
    return [*(size for size in sizes if size < largest), largest]
