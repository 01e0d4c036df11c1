"""Checks that every entry of a ``config.json`` is known and has a possible value. Transformers checks unusual configurations."""

from __future__ import annotations

import math
from typing import Any

from miles_embedded.known.families import COUNT, NUMBER, SWITCH, TEXT, Config, Family, fits, tests

#: Entries that must be present, positive integers.
_REQUIRED = tests(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings", COUNT
)
#: Entries of all families: name -> test of the value.
_ENTRIES: dict[str, str] = {
    **_REQUIRED,
    **tests("num_key_value_heads head_dim pretraining_tp", COUNT),
    **tests("initializer_range rms_norm_eps rope_theta attention_dropout", NUMBER),
    **tests("use_cache tie_word_embeddings", SWITCH),
    **tests("model_type torch_dtype dtype transformers_version _name_or_path", TEXT),
}
#: Entries that no check reads: token ids, names, and those of the ropes, which have checks of their own.
_OTHER = tests(
    "architectures bos_token_id eos_token_id pad_token_id hidden_act hidden_activation rope_scaling rope_parameters layer_types quantization_config "
    "_from_model_config",
    "",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ACTIVATIONS = frozenset({"silu", "gelu", "gelu_pytorch_tanh"})
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
#: Type of a rope scaling -> entries that it needs.
_ROPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_ROPE_NUMBERS = tests(
    "factor low_freq_factor high_freq_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim "
    "attention_factor rope_theta partial_rotary_factor",
    NUMBER,
)


class Unknown(Exception):
    """The model must be examined with Transformers; the message says why."""


def require(holds: bool, why: str) -> None:
    if not holds:
        raise Unknown(why)


def rename_experts(c: Config, family: Family) -> Config:
    """Return ``config.json`` with the number of experts under the name that the family requires; Transformers writes it under another one."""
    found = {name: c[name] for name in _EXPERTS if c.get(name) is not None}
    wanted = next((name for name in _EXPERTS if name in family.required), None)
    if wanted is None or not found:
        return c
    require(len({str(value) for value in found.values()}) == 1, f"config.json has {found}")
    return {**{name: value for name, value in c.items() if name not in found}, wanted: next(iter(found.values()))}


def check_entries(c: Config, family: Family) -> None:
    """Raise Unknown for an entry that is missing, not in the table, or has an unusual value."""
    for name in (*_REQUIRED, *family.required):
        require(c.get(name) is not None, f"config.json has no {name}")
    known = {**_ENTRIES, **family.entries}
    special: dict[str, tuple[Any, ...]] = {}
    special |= {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)} if "n_group" in family.entries else {}
    special |= {"use_bidirectional_attention": (None, False)} if "query_pre_attn_scalar" in family.entries else {}
    listed = {"decoder_sparse_step": "mlp_only_layers", "no_rope_layer_interval": "no_rope_layers"}
    lists = [entry for mark, entry in listed.items() if mark in family.entries]
    for name, value in c.items():
        if name in known:
            require(value is None or fits(known[name], value), f"{name} is {value!r} in config.json")
        elif name in special:
            require(value in special[name], f"{name} is {value!r} in config.json")
        elif name in lists:
            require(
                value is None or (isinstance(value, list) and all(fits(NUMBER, n) for n in value)),
                f"{name} is {value!r}",
            )
        else:
            require(name in _OTHER, f"config.json has the entry {name}")
    for name in ("hidden_act", "hidden_activation"):
        require(c.get(name, "silu") in _ACTIVATIONS, f"{name} is {c.get(name)!r} in config.json")
    types = c.get("layer_types")
    usual = isinstance(types, list) and len(types) == c["num_hidden_layers"] and set(types) <= _LAYER_TYPES
    require(types is None or usual, "layer_types in config.json are unusual")
    experts = c.get("num_experts") or c.get("num_local_experts") or c.get("n_routed_experts") or math.inf
    require((c.get("num_experts_per_tok") or 0) <= experts, "more experts per token than experts")
    if "kv_lora_rank" in c:
        require(c.get("head_dim") in (None, c["qk_rope_head_dim"]), f"head_dim is {c.get('head_dim')!r} in config.json")
    if "qk_head_dim" in c:
        require(
            c["qk_head_dim"] == c["qk_nope_head_dim"] + c["qk_rope_head_dim"], "qk_head_dim is not the sum of its parts"
        )
    require(
        c.get("no_rope_layers") is None or len(c["no_rope_layers"]) == c["num_hidden_layers"],
        "no_rope_layers is unusual",
    )
    if "n_group" in family.entries:
        groups, chosen = c["n_group"], c["topk_group"]
        held = experts // groups
        require(not experts % groups and held >= 2 and chosen <= groups, f"{experts} experts in {groups} groups")
        require(
            c["num_experts_per_tok"] <= chosen * held and not c.get("attention_bias", False) * ("kv_lora_rank" in c),
            "unusual experts",
        )
        require(0 <= c["first_k_dense_replace"] == int(c["first_k_dense_replace"]), "first_k_dense_replace is unusual")
        require(c.get("moe_layer_freq", 1) == 1, "moe_layer_freq is not 1")


def check_ropes(c: Config, family: Family) -> None:
    """Raise Unknown for rotary embeddings with entries that are missing or not in the table."""
    require((c.get("rope_theta") or 10_000.0) > 1, f"rope_theta is {c.get('rope_theta')!r}")
    require((c.get("rms_norm_eps") or 1e-6) > 0, "rms_norm_eps is 0")
    size = c.get("qk_rope_head_dim") or c.get("head_dim") or family.head or c["hidden_size"] // c["num_attention_heads"]
    for entry in ("rope_scaling", "rope_parameters"):
        ropes = {} if c.get(entry) is None else c[entry]
        require(isinstance(ropes, dict), f"{entry} is not a mapping")
        for rope in ropes.values() if ropes.keys() == _LAYER_TYPES else [ropes]:
            turned = size * (rope.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0)
            require(
                turned == int(turned) and not turned % 2 and 0 < turned <= size, f"{turned} rotary dimensions of {size}"
            )
            if ropes:
                _check_rope(entry, rope, int(turned) // 2 if family.tower else None)


def _check_rope(entry: str, rope: Any, pairs: int | None) -> None:
    """Check one rope; ``pairs`` is the sum of its sections in a model that reads images, else None."""
    require(isinstance(rope, dict), f"{entry} is not a mapping")
    if pairs is not None:
        rope = dict(rope)
        sections, _ = rope.pop("mrope_section", None), rope.pop("mrope_interleaved", True)
        usual = isinstance(sections, list) and len(sections) == 3 and all(fits(COUNT, n) for n in sections)
        require(usual and sum(sections) == pairs, f"{entry} has mrope_section = {sections!r}")
        rope |= {name: "default" for name in ("type", "rope_type") if rope.get(name) == "mrope"}
    kind = rope.get("rope_type", rope.get("type"))
    require(isinstance(kind, str) and kind in _ROPES, f"{entry} has the type {kind!r}")
    for name in _ROPES[str(kind)]:
        require(name in rope, f"{entry} has no {name}")
    for name, value in rope.items():
        if name in ("rope_type", "type"):
            require(value == kind, f"{entry} has two types")
        elif name == "truncate":
            require(isinstance(value, bool), f"{entry} has truncate = {value!r}")
        else:
            require(name in _ROPE_NUMBERS and fits(NUMBER, value) and value > 0, f"{entry} has {name} = {value!r}")
