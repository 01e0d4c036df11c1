"""Derives the size of an optimizer step from a run's options. Imports no torch."""

from __future__ import annotations

from typing import Any

from miles_core.plugin import Facts
from miles_core.trainer import MICRO_BATCH_TOKENS
from miles_embedded import longest_sample
from miles_megatron.memory import Work
from miles_megatron.recipes import RECIPES
from miles_megatron.sizes import Sizes

#: Fact: whether a plugin trains the checkpoint's MTP layer.
MTP = "trainer.uses.mtp_layers"
#: Fact: whether a plugin trains adapters over a frozen base.
ADAPTERS = "trainer.uses.adapters"
#: Fact: whether a plugin trains a critic.
CRITIC = "trainer.uses.values"
#: Share of a model's parameters that is counted for adapters; adapters of rank 64 on all layers have 3 to 6 % with a hidden size of 4096.
_ADAPTERS = 0.05
#: Bytes per parameter of the FP32 masters that Megatron-Core also keeps on the GPU if the optimizer is in host memory, unless it is
#: precision-aware (``_build_model_and_main_param_groups`` in ``optimizer/distrib_optimizer.py``).
MASTER = 4.0
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


def work_of(facts: Facts, s: Sizes) -> Work:
    """Return the work of an optimizer step for a run's options."""

    def value(name: str, default: Any) -> Any:
        found = facts.value(name)
        return default if found in (None, "") else found

    full = _width(facts) == 4
    longest = longest_sample(facts)[0]
    counted = value("train.micro_batch_size", 0) and not value("train.use_dynamic_batch_size", False)
    rollout = value("rollout.batch_size", 1) * value("rollout.n_samples_per_prompt", 1)
    samples = value("train.global_batch_size", rollout // (value("train.num_steps_per_rollout", 1)))
    recompute = value(
        "megatron.recompute_granularity", "full" if value("train.activation_checkpointing", False) else ""
    )
    # a critic next to adapters is trained in full, on as many ranks
    adapters = bool(facts.value(ADAPTERS)) and not facts.value(CRITIC)
    changed = adapters and recompute != "full"  # base plus adapter of every micro-batch in flight
    return Work(
        tokens=value("train.micro_batch_size", 0) * longest,
        micro_batches=1,
        step=samples * longest,
        longest=longest,
        limit=0 if counted else value("train.max_tokens_per_gpu", MICRO_BATCH_TOKENS["cuda"]),
        width=4 if full else 2,
        seen=(4 if full else 2) * (s.pp if changed else value("train.precision", "bf16") not in ("bf16", *RECIPES)),
        trained=_ADAPTERS if adapters else 1.0,
        gradient=4 if full or value("megatron.grad_reduce_in_fp32", True) else 2,
        state=_state(facts, full),
        offloaded=value("megatron.optimizer_offload_fraction", 0.0) if value("megatron.optimizer_cpu_offload", False) else 0.0,
        kept=0.0 if full or value("megatron.use_precision_aware_optimizer", False) else MASTER,
        recompute=recompute,
        recompute_layers=value("megatron.recompute_num_layers", 1),
        recompute_modules=tuple(str(value("megatron.recompute_modules", "core_attn")).split(",")),
        mtp=bool(facts.value(MTP)),
    ).split_over(s)  # fmt: skip


def _width(facts: Facts) -> int:
    dtype = facts.value("model.dtype", "auto")
    return 4 if dtype == "float32" or (dtype == "auto" and facts.value("gpu.count", 1) == 0) else 2


def _state(facts: Facts, full: bool) -> float:
    """Return the optimizer's bytes per parameter: two moments, and a master copy unless parameters are FP32. An optimizer in host memory
    has FP32 ones whatever the options (``optimizer/cpu_offloading/hybrid_optimizer.py`` of Megatron-Core)."""
    if not facts.value("megatron.use_precision_aware_optimizer") or facts.value("megatron.optimizer_cpu_offload"):
        return 8.0 if full else 12.0
    moments = sum(_BYTES[facts.value(f"megatron.{n}") or "float32"] for n in ("exp_avg_dtype", "exp_avg_sq_dtype"))
    remainders = facts.value("megatron.store_param_remainders") is not False
    master = 2 if remainders and not full else _BYTES[facts.value("megatron.main_params_dtype") or "float32"]
    return float(moments + (0 if full else master))
