"""How to start SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_sglang import HEADS
from miles_sglang.memory import BESIDE_A_TRAINER


@dataclass(frozen=True, kw_only=True)
class Choices:
    """How to start SGLang. Attributes not listed here have the meaning of the option with the same name.

    Attributes:
        arguments: the user's arguments for SGLang's ``ServerArgs``.
        device: ``cuda`` or ``cpu``.
        max_context: maximum tokens of prompt and response; 0 means the model's limit.
        routed_dtype: dtype of the routed experts column.
        url: addresses of running servers, or a file of them; then this run does not start SGLang.
        bucket_bytes: maximum bytes of a bucket of weights.
        python_path: directories that come first on the import path of SGLang's processes.
        max_restarts: how often to restart SGLang after it died.
        share: default of ``mem_fraction_static`` on a GPU that the trainer uses, too; None for SGLang's own.
        allow_mismatch: continue if an update does not reach all of SGLang's parameters.
        trains_draft: updates contain the weights of the draft that is a separate model.
        exact: let the plugin ``true_on_policy`` replace SGLang's kernels.
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
    python_path: str = ""
    max_restarts: int = 0
    share: float | None = BESIDE_A_TRAINER
    allow_mismatch: bool = False
    trains_draft: bool = False
    exact: bool = False

    @property
    def speculative(self) -> bool:
        """Whether SGLang uses speculative decoding."""
        return bool(self.arguments.get("speculative_algorithm"))

    @property
    def drafts(self) -> bool:
        """Whether SGLang drafts with the checkpoint's MTP layer, whose weights every update includes."""
        return self.speculative and self.arguments["speculative_algorithm"] in HEADS and not self.separate_draft

    @property
    def separate_draft(self) -> bool:
        """Whether SGLang drafts with a separate model, which weight updates do not include."""
        return bool(self.arguments.get("speculative_draft_model_path"))

    @property
    def keyed(self) -> bool:
        """Whether a request's seed determines its tokens."""
        return bool(self.arguments.get("enable_deterministic_inference")) and not self.speculative

    @property
    def over_http(self) -> bool:
        """Whether weights are sent to running servers over HTTP instead of through files."""
        return bool(self.url) and self.weights_dir is None

    @property
    def versioned(self) -> bool:
        """Whether the scheduler code of this plugin records the weight version of each token (``retraction``)."""
        separate = self.arguments.get("enable_dp_attention") or (self.arguments.get("pp_size") or 1) > 1
        return not self.url and not separate
