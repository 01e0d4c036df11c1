"""LoRA (arXiv 2106.09685): the trainer steps low-rank adapters over a frozen base, which may be stored in a number format only."""

from dataclasses import dataclass
from typing import Literal

from miles_core.plugin import Plugin, Rule, Set, option

__version__ = "0.1.0"


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Low-rank adapters over a frozen base."""

    rank: int = option(8, flag="--lora-rank", help="rank of the adapters", ge=1, fixed=True)
    alpha: float = option(16.0, flag="--lora-alpha", help="adapters are scaled by ALPHA / rank", gt=0, fixed=True)
    use_rslora: bool = option(
        False, flag="--lora-use-rslora", help="scale adapters by ALPHA / sqrt(rank) (arXiv 2312.03732)", fixed=True
    )
    dropout: float = option(
        0.0, flag="--lora-dropout", help="dropout of the adapters' inputs in training passes", ge=0, lt=1
    )
    target_modules: tuple[str, ...] = option(
        ("q_proj", "v_proj"),
        flag="--lora-target-modules",
        help="ends of the names of linear layers and of joined experts (experts.gate_up_proj) that get an adapter; all-linear for "
        "every linear layer of the decoder, all-experts for all joined experts",
        metavar="NAME,...",
        fixed=True,
    )
    sync: Literal["merged", "adapter"] = option(
        "merged",
        flag="--lora-sync",
        help="merged: the engine receives base plus adapters as ordinary weights; adapter: it loads the base itself, receives only "
        "adapters, and applies them next to the base",
    )
    separate_engines: bool = option(
        False,
        flag="--lora-separate-engines",
        help="decode each policy in an embedded engine of its own; by default, policies over one base share one where possible",
    )
    base_gpus: int = option(
        1,
        flag="--lora-base-gpus",
        help="GPUs of this process among which the experts of an INT4 base are divided; the rest of the model, its cache and the "
        "adapters are on the first",
        metavar="N",
        ge=1,
    )
    export: Literal["merged", "adapter"] = option(
        "merged",
        flag="--lora-export",
        help="--export-hf writes a merged checkpoint, or an adapter in peft's format",
        only_if="export_hf",
    )
    seed: int | None = option(
        None,
        flag="--lora-seed",
        help="seed of the adapters' initial values (default: from --seed and the policy's name)",
        ge=0,
    )
    adapter: str | None = option(
        None, flag="--lora-adapter", help="start from this adapter in peft's format", metavar="DIR"
    )


_MEGATRON = "trainer == megatron"

plugin = Plugin(
    name="lora",
    summary="low-rank adapters over a frozen base",
    version=__version__,
    core="~=0.1",
    config=LoraOptions,
    foreign_flags={
        "--use-peft": "give --plugins lora",
        "--lora-r": "give --plugins lora --lora-rank N",
        "--lora-target-parameters": "--lora-target-modules takes joined experts too",
        "--lora-task-type": "adapters are those of causal language models",
    },
    provides={"model": {"lora": "miles_lora.base:make_model"}, "transport": {"adapter": "miles_lora.transport:make"}},
    capabilities={"transport": ("adapter",)},
    uses={
        "trainer.adapters": "the trainer computes with adapters, and leaves out of checkpoints what they leave unchanged"
    },
    sets={
        "transport": Set(
            "adapter",
            when="lora.sync == adapter and engine != embedded",
            because="the engine loads adapters through an interface of its own",
        ),
        "lora.sync": Set(
            "adapter",
            when="train.precision != bf16 and rollout.precision != bf16 and engine == embedded and trainer == embedded",
            because="engine and trainer read the same codes of the frozen base and add the adapters unrounded",
        ),
        "embedded.disable_cuda_graph": Set(
            True,
            when="lora.base_gpus > 1",
            because="a layer whose experts are on several GPUs waits for the host once, which no CUDA graph records",
        ),
    },
    requires=(
        Rule(
            "lora.sync == merged",
            when=_MEGATRON,
            because="this trainer computes with base plus adapter as one matrix, and an engine that adds the adapters itself rounds otherwise",
        ),
        Rule(
            "lora.dropout == 0",
            when=_MEGATRON,
            because="this trainer adds adapters to matrices and not to outputs, so their inputs cannot be dropped separately; use --trainer "
            "embedded",
        ),
        Rule(
            "train.precision == bf16",
            when=_MEGATRON,
            because="a base in a number format needs adapters that are added to outputs; use --trainer embedded with --lora-sync adapter",
        ),
        Rule(
            "not megatron.moe_router_bias_update_rate",
            when=_MEGATRON,
            because="correction biases of routers belong to the frozen base, which neither checkpoints nor exported adapters contain",
        ),
        Rule(
            "train.precision == bf16 or lora.sync == adapter",
            because="with --lora-sync merged the engine rounds the sum of base and adapters, but the trainer would round the base alone; "
            "with --lora-sync adapter both sides read the same codes of the base and add the adapters unrounded",
        ),
        Rule(
            "rollout.precision == bf16 or model.quantized != none",
            when="lora.sync == adapter and engine != embedded",
            because="an engine that loads the base itself reads the checkpoint as it is, and nothing sends it the encoded base; convert the "
            "checkpoint (miles convert --to FORMAT), or use --lora-sync merged or --engine embedded",
        ),
        Rule(
            "not colocate",
            when="lora.sync == adapter and engine != embedded",
            because="an engine that sleeps drops its weights, and an update of adapters does not bring the base back",
        ),
        Rule(
            "rollout.pause_generation_mode == abort",
            when="lora.sync == adapter and engine != embedded",
            because="requests in flight would need the adapter of the previous version, which is unloaded",
        ),
        Rule(
            "precision.warmup_steps == 0",
            when="lora.sync == adapter and rollout.precision != bf16",
            because="the base is stored in the number format only, so it cannot be BF16 during a warm-up",
        ),
        *(
            Rule(needs, when="lora.base_gpus > 1", because=because)
            for needs, because in (
                (
                    "runtime == inline",
                    "one process holds the codes on all GPUs; several processes would each need all of them",
                ),
                ("not colocate", "engine and trainer compute with the same codes, so neither can release them"),
                ("engine == embedded", "only the embedded engine computes with experts on several GPUs of its process"),
                (
                    "trainer == embedded",
                    "only the embedded trainer computes with experts on several GPUs of its process",
                ),
                (
                    "train.precision == int4",
                    "the codes of experts are divided, and other formats also round the inputs of products",
                ),
                ("rollout.precision == int4", "engine and trainer share the codes"),
                ("model.moe", "only experts are divided, and a dense model has none"),
                ("not plugin.true_on_policy", "its products run on one GPU"),
            )
        ),
    ),
    recommends=(
        Rule(
            "train.activation_checkpointing",
            when=_MEGATRON,
            because="every micro-batch otherwise keeps base plus adapter of all its layers until its backward pass",
        ),
        Rule(
            "train.activation_checkpointing",
            when="train.precision != bf16",
            because="the backward pass otherwise keeps the decoded weights of all joined experts that have adapters, and all activations",
        ),
    ),
    hooks={"": "miles_lora.hooks:Lora"},
    memory="miles_lora.memory:usage",
    review="miles_lora.review:review",
    examine="miles_lora.examine:examine",
    toy={"lora_sync": "adapter"},  # the kind of sync that takes a format on both sides
)
