"""Checks that a model divides among the GPUs of an engine. SGLang 0.5.17 would fail while it starts. Imports no torch.

Attention heads divide by the tensor-parallel size (with data-parallel attention by their quotient), and the units of experts by the
tensor-parallel size over the expert-parallel size. In FP8, each GPU's part of a feed-forward layer consists of whole blocks of weights
(``create_weights`` in SGLang's ``srt/layers/quantization/fp8.py``): Qwen3-235B-A22B has 1,536 units per expert, so that 8 GPUs would
have 1.5 blocks each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from miles_core.plugin import Facts, Problem, describe_fact
from miles_sglang.memory import server_of

BLOCK = 128
_EXPERT, _DENSE = ("mlp.experts.0.down_proj", "mlp.down_proj")


def find_undivided(facts: Facts, model: Mapping[str, Any]) -> Iterator[str]:
    """Yield every number of the model that does not divide among the GPUs of an engine, with the number to divide by."""
    text = model.get("text_config")
    keys = {**model, **text} if isinstance(text, Mapping) else model
    server = server_of(facts, 0.0)
    tp, attention = server.tp, max(server.tp // server.dp, 1)
    heads, kv = _number(keys, "num_attention_heads"), _number(keys, "num_key_value_heads")
    if heads % attention:
        yield f"{heads} attention heads by {attention}"
    if kv and not keys.get("kv_lora_rank") and kv % attention and attention % kv:
        yield f"{kv} heads of keys and values by {attention}"
    exchanged = str(facts.value("sglang.moe_a2a_backend") or "none") != "none"  # then SGLang sets ep_size = tp_size
    ep = tp if exchanged else int(facts.value("sglang.ep_size") or 1)
    if tp % ep:
        yield f"--sglang-tp-size {tp} by --sglang-ep-size {ep}"
        return
    sparse, inner = bool(facts.value("model.moe")), _number(keys, "intermediate_size")
    expert = _number(keys, "moe_intermediate_size") or inner
    dense = inner if not sparse or _number(keys, "first_k_dense_replace") else 0
    parts = [("inner units of a dense layer", _DENSE, dense, int(facts.value("sglang.moe_dense_tp_size") or tp))]
    if sparse:
        parts.append(("inner units of an expert", _EXPERT, expert, tp // ep))
    for what, name, units, ranks in parts:
        block = BLOCK if _is_quantised(facts, name) and ranks > 1 else 1
        if units % (ranks * block):
            yield f"{units} {what} by {ranks}" + f", in whole FP8 blocks of {block}" * (block > 1)


def find_division_problems(facts: Facts, model: Mapping[str, Any] | None) -> Iterator[Problem]:
    """Report a model that does not divide, with sizes of an engine that work."""
    if model is None or facts.value("engine") != "sglang" or facts.value("sglang.url"):
        return
    found = list(find_undivided(facts, model))
    if not found:
        return
    per_engine = "ray.rollout_num_gpus_per_engine"
    names = (
        "sglang.tp_size",
        "sglang.ep_size",
        "rollout.precision",
        *([per_engine] if facts.value("plugin.ray") else []),
    )

    def tries() -> Iterator[dict[str, Any]]:
        server = server_of(facts, 0.0)
        for tp in (n for n in range(server.tp - 1, 0, -1) if not server.tp % n):
            changes = {"sglang.tp_size": tp} if facts.value("sglang.tp_size") else {}
            changes |= {per_engine: tp * server.pp} if facts.value("plugin.ray") else {}
            if changes and not any(find_undivided(change(facts, changes), model)):
                yield changes
                break
        if not any(find_undivided(change(facts, {"sglang.ep_size": server.tp}), model)):
            yield {"sglang.ep_size": server.tp}

    yield Problem(
        "sglang",
        f"sizes that divide among the GPUs of an engine: {'; '.join(found)}",
        "every GPU holds an equal part of each layer",
        tuple(describe_fact(facts.lookup(name)) for name in names),
        choices=names[:2],
        tries=tries,
    )


def change(facts: Facts, changes: Mapping[str, Any]) -> Facts:
    """Return facts with other values of options."""
    return facts.with_facts(
        dataclasses.replace(facts.lookup(name), value=value, chosen=True) for name, value in changes.items()
    )


def _is_quantised(facts: Facts, name: str) -> bool:
    """Whether the engine stores a layer in FP8; ``--extra-high-precision-layers-hf`` keeps layers in BF16."""
    kept = facts.value("precision.extra_high_precision_layers") or ()
    return facts.value("rollout.precision") == "fp8" and not any(str(each).strip("*.") in name for each in kept)


def _number(keys: Mapping[str, Any], name: str) -> int:
    value = keys.get(name)
    return value if isinstance(value, int) else 0
