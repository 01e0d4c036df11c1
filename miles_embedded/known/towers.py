"""Towers for images: the entries of a ``vision_config``, and the resulting tensors."""

from __future__ import annotations

from collections.abc import Mapping

from miles_embedded.known.entries import Unknown, require
from miles_embedded.known.families import COUNT, NUMBER, TEXT, Config, Family, Weights, fits, tests

#: Entries of the whole configuration, outside its language model.
_OUTER = tests("image_token_id video_token_id vision_start_token_id vision_end_token_id vision_token_id", NUMBER)
_SIZES = tests(
    "depth hidden_size num_heads patch_size spatial_merge_size temporal_patch_size in_channels in_chans", COUNT
)
_ENTRIES = {
    **_SIZES,
    **tests("embed_dim intermediate_size out_hidden_size num_position_embeddings window_size tokens_per_second", COUNT),
    **tests("spatial_patch_size", COUNT),
    **tests("initializer_range mlp_ratio", NUMBER),
    **tests("model_type hidden_act", TEXT),
}
#: Lists of layers, and those of the rotary embedding, which the sizes determine.
_LISTS = ("fullatt_block_indexes", "deepstack_visual_indexes")
_NAMES = {**_OUTER, **tests("model_type transformers_version dtype torch_dtype", TEXT)}


def split_tower(config: Config, family: Family) -> tuple[Config, Config]:
    """Return the entries of the language model, and those of the tower ({} for a model of text). Raises Unknown for unknown entries."""
    if family.tower is None:
        return config, {}
    vision = config.get("vision_config")
    require(isinstance(vision, Mapping), "config.json has no vision_config")
    outer = {name: value for name, value in config.items() if name not in ("text_config", "vision_config")}
    for name in _NAMES.keys() & outer.keys():
        require(outer[name] is None or fits(_NAMES[name], outer[name]), f"{name} is {outer[name]!r} in config.json")
    text = config.get("text_config")
    if text is None:  # as published for Qwen2-VL and Qwen2.5-VL: one level
        return {name: value for name, value in outer.items() if name not in _OUTER}, _check(vision or {})
    require(isinstance(text, Mapping), "text_config is not a mapping")
    for name in outer.keys() - _NAMES.keys():
        require(
            name in ("tie_word_embeddings", "architectures"), f"config.json has the entry {name} next to text_config"
        )
    tied = {c["tie_word_embeddings"] for c in (outer, text) if "tie_word_embeddings" in c}
    require(len(tied) < 2, "config.json has two values of tie_word_embeddings")
    return {**text, **({"tie_word_embeddings": tied.pop()} if tied else {})}, _check(vision or {})


def _check(c: Config) -> Config:
    for name, value in c.items():
        if name in _LISTS:
            kept = isinstance(value, list) and all(fits(NUMBER, n) and n < c.get("depth", 0) for n in value)
            require(kept, f"{name} is {value!r}")
        elif name == "rope_parameters":
            require(value == {"rope_theta": 10000.0, "rope_type": "axial"}, f"{name} is {value!r}")
        else:
            require(name in _ENTRIES and fits(_ENTRIES[name], value), f"vision_config has {name} = {value!r}")
    for name in ("depth", "num_heads", "patch_size"):
        require(name in c, f"vision_config has no {name}")
    width = c.get("embed_dim") or c.get("hidden_size") or 0
    require(
        width > 0 and width % (4 * c["num_heads"]) == 0, f"{c['num_heads']} heads of {width} units in vision_config"
    )
    return c


def _linear(name: str, rows: int, columns: int) -> Weights:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def _norm(name: str, size: int, bias: bool = True) -> Weights:
    yield f"{name}.weight", (size,)
    if bias:
        yield f"{name}.bias", (size,)


def _patches(c: Config, width: int) -> tuple[str, tuple[int, ...]]:
    colors = c.get("in_channels") or c.get("in_chans") or 3
    patch = c["patch_size"]
    return "patch_embed.proj.weight", (width, colors, c.get("temporal_patch_size", 2), patch, patch)


def _blocks(c: Config, width: int, mlp: Mapping[str, tuple[int, int]], bias: bool) -> Weights:
    for layer in range(c["depth"]):
        block = f"blocks.{layer}"
        yield from _norm(f"{block}.norm1", width, bias)
        yield from _norm(f"{block}.norm2", width, bias)
        yield from _linear(f"{block}.attn.qkv", 3 * width, width)
        yield from _linear(f"{block}.attn.proj", width, width)
        for name, (rows, columns) in mlp.items():
            yield from _linear(f"{block}.mlp.{name}", rows, columns)


def _require(c: Config, *names: str) -> None:
    for name in names:
        if name not in c:
            raise Unknown(f"vision_config has no {name}")


def qwen2_vl(c: Config, hidden: int) -> Weights:
    """Tower of Qwen2-VL for a language model of ``hidden`` units."""
    _require(c, "embed_dim", "mlp_ratio", "hidden_size")
    require(c["hidden_size"] == hidden, "the tower and the language model have different sizes")
    width, merged = c["embed_dim"], c["embed_dim"] * c.get("spatial_merge_size", 2) ** 2
    inner = int(width * c["mlp_ratio"])
    yield _patches(c, width)
    yield from _blocks(c, width, {"fc1": (inner, width), "fc2": (width, inner)}, True)
    yield from _norm("merger.ln_q", width)
    yield from _linear("merger.mlp.0", merged, merged)
    yield from _linear("merger.mlp.2", hidden, merged)


def qwen2_5_vl(c: Config, hidden: int) -> Weights:
    """Tower of Qwen2.5-VL."""
    _require(c, "hidden_size", "intermediate_size", "out_hidden_size")
    require(c["out_hidden_size"] == hidden, "the tower and the language model have different sizes")
    width, inner = c["hidden_size"], c["intermediate_size"]
    merged = width * c.get("spatial_merge_size", 2) ** 2
    gated = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    yield _patches(c, width)
    yield from _blocks(c, width, gated, False)
    yield from _norm("merger.ln_q", width, False)
    yield from _linear("merger.mlp.0", merged, merged)
    yield from _linear("merger.mlp.2", hidden, merged)


def qwen3_vl(c: Config, hidden: int) -> Weights:
    """Tower of Qwen3-VL."""
    _require(
        c, "hidden_size", "intermediate_size", "out_hidden_size", "num_position_embeddings", "deepstack_visual_indexes"
    )
    require(c["out_hidden_size"] == hidden, "the tower and the language model have different sizes")
    width, inner = c["hidden_size"], c["intermediate_size"]
    merged = width * c.get("spatial_merge_size", 2) ** 2
    yield _patches(c, width)
    yield "patch_embed.proj.bias", (width,)
    yield "pos_embed.weight", (c["num_position_embeddings"], width)
    yield from _blocks(c, width, {"linear_fc1": (inner, width), "linear_fc2": (width, inner)}, True)
    deep = [f"deepstack_merger_list.{i}" for i in range(len(c["deepstack_visual_indexes"]))]
    for name, size in (("merger", width), *((name, merged) for name in deep)):
        yield from _norm(f"{name}.norm", size)
        yield from _linear(f"{name}.linear_fc1", merged, merged)
        yield from _linear(f"{name}.linear_fc2", hidden, merged)


#: Value of ``Family.tower`` -> weights of the tower.
TOWERS = {"qwen2_vl": qwen2_vl, "qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl}
