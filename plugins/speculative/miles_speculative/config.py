"""The options of the plugin."""

from __future__ import annotations

from dataclasses import dataclass, replace

from miles_core.plugin import option

#: Maximum number of draft tokens per step.
MOST = 16
#: Factor of the MTP loss.
FACTOR = 0.2
#: Names of the MTP loss and of the draft's parameters in metrics: train/mtp, train/grad_norm/draft.
MTP, GROUP = "mtp", "draft"


def _of_sglang(name: str) -> str:
    """Return the help text of an option that the plugin ``sglang`` has too; both plugins must use the same text."""
    return f"{name} of SGLang's ServerArgs (default: SGLang decides)"


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding."""

    lookahead: str = option(
        "auto",
        flag="--spec-lookahead",
        help="draft tokens per step; auto chooses from measured acceptance and cost, and drafts nothing if drafting is not faster",
        choices=("auto", *map(str, range(1, MOST + 1))),
        metavar="K|auto",
    )
    mtp_num_layers: int = option(
        1,
        flag="--mtp-num-layers",
        help="MTP layers of the model; miles convert --mtp-num-layers 1 adds one to a checkpoint that has none",
        ge=1,
    )
    topk: int = option(
        1,
        flag="--spec-topk",
        help="candidates at each depth: 1 drafts a chain, more a tree of depth --spec-lookahead",
        ge=1,
        le=MOST,
    )
    draft_model_path: str | None = option(
        None,
        flag="--draft-model-path",
        help="draft with this small model of the same tokenizer, or this EAGLE head, instead of the MTP layer",
        metavar="DIR",
    )
    eagle_num_layers: int | None = option(
        None,
        flag="--eagle-num-layers",
        help="with miles convert: write a new EAGLE head with this many layers for the checkpoint, for use with --draft-model-path",
        ge=1,
        le=4,
    )
    mtp_training: bool = option(
        False,
        flag="--enable-mtp-training",
        help="train the MTP layer in the policy's backward pass; the policy's gradient is bitwise unchanged",
    )
    mtp_loss_scaling_factor: float = option(
        FACTOR,
        flag="--mtp-loss-scaling-factor",
        help="factor of the MTP loss, the mean over trained tokens",
        gt=0,
        only_if="speculative.mtp_training",
    )
    profile: bool = option(
        False,
        flag="--profile-speculative",
        help="at the end of the run, print a breakdown of the decoding time, predicted and measured speed-up, and the break-even cost of a draft",
    )
    draft_lr: float | None = option(
        None,
        flag="--draft-lr",
        help="constant learning rate of the draft (default: the policy's, schedule included)",
        gt=0,
    )
    sft_interval: int | None = option(
        None,
        flag="--online-sft-interval",
        help="every N steps, train the draft towards the policy's distribution on the rollout's tokens",
        ge=1,
    )
    ema_decay: float = option(
        0.0,
        flag="--draft-ema-decay",
        help="the engine drafts with an exponential moving average of the draft's weights with this decay (0: off)",
        ge=0,
        lt=1,
    )
    reinit_interval: int | None = option(
        None,
        flag="--reinit-draft-interval",
        help="every N steps, re-initialise the draft from the policy's last layer",
        ge=1,
    )

    algorithm: str = option("", flag="--sglang-speculative-algorithm", help=_of_sglang("speculative_algorithm"))
    num_steps: int | None = option(
        None, flag="--sglang-speculative-num-steps", help=_of_sglang("speculative_num_steps"), ge=1
    )
    eagle_topk: int | None = option(
        None, flag="--sglang-speculative-eagle-topk", help=_of_sglang("speculative_eagle_topk"), ge=1
    )
    num_draft_tokens: int | None = option(
        None, flag="--sglang-speculative-num-draft-tokens", help=_of_sglang("speculative_num_draft_tokens"), ge=1
    )
    sglang_draft: str = option(
        "", flag="--sglang-speculative-draft-model-path", help=_of_sglang("speculative_draft_model_path")
    )

    def on(self, engine: str) -> SpeculativeConfig:
        """Return the options for an engine: SGLang's flags set the corresponding own options, for another engine only the draft's path."""
        if engine != "embedded":
            return replace(self, draft_model_path=self.sglang_draft)
        lookahead = self.lookahead if self.num_steps is None else str(self.num_steps)
        path = self.sglang_draft or self.draft_model_path
        return replace(self, lookahead=lookahead, topk=self.eagle_topk or self.topk, draft_model_path=path)

    @property
    def trained(self) -> bool:
        """Whether the draft is trained."""
        return self.mtp_training or self.sft_interval is not None
