"""What a checkpoint's ``config.json`` says of a model, in one form for all families. Imports no torch.

From it follow the table of weights (``families``), the count of parameters (``count``), the memory of a rank (``memory``) and the
configuration that Megatron-Core builds the model with (``model``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from miles_megatron.config_keys import layer_windows


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1); sizes in elements.

    Attributes:
        q_rank: of the queries' compression; 0 where they are projected directly.
        kv_rank: of the compression that keys and values share.
        nope, rope: of a head's key without and with rotary position.
        value: of a head's value.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding.

    Attributes:
        base: theta.
        share: part of a head's dimensions that is rotated.
        scaling: ``rope_scaling`` of the checkpoint, empty when there is none.
    """

    base: float = 10000.0
    share: float = 1.0
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of a layer.

    Attributes:
        count, top_k, ffn: experts, experts a token, and the inner size of one.
        shared: inner size of all shared experts together, 0 without.
        shared_gate: the shared experts' output is multiplied by a gate of its own.
        score: what router logits become.
        renormalise: the chosen experts' weights are divided by their sum.
        correction: a bias added to the scores when experts are chosen, in no gradient.
        groups, top_groups: experts are chosen inside of the best groups; 1 and 1 without.
        scale: factor of the routed experts' output.
    """

    count: int
    top_k: int
    ffn: int
    shared: int = 0
    shared_gate: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class Architecture:
    """One decoder.

    Attributes:
        family: ``model_type`` of the checkpoint.
        layers, hidden, vocab: decoder layers, width, rows of the embedding.
        heads, kv_heads, head_dim: of attention; of no meaning with ``latent``.
        ffn: inner size of a dense layer.
        tied: the output layer is the embedding.
        qkv_bias, out_bias: attention's projections have biases.
        qk_norm: a norm over each head of queries and keys, or over all heads together.
        mlp_bias: experts and router have biases.
        sinks: attention has a learnt logit a head beside the keys'.
        sparse: for each layer, whether it has experts.
        mtp: layers that predict a further token, after the decoder; they are sparse where the last layer is.
        epsilon: of the norms.
        rotary: position embedding.
        windows: for each layer, how many tokens it sees, itself included; 0 for all. Empty without windows.
    """

    family: str
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["", "head", "whole"] = ""
    mlp_bias: bool = False
    sinks: bool = False
    sparse: tuple[bool, ...] = ()
    experts: Experts | None = None
    latent: Latent | None = None
    mtp: int = 0
    epsilon: float = 1e-6
    rotary: Rotary = Rotary()
    windows: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        """Outputs of the queries' projection."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Outputs of the keys' projection; of the values' too."""
        return self.kv_heads * self.head_dim


def common(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that all families write alike, as arguments of ``Architecture``."""
    heads, hidden, layers = config["num_attention_heads"], config["hidden_size"], config["num_hidden_layers"]
    return {
        "family": config["model_type"],
        "layers": layers,
        "hidden": hidden,
        "vocab": config["vocab_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "ffn": config.get("intermediate_size") or 0,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "sparse": (False,) * layers,
        "mtp": int(config.get("num_nextn_predict_layers") or 0),
        "epsilon": config.get("rms_norm_eps", 1e-6),
        "rotary": rotary(config),
        "windows": layer_windows(config),
    }


def experts_of(config: Mapping[str, Any]) -> int:
    """How many experts a layer has; Transformers has written it under several names."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    found = next((config[name] for name in names if config.get(name) is not None), None)
    if found is None:
        raise KeyError(names[0])
    return int(found)


def rotary(config: Mapping[str, Any]) -> Rotary:
    """In the form of Transformers 5 (``rope_parameters``) or before (``rope_theta``, ``rope_scaling``)."""
    given = dict(config.get("rope_parameters") or {})
    scaling = given or dict(config.get("rope_scaling") or {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    return Rotary(
        base=float(given.get("rope_theta") or config.get("rope_theta") or 10000.0),
        share=float(given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0),
        scaling={} if kind == "default" else {**scaling, "rope_type": kind},
    )


def dense_first(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Which layers have experts where the first ``first_k_dense_replace`` have none."""
    return tuple(i >= config.get("first_k_dense_replace", 0) for i in range(config["num_hidden_layers"]))
