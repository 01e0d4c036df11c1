"""Core's options, one dataclass per group. A group is a table of the configuration file and a heading of ``--help``.

Field names are keys of the file (``rollout: {batch_size: 32}``) and names of facts (``rollout.batch_size``). The flag is the
field's name with dashes, unless ``flag=`` overrides it. This module must not import torch, so that ``--help`` stays fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_core.config.evaluation_group import Evaluation
from miles_core.config.rollout_group import Rollout
from miles_core.plugin.options import option

LogLevel = Literal["debug", "info", "warning", "error"]

_QUANTISED = "rollout.precision != bf16 or train.precision != bf16"
#: The built-in advantage estimators have no critic; those of plugins may.
_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "gspo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "cispo")
#: Condition of options about processes that the run starts.
_WORKERS = "runtime != inline or rollout.workers"
#: Condition of options about chats: prompts are rendered, or a rollout function may render conversations.
_CHATS = "data.apply_chat_template or rollout.generate != turn or rollout.generate_key or rollout.custom_generate_function_path"
_CRITIC = f"algorithm.advantage_estimator not in {{{', '.join(_ESTIMATORS)}}}"
#: The loss of cispo has no lower bound of the ratio.
_EPS_CLIP = "algorithm.advantage_estimator != cispo or not algorithm.eps_clip_high"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Plugins, backends, processes, and the files of the run. The facts of this group have no prefix."""

    plugins: tuple[str, ...] = option(
        (), help="plugins to use, in order: names, or paths of single-file plugins (./my.py)", metavar="NAME,..."
    )
    engine: str = option("", help="backend that generates", choices=("*",), part="engine")
    trainer: str = option("", help="backend that trains", choices=("*",), part="trainer")
    runtime: str = option(
        "inline", help="where engine and trainer run; inline is this process", choices=("inline", "*"), part="runtime"
    )
    schedule: str = option(
        "sync",
        help="when samples are generated: sync, before each training step; ahead, during the previous step; async, continuously",
        choices=("sync", "ahead", "async", "*"),
        part="schedule",
    )
    transport: str = option("copy", help="how weights are sent to the engine", choices=("copy", "*"), part="transport")
    sync_bucket_size: int = option(
        512 * 2**20,
        help="bytes of weights that an engine in another process receives at a time, from all ranks",
        metavar="BYTES",
        ge=1,
    )
    colocate: bool = option(
        False,
        help="trainer and engines share GPUs and take turns: each releases its memory (the trainer's moves to the host)",
    )
    max_restarts: int = option(
        3,
        help="number of lost workers to replace in a run; the next lost worker ends it",
        metavar="N",
        ge=0,
    )
    worker_timeout: float = option(
        1800.0,
        help="seconds within which a worker must answer a call, else it counts as lost; longer than the longest step",
        metavar="S",
        gt=0,
        only_if=_WORKERS,
    )
    worker_build_timeout: float = option(
        1800.0,
        help="seconds within which a worker must start and build its engine or trainer",
        metavar="S",
        gt=0,
        only_if=_WORKERS,
    )
    worker_heartbeat: float = option(
        10.0,
        help="seconds without a heartbeat after which a worker counts as lost, even during a long computation",
        metavar="S",
        gt=0,
        only_if=_WORKERS,
    )
    stop_within: float = option(
        20.0,
        help="seconds within which a run ends after SIGTERM; a step that is incomplete by then is discarded",
        metavar="S",
        gt=0,
    )
    save: Path | None = option(
        None, help="run directory: configuration, plan, metrics, checkpoints, report (default: runs/<name>-<time>)"
    )
    load: Path | None = option(
        None, help="run directory or checkpoint to resume from; its options apply unless they are set again"
    )
    save_interval: int | None = option(None, help="write a checkpoint every N rollouts (and always at the end)", ge=1)
    async_save: bool = option(
        False,
        help="copy the state to host memory at --save-interval and write the checkpoint while the run continues",
        only_if="save_interval",
    )
    keep: int | None = option(
        None, help="keep the last N checkpoints (default: all)", metavar="N", ge=1, only_if="save_interval or load"
    )
    save_rollouts: bool = option(
        True, help="save all samples of training and evaluation in the run directory, for the report and the API"
    )
    save_rollouts_size: int = option(
        2**30,
        help="maximum bytes of saved samples; beyond, the oldest steps are deleted",
        metavar="BYTES",
        ge=1,
        only_if="save_rollouts",
    )
    export_hf: Path | None = option(
        None,
        help="directory to which the trained model is exported in Hugging Face layout at the end, in the trained dtype (--dtype)",
    )
    verify_logprobs: bool = option(
        False, help="compare the log-probs of engine and trainer after every weight sync; stop if they disagree"
    )
    verify_logprobs_tolerance: float = option(
        0.1, help="mean |difference of log-probs| per token, in nats, at which --verify-logprobs stops the run", gt=0
    )
    allow_mismatch: bool = option(
        False,
        help="continue with a warning if engine and trainer compute different functions after the first weight sync or at the first step",
    )
    log_level: LogLevel = option("info", help="how much to log")
    profile: bool = option(
        False, help="record a torch profiler trace of the second step, and print its kernels or operators"
    )
    profile_dir: Path | None = option(None, help="directory of traces (default: the run directory)", only_if="profile")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The checkpoint, and how it is loaded."""

    hf_checkpoint: str | None = option(
        None, help="Hugging Face checkpoint: a directory, or a name on the hub (ORG/NAME)", metavar="DIR"
    )
    model_name: str | None = option(None, help="label of the model in logs and in the run directory's name")
    ref_load: str | None = option(
        None, help="BF16 weights for trainer and reference model, when --hf-checkpoint is quantised", metavar="DIR"
    )
    trust_remote_code: bool = option(False, help="run model code that comes with the checkpoint")
    self_check: bool = option(
        True,
        help="compare the forward pass with the plain model's at the start, the engine with the trainer after the first weight sync and at the "
        "first step, and the engine's weights with those sent after every sync",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", help="dtype of the model; auto is float32 on a CPU and bfloat16 on a GPU"
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", help="device of the engine and trainer in this process; auto uses a GPU if there is one"
    )


@dataclass(frozen=True, kw_only=True)
class Data:
    """Prompts, and the columns of the prompt data."""

    prompt_data: str | None = option(
        None, help="prompts: a JSONL or parquet file, or hf://datasets/ORG/NAME/FILE", metavar="FILE"
    )
    prompts: str = option(
        "file",
        flag="--prompts",
        help="where prompts come from: a file, or a source of a plugin, which receives --prompt-data",
        choices=("file", "*"),
        part="prompts",
    )
    input_key: str = option("input", help="column with the prompt: a text, or a list of chat messages")
    label_key: str | None = option(None, help="column with the expected answer, given to the reward")
    metadata_key: str = option("metadata", help="column with a mapping that is attached to each sample")
    apply_chat_template: bool = option(False, help="render prompts with the tokenizer's chat template")
    chat_template_kwargs: tuple[str, ...] = option(
        (),
        help="variables for the chat template, such as enable_thinking=false; values are JSON, otherwise text",
        metavar="NAME=VALUE,...",
        only_if=_CHATS,
    )
    media: bool = option(
        False,
        flag="--media",
        help="prompts may hold images, as content parts of chat messages or in a column such as images; without it such rows are refused",
    )
    shuffle: bool = option(
        False, flag="--rollout-shuffle", help="shuffle the prompts again every epoch (seeded by --seed)"
    )


@dataclass(frozen=True, kw_only=True)
class Reward:
    """The reward of a response."""

    rm_type: str | None = option(None, help="built-in reward", choices=("exact", "boxed", "f1", "*"), part="reward")
    custom_rm_path: str | None = option(
        None, help="async rm(args, sample) -> float or dict; instead of --rm-type", metavar="FILE.py:FN"
    )
    concurrency: int = option(64, flag="--reward-concurrency", help="concurrent calls of the reward function", ge=1)
    rm_url: str | None = option(
        None, help="URL to which --rm-type remote posts samples", metavar="URL", only_if="reward.rm_type == remote"
    )
    reward_key: str | None = option(
        None, help="entry to train on when rewards are dicts", only_if="reward.rm_type not in {exact, boxed, f1, math}"
    )
    overlong_buffer_len: int | None = option(
        None, help="soft over-length penalty over this many last tokens of --rollout-max-response-len (DAPO)", ge=1
    )
    overlong_penalty_factor: float = option(
        1.0, help="penalty at the full length", ge=0, only_if="reward.overlong_buffer_len"
    )


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Advantages and the policy loss."""

    advantage_estimator: str = option(
        "grpo",
        help="advantage estimator, and the corresponding policy loss",
        choices=(*_ESTIMATORS, "*"),
        part="advantage",
    )
    eps_clip: float = option(0.2, help="clip the probability ratio below 1 - EPS", ge=0, only_if=_EPS_CLIP)
    eps_clip_high: float | None = option(None, help="clip it above 1 + EPS (default: --eps-clip)", ge=0)
    eps_clip_c: float | None = option(
        None, help="dual clip: bound of the loss for negative advantages, in multiples of them", gt=1
    )
    kl_coef: float = option(0.0, help="coefficient of the KL to the reference model, subtracted from the reward", ge=0)
    kl_loss_coef: float = option(0.0, help="coefficient of the KL to the reference model, added to the loss", ge=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = option(
        "low_var_kl", help="estimator of that KL", only_if="algorithm.kl_loss_coef > 0"
    )
    entropy_coef: float = option(0.0, help="coefficient of the entropy bonus", ge=0)
    loss_aggregation: Literal["rollout_mean", "token_mean", "constant"] = option(
        "rollout_mean", help="how token losses are averaged"
    )
    loss_constant_length: int | None = option(
        None,
        help="divisor per sample with --loss-aggregation constant (default: --rollout-max-response-len)",
        ge=1,
        only_if="algorithm.loss_aggregation == constant",
    )
    use_rollout_logprobs: bool = option(
        False,
        flag="--use-rollout-logprobs",
        help="use the engine's log-probs as those of the old policy (bypass mode), without an old-log-prob pass",
    )
    gamma: float = option(1.0, help="discount of reinforce_plus_plus, and of a critic's GAE", ge=0, le=1)
    lambd: float = option(1.0, help="lambda of GAE, for advantages of a critic", ge=0, le=1, only_if=_CRITIC)
    value_clip: float | None = option(
        None,
        help="a critic's loss: maximum change of a value from the one before the rollout's first step",
        gt=0,
        only_if=_CRITIC,
    )
    normalize_advantages: bool = option(False, help="whiten advantages over all tokens of the rollout")


@dataclass(frozen=True, kw_only=True)
class Train:
    """The optimiser, batch sizes and training precision."""

    optimizer: str = option(
        "adamw", help="optimizer of the weights (adam is adamw)", choices=("adamw", "adam", "*"), part="optimizer"
    )
    lr: float = option(1e-6, help="learning rate", ge=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = option(
        "constant", flag="--lr-decay-style", help="learning rate after the warm-up"
    )
    lr_warmup_iters: int = option(0, help="optimiser steps of linear warm-up", ge=0)
    lr_decay_iters: int | None = option(
        None,
        help="optimiser steps until --min-lr (default: all of the run)",
        ge=1,
        only_if="train.lr_schedule != constant",
    )
    min_lr: float = option(
        0.0, help="learning rate at the end of the decay", ge=0, only_if="train.lr_schedule != constant"
    )
    weight_decay: float = option(0.1, help="decoupled weight decay", ge=0)
    adam_beta1: float = option(0.9, help="AdamW: decay of the first moment", ge=0, lt=1)
    adam_beta2: float = option(0.98, help="AdamW: decay of the second moment", ge=0, lt=1)
    adam_eps: float = option(1e-8, help="AdamW: epsilon", gt=0)
    clip_grad: float = option(1.0, help="clip the gradient's norm; 0 is off", ge=0)
    global_batch_size: int | None = option(
        None, help="samples per optimiser step (default: a whole rollout step)", ge=1
    )
    num_steps_per_rollout: int | None = option(
        None, help="optimiser steps per rollout step; an alternative to --global-batch-size", ge=1
    )
    micro_batch_size: int | None = option(
        None, help="samples per forward and backward pass (default: as many as --max-tokens-per-gpu)", ge=1
    )
    use_dynamic_batch_size: bool = option(False, help="fill micro-batches by tokens, even with --micro-batch-size")
    max_tokens_per_gpu: int | None = option(
        None, help="maximum tokens in a micro-batch (default: 8192 on a GPU, 1024 on a CPU)", ge=1
    )
    activation_checkpointing: bool = option(
        False, flag="--recompute-activations", help="recompute activations in the backward pass to save memory"
    )
    aux_loss_coef: float = option(
        0.0,
        aliases=("--moe-aux-loss-coeff",),
        help="coefficient of the load-balancing loss of a mixture of experts",
        ge=0,
        only_if="model.moe",
    )
    precision: str = option(
        "bf16",
        flag="--train-precision",
        help="number format of the trainer's forward pass",
        choices=("bf16", "*"),
        part="format",
    )
    emulate_precision: bool = option(
        False,
        help="emulate the numerics of a format without its tensor cores, on any machine",
        fact="precision.emulated",
    )
    seed: int = option(1234, help="seed of everything random in the run", ge=0)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Layers that a number format excludes, and its warm-up, for engine and trainer. ``--rollout-precision`` and
    ``--train-precision`` select the formats."""

    num_layers_at_start_in_bf16: int = option(
        0, help="decoder layers at the start that are not quantised", ge=0, only_if=_QUANTISED
    )
    num_layers_at_end_in_bf16: int = option(
        0, help="decoder layers at the end that are not quantised", ge=0, only_if=_QUANTISED
    )
    extra_high_precision_layers: tuple[str, ...] = option(
        (),
        flag="--extra-high-precision-layers-hf",
        help="weights that are not quantised: parts of Hugging Face parameter names (_ does not count), or globs with *",
        metavar="NAME,...",
        only_if=_QUANTISED,
    )
    warmup_steps: int = option(
        0,
        help="optimiser steps without quantisation on both sides, extended to the end of a rollout step",
        ge=0,
        only_if=_QUANTISED,
    )
    warmup_precision: Literal["bf16"] = option("bf16", help="precision of both sides during the warm-up")
    quantized_product: Literal["auto", "native", "emulated"] = option(
        "auto",
        help="how quantised layers multiply: native reads the codes with the GPU's tensor cores, emulated dequantises them and "
        "multiplies in the model's dtype; auto is native if the format, the GPU and torch support it, in the trainer only for the "
        "linear layers of dense models on one rank, and emulated with --emulate-precision",
        only_if=_QUANTISED,
    )


@dataclass(frozen=True, kw_only=True)
class Sft:
    """Supervised warm start before the first rollout, using the same trainer."""

    data: str | None = option(
        None,
        flag="--sft-data",
        help="prompt and response pairs, JSONL or parquet; without it there is no warm start",
        metavar="FILE",
    )
    response_key: str = option(
        "response",
        flag="--sft-response-key",
        help="column with the response; the prompt's is --input-key",
        only_if="sft.data",
    )
    steps: int = option(100, flag="--sft-steps", help="optimiser steps", ge=1, only_if="sft.data")
    batch_size: int = option(32, flag="--sft-batch-size", help="pairs per optimiser step", ge=1, only_if="sft.data")
    lr: float = option(1e-5, flag="--sft-lr", help="learning rate", ge=0, only_if="sft.data")


GROUPS: dict[str, type] = {
    "run": Run,
    "model": Model,
    "data": Data,
    "rollout": Rollout,
    "reward": Reward,
    "algorithm": Algorithm,
    "train": Train,
    "precision": Precision,
    "sft": Sft,
    "evaluation": Evaluation,
}
