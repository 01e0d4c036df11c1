"""How to start SGLang."""

from __future__ import annotations

from dataclasses import dataclass

from miles_sglang import HEADS
from miles_sglang.memory import BESIDE_A_TRAINER
from miles_workers import ProgramChoices


@dataclass(frozen=True, kw_only=True)
class Choices(ProgramChoices):
    """How to start SGLang; ``arguments`` are the user's arguments for SGLang's ``ServerArgs``.

    Attributes:
        python_path: directories that come first on the import path of SGLang's processes.
        share: default of ``mem_fraction_static`` on a GPU that the trainer uses, too; None for SGLang's own.
        trains_draft: updates contain the weights of the draft that is a separate model.
        exact: let the plugin ``true_on_policy`` replace SGLang's kernels.
    """

    python_path: str = ""
    share: float | None = BESIDE_A_TRAINER
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
