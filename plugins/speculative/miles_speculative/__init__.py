"""Speculative decoding with a draft that is trained along with the policy, for miles-core."""

from miles_core.plugin import Hint, Panel, Plugin, Rule, below
from miles_speculative.config import MOST, SpeculativeConfig

__version__ = "0.1.0"

plugin = Plugin(
    name="speculative",
    summary="drafts several tokens per step with an MTP layer or a small model and verifies them without changing the distribution",
    version=__version__,
    core="~=0.1",
    config=SpeculativeConfig,
    hooks={"": ("miles_speculative.hooks:Speculative", "miles_speculative.embedded:EmbeddedSpeculative")},
    provides={"decoder": {"speculative": "miles_speculative.build:make_decoder"}},
    review="miles_speculative.review:review",
    uses={
        "engine.draft": "the engine verifies the drafted tokens",
        "trainer.mtp_layers": "the trainer holds the draft, trains it and sends it to the engine with the policy",
    },
    converts={
        "--mtp-num-layers": "miles_speculative.checkpoint:convert",
        "--eagle-num-layers": "miles_speculative.checkpoint:convert",
    },
    requires=(
        Rule(
            needs="speculative.mtp_num_layers == 1",
            when="engine == embedded",
            because="the embedded engine drafts every token with the same MTP layer, the checkpoint's first",
        ),
        Rule(
            needs="model.mtp_layers >= 1 or speculative.draft_model_path or speculative.sglang_draft",
            because="drafts come from the checkpoint's MTP layer; miles convert --mtp-num-layers 1 --model-dir DIR --save-dir DIR "
            "creates one, and --draft-model-path DIR drafts with a small model",
        ),
        Rule(
            needs="not speculative.eagle_num_layers",
            because="--eagle-num-layers is an option of miles convert, which writes a head; a run uses the head with --draft-model-path DIR",
        ),
        Rule(
            needs="speculative.mtp_training or speculative.sft_interval",
            when="speculative.draft_lr or speculative.ema_decay > 0 or speculative.reinit_interval",
            because="the learning rate, running mean and re-initialisation need a draft that is trained: add --enable-mtp-training or "
            "--online-sft-interval N",
        ),
        Rule(
            needs="not speculative.draft_model_path",
            when="speculative.mtp_training or speculative.reinit_interval",
            because="--enable-mtp-training and --reinit-draft-interval are about an MTP layer; a draft model and an EAGLE head "
            "learn with --online-sft-interval N",
        ),
        Rule(
            needs="not speculative.sglang_draft",
            when="speculative.mtp_training or speculative.reinit_interval",
            because="--enable-mtp-training and --reinit-draft-interval are about an MTP layer; a draft model and an EAGLE head "
            "learn with --online-sft-interval N",
        ),
        Rule(
            needs="rollout.precision == bf16",
            when="engine != embedded and speculative.sglang_draft",
            because="SGLang reads the number format of a draft of its own from that draft's checkpoint, and the trainer sends it in bf16",
        ),
        Rule(
            needs="speculative.lookahead == auto",
            when="speculative.num_steps",
            because="--spec-lookahead and --sglang-speculative-num-steps set the same value: give one of them",
        ),
        Rule(
            needs="speculative.topk == 1",
            when="speculative.eagle_topk",
            because="--spec-topk and --sglang-speculative-eagle-topk set the same value: give one of them",
        ),
        Rule(
            needs="not speculative.draft_model_path",
            when="speculative.sglang_draft",
            because="--draft-model-path and --sglang-speculative-draft-model-path set the same value: give one of them",
        ),
        Rule(
            needs="speculative.algorithm in {NEXTN, EAGLE, STANDALONE}",
            when="engine == embedded and speculative.algorithm",
            because="the embedded engine drafts with an MTP layer (NEXTN), an EAGLE or EAGLE-2 head, or a separate model (STANDALONE)",
        ),
        Rule(
            needs="speculative.draft_model_path or speculative.sglang_draft",
            when="engine == embedded and speculative.algorithm == STANDALONE",
            because="STANDALONE drafts with a separate model: give --sglang-speculative-draft-model-path DIR",
        ),
        Rule(
            needs="not speculative.draft_model_path and not speculative.sglang_draft",
            when="engine == embedded and speculative.algorithm == NEXTN",
            because="NEXTN drafts with the checkpoint's MTP layer",
        ),
        Rule(
            needs=f"(not speculative.num_steps or speculative.num_steps <= {MOST}) and (not speculative.eagle_topk or "
            f"speculative.eagle_topk <= {MOST})",
            when="engine == embedded",
            because=f"the embedded engine supports at most {MOST} draft tokens per step and {MOST} candidates per depth",
        ),
        Rule(
            needs="speculative.mtp_training",
            when="trainer != embedded",
            because="trainers other than the embedded one build the MTP layer only for training and support no other draft: add "
            "--enable-mtp-training; without this plugin, SGLang can draft with the checkpoint's untrained MTP layer",
        ),
        Rule(
            needs="not speculative.sft_interval",
            when="trainer != embedded",
            because="--online-sft-interval compares the draft with the policy's whole distribution, which only the embedded trainer computes; "
            "--enable-mtp-training learns from the tokens",
        ),
        Rule(
            needs="speculative.ema_decay == 0",
            when="trainer != embedded",
            because="the running mean of --draft-ema-decay is implemented for the embedded trainer only; other trainers shard weights "
            "differently",
        ),
        Rule(
            needs="not speculative.reinit_interval",
            when="trainer != embedded",
            because="--reinit-draft-interval copies the policy's last layer, which other trainers store in another layout",
        ),
        Rule(
            needs="speculative.lookahead == auto and speculative.topk == 1",
            when="engine != embedded",
            because="--spec-lookahead and --spec-topk configure drafting on the embedded engine; SGLang has "
            "--sglang-speculative-num-steps and --sglang-speculative-eagle-topk",
        ),
        Rule(
            needs="not speculative.draft_model_path",
            when="engine != embedded",
            because="--draft-model-path configures drafting on the embedded engine; SGLang has --sglang-speculative-draft-model-path",
        ),
        Rule(
            needs="not speculative.profile",
            when="engine != embedded",
            because="SGLang reports neither the seconds of drafting and verifying nor steps without drafts; leave the flag out, and compare "
            "rollout/tokens_per_second of a run with drafts and one without",
        ),
    ),
    panels=(
        Panel(
            "drafts_kept",
            "Drafts kept",
            {"speculative/accept_rate": "all depths", "speculative/accepted_to_*": "up to depth *"},
            section="speculative",
            percent=True,
        ),
        Panel(
            "drafts_length",
            "Tokens and drafts per step",
            {"speculative/accept_length": "tokens, with drafts", "speculative/lookahead": "drafts"},
            section="speculative",
        ),
        Panel(
            "drafts_speed",
            "Rollout speed with drafts",
            {
                "speculative/tokens_per_second_without": "without drafts (estimated)",
                "rollout/tokens_per_second": "measured",
            },
            "tokens per second",
            section="speculative",
        ),
        Panel(
            "drafts_loss",
            "Loss of the draft",
            {"train/draft_*": "*"},
            "nats per token",
            section="speculative",
        ),
        Panel("drafts_mtp", "Loss of the MTP layer", {"train/mtp": "loss"}, "nats per token", section="speculative"),
    ),
    hints=(
        Hint(
            "low-acceptance",
            "*speculative/accept_rate",
            below(0.3),
            "{metric}: only {percent} of the drafted tokens are kept",
            "draft fewer tokens (--spec-lookahead 1, or auto), train the draft (--enable-mtp-training, --online-sft-interval 1) with a "
            "higher --draft-lr, or re-initialise it regularly (--reinit-draft-interval)",
            when="plugin.speculative",
        ),
        Hint(
            "slow-speculation",
            "speculative/speedup",
            below(1.0),
            "decoding with drafts is slower than without ({metric} {value})",
            "use --spec-lookahead auto, profile the decoding (--profile-speculative), and use a draft of a quarter to a tenth of the "
            "policy's size",
            unless=(("speculative/best_speedup", below(1.0)),),
            when="plugin.speculative",
        ),
        Hint(
            "drafts-cannot-pay",
            "speculative/best_speedup",
            below(1.0),
            "decoding with drafts would be slower than without even if every draft were kept ({metric} {value})",
            "training the draft cannot help: decode without drafts (leave the plugin out), with fewer sequences at once "
            "(--max-running-requests), whose steps leave the device idle, or with a cheaper draft",
            when="plugin.speculative",
        ),
    ),
    toy={"spec_lookahead": 2, "online_sft_interval": 1, "draft_model_path": "{draft}"},
)
