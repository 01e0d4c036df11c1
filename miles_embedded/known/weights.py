"""The names and shapes of a model's weights, from its ``config.json``."""

from __future__ import annotations

from pathlib import Path

from miles_core.checkpoint.hf_files import CONFIG, CheckpointFiles, read_json
from miles_core.errors import CheckpointError
from miles_embedded.known.entries import Unknown, check_entries, check_ropes, rename_experts, require
from miles_embedded.known.families import FAMILIES, Config, Family, Weights
from miles_embedded.known.towers import TOWERS, split_tower

Shapes = dict[str, tuple[int, ...]]


def known_weights(directory: Path) -> Shapes:
    """Return checkpoint name -> shape of a model's weights.

    Raises:
        Unknown: the table does not determine them, or the weight files have others.
    """
    try:
        config = read_json(directory / CONFIG)
        shapes = shapes_of(config)
        if any(directory.glob("*.safetensors*")):
            _compare(CheckpointFiles(directory), shapes)
    except CheckpointError as error:
        raise Unknown(str(error)) from error
    return shapes


def _compare(files: CheckpointFiles, shapes: Shapes) -> None:
    if files.config.get("quantization_config"):
        raise Unknown("its weights are quantized")
    stored = {name: e.shape for name, e in files.entries.items() if not name.endswith(".rotary_emb.inv_freq")}
    for name in stored.keys() ^ shapes.keys():
        raise Unknown(f"{name} is {'not ' * (name in shapes)}in its weights")
    for name, shape in stored.items():
        if shape != shapes[name]:
            raise Unknown(f"{name} has the shape {list(shape)} in its weights, and {list(shapes[name])} by config.json")


def shapes_of(config: Config) -> Shapes:
    """Return checkpoint name -> shape of the weights that a ``config.json`` describes. Raises Unknown if the table does not determine them."""
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise Unknown(f"the model type {kind} is not in the table of known families")
    config, vision = split_tower(config, family)
    config = rename_experts(config, family)
    check_entries(config, family)
    check_ropes(config, family)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    groups = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or family.head or hidden // heads
    latent = "kv_lora_rank" in family.entries
    require(not heads % groups, f"{heads} heads are not a multiple of {groups}")
    require(latent or not size % 2, f"heads of {size}")
    require(
        bool(config.get("head_dim") or family.head or latent) or not hidden % heads, f"{heads} heads of {hidden} units"
    )
    require(kind not in ("llama", "gemma2", "gemma3_text") or not hidden % heads, f"{heads} heads of {hidden} units")
    tied = config.get("tie_word_embeddings", family.tied)
    stack = family.stack
    shapes = {f"{stack}.embed_tokens.weight": (config["vocab_size"], hidden), f"{stack}.norm.weight": (hidden,)}
    shapes |= {} if tied else {"lm_head.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        attention = _latent(config) if latent else _attention(config, family, heads, groups, size)
        parts = [
            *attention,
            *family.feed_forward(config, layer),
            *((f"{norm}.weight", (hidden,)) for norm in family.norms),
        ]
        shapes |= {f"{stack}.layers.{layer}.{name}": shape for name, shape in parts}
    tower = TOWERS[family.tower](vision, hidden) if family.tower else ()
    return shapes | {f"{family.tower_names}.{name}": shape for name, shape in tower}


def _attention(c: Config, family: Family, heads: int, groups: int, size: int) -> Weights:
    hidden = c["hidden_size"]
    biased = family.bias + (family.biased if c.get("attention_bias", family.attention_bias) else "")
    rows = {"q": heads * size, "k": groups * size, "v": groups * size, "o": hidden}
    for name, count in rows.items():
        yield f"self_attn.{name}_proj.weight", (count, hidden if name != "o" else heads * size)
        if name in biased:
            yield f"self_attn.{name}_proj.bias", (count,)
    norm = family.query_norm or ("head" if c.get("use_qk_norm") else "")
    if norm:
        for name in "qk":
            yield f"self_attn.{name}_norm.weight", (size if norm == "head" else rows[name],)


def _latent(c: Config) -> Weights:
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    if query := c.get("q_lora_rank"):
        yield "self_attn.q_a_proj.weight", (query, hidden)
        yield "self_attn.q_a_layernorm.weight", (query,)
        yield "self_attn.q_b_proj.weight", (heads * (nope + rope), query)
    else:
        yield "self_attn.q_proj.weight", (heads * (nope + rope), hidden)
    yield "self_attn.kv_a_proj_with_mqa.weight", (rank + rope, hidden)
    yield "self_attn.kv_a_layernorm.weight", (rank,)
    yield "self_attn.kv_b_proj.weight", (heads * (nope + value), rank)
    yield "self_attn.o_proj.weight", (hidden, heads * value)
