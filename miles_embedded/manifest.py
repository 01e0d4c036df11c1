"""Manifest of the embedded backend: providers, capabilities, flags and the models it refuses."""

import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from miles_core import __version__
from miles_core.plugin import (
    NO_MIXER,
    STATE_KINDS,
    Facts,
    Plugin,
    Problem,
    Review,
    Rule,
    describe_fact,
    layer_kinds,
    option,
)
from miles_embedded.plan_notes import NOTES

#: The installed version of a distribution. Cached, because the search for changes of a refused run reviews many of them.
version = functools.cache(metadata.version)

_STATE = (
    "its layers keep a recurrent state, and not in the way that the embedded backend requires: read and written through Transformers' "
    "cache, by a module with one output; use another engine and trainer"
)
_NO_LAYERS = (
    "its code has no list of decoder layers that attend through Transformers' attention interface, which the embedded backend "
    "requires; use another engine and trainer"
)
_OWN_ATTENTION = (
    "its attention is incompatible with packed sequences or cached keys (two attentions in one cache slot, its own mask or positions, "
    "a compressed or "
    "indexed cache, one attention module in several layers); use another engine and trainer"
)
_OWN_HEAD = (
    "its forward has further layers between the decoder stack and the output layer, which are not part of its head; use another engine "
    "and trainer"
)
_OWN_LOGITS = (
    "its forward removes image tokens from the logits after the output layer, which the embedded backend does not do; use another engine "
    "and trainer"
)
_NO_TEXT = (
    "it does not generate text one token after another: it generates audio, denoises blocks of tokens, or drafts for another model; "
    "choose another checkpoint"
)
#: Reason -> refused model types. ``docs/families.md`` lists them and the tested ones. A type in neither list is untested; its scores
#: are compared with plain forwards when an engine is built.
REFUSED: dict[str, tuple[str, ...]] = {
    _STATE: ("minimax", "recurrent_gemma", "rwkv", "xlstm", "zaya"),
    _NO_LAYERS: (
        *("big_bird", "bloom", "cpmant", "falcon", "git", "gpt_neo", "megatron-bert", "mpt", "mvp", "openai-gpt"),
        *("reformer", "rembert", "roformer", "trocr", "xglm", "xlm", "prophetnet", "xlnet"),
    ),
    _OWN_ATTENTION: (
        *("axk2", "deepseek_v4", "diffllama", "doge", "dory"),
        *("gpt_neox_japanese", "hrm_text", "hy_v4", "inkling_text", "inkling2_text"),
        *("modernbert-decoder", "qwen4_exp", "qwen4_exp_text", "zamba", "zamba2"),
    ),
    _OWN_HEAD: ("electra",),
    _OWN_LOGITS: ("chameleon",),
    _NO_TEXT: ("diffusion_gemma", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"),
}
#: Model types with layers that keep a state between tokens (``model.states``), and those without any layer that attends.
UNLIMITED = ("falcon_mamba", "mamba", "mamba2")
STATEFUL = (
    *("bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3"),
    *UNLIMITED,
    *("nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
#: Model types whose images the engine and the trainer read (``model.vision``); the others are text only.
IMAGES = (
    *("gemma3", "glm4v", "internvl", "llava", "llava_next", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5"),
    *("qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
)
#: Model types whose processor Transformers implements with torchvision.
_WITH_TORCHVISION = ("mistral3",)
#: Model types whose tokens of one image attend to each other in both directions (``model.vision.Vision.blocks``).
_BLOCKS = ("gemma3",)
#: The first Transformers release whose processor and tower have the form that ``model.vision`` calls, for each model type.
IMAGES_SINCE = dict.fromkeys(IMAGES, "5.24")
#: Model type -> the first Transformers release whose code this backend can run, and what earlier releases lack.
SINCE = {
    "granitemoe": (
        "5.13",
        "in earlier releases its routers and experts are not modules, so they could not be replayed or balanced",
    ),
    **dict.fromkeys(
        ("codegen", "ctrl", "gptj", "moshi", "nemotron"),
        ("5.24", "in earlier releases its layers do not attend through Transformers' attention interface"),
    ),
    **dict.fromkeys(STATEFUL, ("5.24", "the caches of earlier releases store the states of its layers in other ways")),
}
#: Model type -> a Transformers release whose code for it fails, and how.
EXCEPT = {"llama4": ("5.24.0", "its Llama4ForConditionalGeneration fails on text alone")}
#: Supported layer types (``layer_types`` of a configuration). ``indexed_attention`` and ``deepseek_sparse_attention`` are
#: names for the same type in different releases.
LAYER_TYPES = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    "deepseek_sparse_attention",
    *STATE_KINDS,
    *NO_MIXER,
}


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """See ``miles_core.plugin.Plugin.review``: refuse models, by their ``config.json``, that neither engine nor trainer can run."""
    kind = facts.lookup("model.type")
    trusted = bool(facts.value("model.trust_remote_code"))
    found = (
        _refuse_family(kind.value)
        or _refuse_layers(model or {})
        or _refuse_time_steps(model or {})
        or _refuse_installation(kind.value, model or {}, trusted)
        or _refuse_states(kind.value, model or {}, facts)
        or _refuse_unlimited(kind.value, facts)
        or _refuse_images(kind.value, facts)
    )
    problems = [Problem("embedded", *found, (describe_fact(kind),), "cannot run")] if found else []
    device, gpus = facts.lookup("model.device"), facts.lookup("gpu.count")
    if device.value == "cuda" and gpus.value == 0 and facts.value("runtime") == "inline":
        why = "this process can use none; --device cpu runs without a GPU"
        problems.append(
            Problem("embedded", "a GPU", why, (describe_fact(device), describe_fact(gpus)), choices=("model.device",))
        )
    return Review(problems=tuple(problems))


def _refuse_family(kind: Any) -> tuple[str, str] | None:
    """Return (description, reason) if the model type is refused."""
    return next(((f"a model of type {kind}", why) for why, types in REFUSED.items() if kind in types), None)


def _refuse_states(kind: Any, model: Mapping[str, Any], facts: Facts) -> tuple[str, str] | None:
    """Return (description, reason) if layers of the model keep a state and a plugin of the run needs layers without one."""
    if kind not in STATEFUL and not set(layer_kinds(model)) & STATE_KINDS:
        return None
    if facts.value("plugin.speculative") and facts.value("engine") == "embedded":
        why = "its layers keep the state after the last token only, so rejected drafts cannot be removed; run it without the plugin"
        return f"a model of type {kind} with the plugin speculative", why
    if facts.value("plugin.true_on_policy"):
        why = "the state of its layers is computed token by token in decoding and in chunks in training, in another order of additions; "
        return f"a model of type {kind} with the plugin true_on_policy", f"{why}run it without the plugin"
    return None


def _refuse_unlimited(kind: Any, facts: Facts) -> tuple[str, str] | None:
    """Return (description, reason) if neither the model nor an option limits the sequences of the embedded engine."""
    if kind not in UNLIMITED or facts.value("engine") != "embedded" or facts.value("rollout.max_context_len"):
        return None
    why = "its config.json states no longest sequence, which the engine needs: set the option"
    return f"a model of type {kind} without --rollout-max-context-len", why


def _refuse_images(kind: Any, facts: Facts) -> tuple[str, str] | None:
    """Return (description, reason) if the run passes images to a model or a part of the run that cannot read them."""
    from packaging.version import Version

    if not facts.value("data.media"):
        return None
    if kind not in IMAGES:
        why = f"the embedded backend passes images to {', '.join(IMAGES)} only; leave the flag out to train on text"
        return f"--media with a model of type {kind}", why
    if facts.value("plugin.speculative") and facts.value("engine") == "embedded":
        return "--media with the plugin speculative", "drafts do not see the images; run it without the plugin"
    if facts.value("plugin.true_on_policy") and kind in _BLOCKS:
        why = "its kernels have no attention in both directions within an image; run it without the plugin"
        return f"--media and a model of type {kind} with the plugin true_on_policy", why
    if kind in _WITH_TORCHVISION and importlib.util.find_spec("torchvision") is None:
        why = "its processor in Transformers needs torchvision: pip install torchvision"
        return f"--media with a model of type {kind}", why
    if Version(has := version("transformers")) < Version(since := IMAGES_SINCE[kind]):
        return (
            f"--media with a model of type {kind} and Transformers {has}",
            f"its processor has another form there: pip install 'transformers >={since}'",
        )
    return None


def _refuse_installation(kind: Any, model: Mapping[str, Any], trusted: bool) -> tuple[str, str] | None:
    """Return (description, reason) if the installed Transformers cannot run the model."""
    from packaging.version import Version

    has = version("transformers")
    first, lacked = SINCE.get(str(kind), ("0", ""))
    if Version(has) < Version(first):
        return f"a model of type {kind} with Transformers {has}", f"{lacked}: pip install 'transformers >={first}'"
    broken, how = EXCEPT.get(str(kind), ("", ""))
    if has == broken:
        return f"a model of type {kind} with Transformers {has}", f"{how}: pip install 'transformers !={broken}'"
    types, own = _language_models(), "auto_map" in model
    if not model or kind is None or not types or str(kind) in types or (own and trusted):
        return None
    because = (
        f"the installed Transformers {has} has no causal language model of this type (model_type in config.json): "
    )
    because += (
        "the checkpoint contains its own code, which --trust-remote-code enables"
        if own
        else "is there a newer release?"
    )
    return f"a model of type {kind}", because


@functools.cache
def _language_models() -> frozenset[str]:
    """Return the model types that the installed Transformers can generate text with, from its source without importing it.

    Empty if the expected tables are missing.
    """
    found = importlib.util.find_spec("transformers")
    tables = Path(found.origin).parent / "models" / "auto" / "modeling_auto.py" if found and found.origin else None
    if tables is None or not tables.is_file():
        return frozenset()
    text = tables.read_text(encoding="utf-8")
    names = r"^MODEL_FOR_(?:CAUSAL_LM|IMAGE_TEXT_TO_TEXT)_MAPPING_NAMES = OrderedDict\((.*?)^\s*\]"
    listed = [re.findall(r'\(\s*"([\w.-]+)"', part) for part in re.findall(names, text, re.MULTILINE | re.DOTALL)]
    return frozenset(kind for kinds in listed for kind in kinds)


def _refuse_layers(model: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (description, reason) if the model has unsupported layer types."""
    unknown = sorted(set(layer_kinds(model)) - LAYER_TYPES)
    if not unknown:
        return None
    found = f"layers of type {', '.join(unknown)} (layer_types in config.json)"
    return found, "the embedded backend does not support them; use another engine and trainer"


def _refuse_time_steps(model: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (description, reason) if Mamba layers limit their time steps, which Transformers does not do for single tokens."""
    text = model.get("text_config")
    keys = {**model, **(text if isinstance(text, dict) else {})}
    limit = keys.get("time_step_limit") or keys.get("mamba_dt_limit")
    if not isinstance(limit, list) or len(limit) != 2:
        return None
    least, most = (x.get("__float__") if isinstance(x, dict) else x for x in limit)
    if least == 0 and str(most).lower() in ("infinity", "inf"):
        return None
    found = f"Mamba layers with time steps between {least} and {most} (time_step_limit in config.json)"
    return found, (
        "Transformers clamps the time steps of prompts and in training, but not those of generated tokens, so the engine would differ from the "
        "trainer; use another engine and trainer"
    )


@dataclass(frozen=True, kw_only=True)
class EmbeddedConfig:
    """Engine and trainer for Transformers models."""

    sharding_strategy: Literal["full_shard", "no_shard"] = option(
        "full_shard",
        flag="--sharding-strategy",
        help="with several trainer ranks: full_shard shards weights, gradients and optimizer states across them (FSDP2), no_shard "
        "replicates all of them on every rank",
    )
    disable_cuda_graph: bool = option(
        False,
        flag="--embedded-disable-cuda-graph",
        help="on a GPU the engine decodes by replaying CUDA graphs if the model and the options allow it; this flag launches every "
        "step from Python instead, which is several times slower but runs Python hooks of the model at every step",
    )
    train_vision_tower: bool = option(
        False,
        flag="--train-vision-tower",
        help="train the model's vision tower and projector, which are frozen otherwise",
        only_if="data.media",
    )
    deterministic: bool = option(
        False,
        flag="--embedded-deterministic",
        help="train with PyTorch's deterministic algorithms, which are slower on a GPU: there a run that continues a checkpoint then has the bits "
        "of one that was never stopped, as it always has on a CPU",
        only_if="trainer == embedded",
    )
    quantized_dgrad: bool = option(
        False,
        flag="--quantized-dgrad",
        help="round gradients, too, where a quantised linear layer computes the gradient of its input (dgrad), so that tensor cores multiply "
        "codes there as well; the gradients of weights and of experts stay in the model's dtype. Linear layers of the trainer are then native "
        "with --quantized-product auto",
        only_if="train.precision != bf16 and trainer == embedded",
    )
    offload_optimizer: bool = option(
        False,
        flag="--offload-optimizer",
        help="keep FP32 master weights and optimizer state in host memory (pinned for a GPU) except during an optimizer step",
    )
    optimizer_state_bytes: float = option(
        8.0,
        flag="--optimizer-state-bytes",
        help="bytes of optimizer state per weight without the FP32 master, for the memory table of the plan; plugins set it with their optimizer",
        metavar="X",
        ge=0,
    )
    engine_weight_bytes: float = option(
        0.0,
        flag="--embedded-engine-weight-bytes",
        help="bytes of each quantised weight in the embedded engine, for the memory table of the plan; 0 means the size of --dtype; number "
        "formats with a native product set it",
        metavar="X",
        ge=0,
        only_if="rollout.precision != bf16",
    )
    initial_loss_scale: float = option(
        65536.0,
        flag="--initial-loss-scale",
        help="with --dtype float16: the first loss scale; it is halved when a gradient overflows, and that step is skipped",
        ge=1,
        only_if="model.dtype == float16",
    )
    loss_scale_window: int = option(
        2000,
        flag="--loss-scale-window",
        help="with --dtype float16: steps without an overflow after which the loss scale is doubled",
        metavar="N",
        ge=1,
        only_if="model.dtype == float16",
    )


#: The manifest of the embedded backend.
plugin = Plugin(
    name="embedded",
    summary="engine and trainer for Transformers models, on any machine",
    version=__version__,
    core=f"=={__version__}",
    config=EmbeddedConfig,
    notes=NOTES,
    provides={
        "model": {"transformers": "miles_embedded.model.load:make_model"},
        "engine": {"embedded": "miles_embedded.engine.build:make_engine"},
        "trainer": {"embedded": "miles_embedded.trainer.build:make_trainer"},
        "head": {"linear": "miles_embedded.model.value_head:make_head"},
        "decoder": {"plain": "miles_embedded.engine.decoder:PlainDecoder"},
        "media": {"transformers": "miles_embedded.model.image_processor:make_expand"},
    },
    capabilities={
        "engine": (
            "routed_experts",
            "sampling_support",
            "score",
            "score_temperature",
            "token_versions",
            "draft",
            "format:*",
            "keyed_sampling",
            "hot_update",
            "media",
            "rebuild",
            "shared_storage",
            "sleep",
            "transport:buckets",
            "weight_checksums",
        ),
        "trainer": (
            "entropy",
            "format:*",
            "sampling_support",
            "routing_replay",
            "media",
            "mtp_layers",
            "rebuild",
            "sleep",
            "values",
            "top_log_probs",
            "candidates",
            "optimizers",
            "adapters",
            "divisible_step",
        ),
    },
    defaults={"engine": "embedded", "trainer": "embedded"},
    aliases={"--fp16": {"model.dtype": "float16"}},
    requires=(
        Rule(
            "train.precision == bf16 and rollout.precision == bf16",
            when="model.dtype == float16",
            because="number formats encode a BF16 copy of the weights, which would round FP16 weights; leave the format out, or train in "
            "--dtype bfloat16",
        ),
    ),
    review="miles_embedded.manifest:review",
    memory="miles_embedded.memory.usage:usage",
    examine="miles_embedded.known:examine",
    measures="miles_embedded.speed:measure_speeds",
)
