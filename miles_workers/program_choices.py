"""How to start an engine's program, as the options of a run determine it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_workers.served_model import ROUTED_EXPERTS, Routing

#: Core's names of KV cache dtypes -> those of SGLang and vLLM.
_KV_CACHE = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


@dataclass(frozen=True, kw_only=True)
class ProgramChoices:
    """How to start an engine's program. Attributes not listed here have the meaning of the option with the same name.

    Attributes:
        arguments: further arguments of the program.
        device: ``cuda`` or ``cpu``.
        max_context: maximum tokens of prompt and response; 0 means the model's limit.
        routed_dtype: dtype of the routed experts column.
        url: addresses of running servers, or a file of them; then this run does not start the program.
        bucket_bytes: maximum bytes of a bucket of weights.
        max_restarts: how often to restart the program after it died.
        allow_mismatch: continue if an update does not reach all of the program's parameters.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cuda"
    dtype: str = "auto"
    seed: int = 0
    max_context: int = 0
    max_running_requests: int = 256
    kv_cache_dtype: str = "auto"
    routed_dtype: str = "int32"
    url: tuple[str, ...] = ()
    weights_dir: Path | None = None
    startup_timeout: float = 900.0
    bucket_bytes: int = 512 << 20
    max_restarts: int = 0
    allow_mismatch: bool = False

    @property
    def computed_dtype(self) -> str:
        """The dtype in which the program computes."""
        return self.dtype if self.dtype != "auto" else "float32" if self.device == "cpu" else "bfloat16"

    @property
    def kv_cache_name(self) -> str:
        """The program's name of the dtype of cached keys and values."""
        return _KV_CACHE.get(self.kv_cache_dtype, self.kv_cache_dtype)

    def routing(self, config: Mapping[str, Any]) -> Routing | None:
        """Return the conversion of routed experts; None if the program does not record them. config: the language model's ``config.json``."""
        recorded = self.arguments.get("enable_return_routed_experts")
        return Routing.of(config, self.routed_dtype) if recorded else None


def choices_of_run(run: Any, config: Any, options: Any) -> dict[str, Any]:
    """Return the attributes of ``ProgramChoices`` other than ``arguments``.

    Args:
        run: the run.
        config: configuration of the policy (``Run.config_of``).
        options: options of the engine's plugin, which has ``url``, ``weights_dir`` and ``startup_timeout``.
    """
    import torch

    device = config.model.device
    routed = next((f for f in run.fields if f.name == ROUTED_EXPERTS), None)
    return {
        "device": device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu",
        "dtype": config.model.dtype,
        "seed": config.train.seed,
        "max_context": config.rollout.max_context_len or 0,
        "max_running_requests": config.rollout.max_running_requests,
        "kv_cache_dtype": config.rollout.kv_cache_dtype,
        "routed_dtype": routed.dtype if routed else "int32",
        "url": options.url or (),
        "weights_dir": Path(options.weights_dir) if options.weights_dir else None,
        "startup_timeout": options.startup_timeout,
        "bucket_bytes": config.run.sync_bucket_size,
        "max_restarts": config.run.max_restarts,
        "allow_mismatch": config.run.allow_mismatch,
    }


def policies_sharing(run: Any, policy: Any, choices_of: Callable[[Any, Any], ProgramChoices]) -> list[Any]:
    """Return the policies whose adapters one program applies: those with the same base and choices, unless each engine starts a program in a
    process of its own.

    Args:
        choices_of: returns the choices of a policy, from the run and the policy.
    """
    own = choices_of(run, policy)
    if not own.url and run.config.run.runtime != "inline":
        return [policy]
    return [
        other
        for other in run.policies
        if other.generates and other.hf_checkpoint == policy.hf_checkpoint and choices_of(run, other) == own
    ]
