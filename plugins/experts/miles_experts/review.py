"""Checks of a plan that need the checkpoint's family or the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles_core.plugin import Facts, Problem, Review, describe_fact
from miles_embedded import training_of

#: ``model_type`` in ``config.json`` -> name of the family.
WITH_BIAS = {
    "deepseek_v3": "DeepSeek-V3 and R1",
    "deepseek_v32": "DeepSeek-V3.2",
    "glm4_moe": "GLM-4.5 to 4.7",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "glm_moe_dsa": "GLM-5",
    "minimax_m2": "MiniMax-M2",
    "ernie4_5_moe": "ERNIE 4.5 MoE",
    "exaone_moe": "EXAONE MoE",
    "mimo_v2_flash": "MiMo-V2-Flash",
    "solar_open": "Solar Open",
    "afmoe": "AFMoE",
    "kimi_linear": "Kimi-Linear",
    "bailing_hybrid": "Ling 2.5",
    "nemotron_h": "Nemotron-H",
    "lfm2_moe": "LFM2 MoE",
}


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """Implements ``miles_core.plugin.Plugin.review``."""
    return Review(problems=(*_check_bias(facts, model), *_check_ranks(facts)))


def _check_bias(facts: Facts, model: Mapping[str, Any] | None) -> Iterator[Problem]:
    rate, moe = "experts.router_bias_update_rate", facts.lookup("model.moe")
    if model is None or not facts.value(rate) or not moe.value or family_of(model) in WITH_BIAS:
        return
    yield Problem(
        "experts",
        "a router with a correction bias",
        f"routers of {family_of(model) or 'this model'} choose experts by their scores alone; families with such a bias are "
        f"{', '.join(WITH_BIAS.values())}; balance others with --aux-loss-coef",
        tuple(describe_fact(fact) for fact in (facts.lookup(rate), moe)),
        tries=lambda: [{rate: 0.0}],
    )


def _check_ranks(facts: Facts) -> Iterator[Problem]:
    if facts.value("experts.offload") and facts.value("trainer") == "embedded" and training_of(facts).ranks > 1:
        names = ("experts.offload", "ray.actor_num_nodes", "ray.actor_num_gpus_per_node")
        yield Problem(
            "experts",
            "one trainer rank",
            "--offload-experts moves whole tensors between one process's device and host memory; several ranks divide the model already "
            "(--sharding-strategy full_shard)",
            tuple(describe_fact(facts.lookup(name)) for name in names),
            choices=names,
        )


def family_of(model: Mapping[str, Any]) -> str:
    """Return the ``model_type`` of the language model of a ``config.json``."""
    text = model.get("text_config")
    return str((text if isinstance(text, dict) and "model_type" in text else model).get("model_type", ""))
