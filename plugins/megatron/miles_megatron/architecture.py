"""The architecture in a checkpoint's ``config.json``, in one form for all families. Imports no torch.

It determines the table of weights (``families``), the parameter count (``count``), the memory of a rank (``memory``) and
Megatron-Core's model configuration (``trainer.model``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from miles_core.plugin import CheckpointError
from miles_megatron.config_keys import layer_windows

#: What mixes the tokens of a layer: attention, a gated delta net, Mamba-2, or nothing.
Mixer = Literal["attention", "delta", "mamba", "none"]


class Kind(NamedTuple):
    """Kind of a decoder layer; layers of one kind have equal tensors.

    Attributes:
        mixer: what mixes its tokens.
        sparse: whether it has experts.
        feed: whether it has a feed-forward part.
    """

    mixer: Mixer = "attention"
    sparse: bool = False
    feed: bool = True


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1); sizes in elements.

    Attributes:
        q_rank: rank of the compressed queries; 0 if queries are projected directly.
        kv_rank: rank of the compression shared by keys and values.
        nope, rope: size of a head's key part without and with rotary embedding.
        value: size of a head's value.
        epsilon: epsilon of the norms of the compressed queries, keys and values.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    epsilon: float = 1e-6


@dataclass(frozen=True)
class Delta:
    """Gated delta net (arXiv 2412.06464, section 3.4).

    Attributes:
        key_heads: heads of queries, and of keys.
        value_heads: heads of values; each head of keys serves the same number of consecutive ones.
        key_size, value_size: elements of a head.
        width: tokens that the convolution over queries, keys and values reads.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    width: int

    @property
    def keys(self) -> int:
        """Elements of all heads of keys."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Elements of all heads of values."""
        return self.value_heads * self.value_size


@dataclass(frozen=True)
class Mamba:
    """Mamba-2 (arXiv 2405.21060, section 7).

    Attributes:
        heads, head_size: number and size of the heads.
        groups: number of groups of heads; the heads of a group share B and C, and the norm of the output is over a group.
        state: elements of B and of C, and of the state per element of a head.
        width: tokens that the convolution over x, B and C reads.
        chunk: tokens of a chunk of the scan.
    """

    heads: int
    head_size: int
    groups: int
    state: int
    width: int
    chunk: int

    @property
    def inner(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_size

    @property
    def shared(self) -> int:
        """Elements of B of all groups, and of C."""
        return self.groups * self.state


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding.

    Attributes:
        base: theta.
        share: fraction of a head's dimensions that is rotated; 0 without position embedding.
        scaling: ``rope_scaling`` of the checkpoint; empty without scaling.
        interleaved: pairs of dimensions that rotate together are neighbours, and not half a head apart.
        skipped: for each layer, whether it has no position embedding; empty if every layer has one.
    """

    base: float = 10000.0
    share: float = 1.0
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    interleaved: bool = False
    skipped: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of a layer.

    Attributes:
        count: number of experts.
        top_k: experts per token.
        ffn: inner size of one expert.
        shared: inner size of all shared experts together; 0 without shared experts.
        shared_gate: the output of the shared experts is multiplied by a gate.
        score: score function applied to router logits.
        renormalise: the weights of the chosen experts are divided by their sum.
        correction: the router adds a bias to the scores when it chooses experts; the bias receives no gradient.
        groups, top_groups: number of expert groups, and of groups to choose from; 1 and 1 without groups.
        scale: factor of the routed experts' output.
        wide_router: in a BF16 model the router's weight is FP32 if the checkpoint stores it so.
        latent: width of the experts' inputs and outputs, which two projections around all routed experts convert; 0 for the hidden size.
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
    wide_router: bool = False
    latent: int = 0


@dataclass(frozen=True)
class Architecture:
    """Architecture of a decoder.

    Attributes:
        family: ``model_type`` of the checkpoint.
        layers, hidden, vocab: number of decoder layers, hidden size, rows of the embedding.
        heads, kv_heads, head_dim: attention heads, KV heads and head size; unused with ``latent``.
        ffn: inner size of a dense layer.
        tied: the output layer is tied to the embedding.
        padding: row of the embedding whose look-ups have no gradient (``padding_idx`` of Transformers' modules), or None.
        qkv_bias, out_bias: the QKV and output projections of attention have biases.
        qk_norm: norm of queries and keys: none, over each head, or over all heads together.
        mlp_bias: experts and router have biases.
        sinks: attention has one learned extra logit (sink) per head.
        output_gate: the query projection also yields a gate, whose sigmoid multiplies the output of attention.
        centred: norms multiply by 1 + weight.
        gated: MLPs and experts multiply their activation, SiLU, by a second projection; otherwise the activation is the squared ReLU.
        sparse: for each layer, whether it has experts.
        mixers: for each layer, what mixes its tokens; empty if all layers attend.
        feeds: for each layer, whether it has a feed-forward part; empty if all layers have one.
        delta, mamba: the gated delta nets, and the Mamba-2 mixers.
        mtp: number of MTP layers after the decoder; they have experts if the last decoder layer has.
        epsilon: epsilon of the norms.
        rotary: position embedding.
        windows: sliding window of each layer in tokens, including the query token; 0 for full attention. Empty without windows.
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
    padding: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["", "head", "whole"] = ""
    mlp_bias: bool = False
    sinks: bool = False
    output_gate: bool = False
    centred: bool = False
    gated: bool = True
    sparse: tuple[bool, ...] = ()
    mixers: tuple[Mixer, ...] = ()
    feeds: tuple[bool, ...] = ()
    delta: Delta | None = None
    mamba: Mamba | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    mtp: int = 0
    epsilon: float = 1e-6
    rotary: Rotary = Rotary()
    windows: tuple[int, ...] = ()

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Kind of each decoder layer."""
        return tuple(
            Kind(self.mixers[i] if self.mixers else "attention", sparse, not self.feeds or self.feeds[i])
            for i, sparse in enumerate(self.sparse)
        )

    @property
    def mtp_kind(self) -> Kind:
        """Kind of the MTP layers."""
        return Kind(sparse=bool(self.sparse) and self.sparse[-1])

    @property
    def q_size(self) -> int:
        """Output size of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Output size of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim


def common(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``Architecture`` that all families store under the same keys."""
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
        "padding": padding_row(config),
        "sparse": (False,) * layers,
        "mtp": int(config.get("num_nextn_predict_layers") or 0),
        "epsilon": config.get("rms_norm_eps", 1e-6),
        "rotary": rotary(config),
        "windows": layer_windows(config),
    }


def padding_row(config: Mapping[str, Any]) -> int | None:
    """Return the row of the padding token in the embedding; None without ``pad_token_id``. A negative id counts from the end, as in torch.

    Raises:
        CheckpointError: the embedding has no such row."""
    token, rows = config.get("pad_token_id"), config["vocab_size"]
    if token is None:
        return None
    if not -rows <= token < rows:
        raise CheckpointError(
            f"pad_token_id is {token} (of config.json, or else the family's default), and the embedding has {rows} rows: write the right "
            "one, or null, to config.json"
        )
    return int(token % rows)


def experts_of(config: Mapping[str, Any]) -> int:
    """Return the number of experts per layer, from any of the three keys that Transformers uses.

    Raises:
        KeyError: ``config`` has none of the keys."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    found = next((config[name] for name in names if config.get(name) is not None), None)
    if found is None:
        raise KeyError(names[0])
    return int(found)


def rotary(config: Mapping[str, Any]) -> Rotary:
    """Read the rotary embedding from Transformers 5's ``rope_parameters`` or the older ``rope_theta`` and ``rope_scaling``."""
    given = dict(config.get("rope_parameters") or {})
    scaling = given or dict(config.get("rope_scaling") or {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    return Rotary(
        base=float(given.get("rope_theta") or config.get("rope_theta") or 10000.0),
        share=float(given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0),
        scaling={} if kind == "default" else {**scaling, "rope_type": kind},
    )


def dense_first(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return for each layer whether it has experts: all layers but the first ``first_k_dense_replace``."""
    return tuple(i >= config.get("first_k_dense_replace", 0) for i in range(config["num_hidden_layers"]))
