"""Manifests of the published plugins' restrictions, as data; the tests of the checker are written against them."""

from dataclasses import dataclass

from miles_core.config.load import load
from miles_core.data.field import Field
from miles_core.plugin.facts import Fact, Facts
from miles_core.plugin.manifest import Pair, Plugin, Rule
from miles_core.plugin.options import option
from miles_embedded import plugin as embedded

CORE_RANGE = "~=0.1"
DRIFT = (
    Rule("plugin.r3", "experts picked under low-precision rollout drift from BF16 training", when="model.moe"),
    Rule("plugin.tis", "rollout and training log-probs come from different kernels"),
)


@dataclass
class SglangConfig:
    moe_a2a_backend: str = option(
        "none", help="all-to-all", flag="--sglang-moe-a2a-backend", choices=("none", "deepep")
    )
    enable_return_routed_experts: bool = option(False, help="routing", flag="--sglang-enable-return-routed-experts")


@dataclass
class TisConfig:
    threshold: float = option(2.0, help="cap", flag="--tis-threshold")


@dataclass
class Int4Config:
    group_size: int = option(128, help="group", flag="--int4-group-size", choices=(32, 64, 128))


def hopper(cell: str) -> Rule:
    return Rule("gpu.sm >= 90", f"{cell} needs FP8 tensor cores", hardware=True)


BLACKWELL = Rule("gpu.sm >= 100", "1x32 UE8M0 block scales are a Blackwell tensor-core format", hardware=True)
FP4 = Rule("gpu.sm >= 100", "E2M1 products exist from Blackwell on", hardware=True)

fp8 = Plugin(
    "fp8",
    "FP8 in 128x128 blocks",
    "0.1.0",
    CORE_RANGE,
    formats={"fp8": "miles_fp8.format:Fp8"},
    claims={"precision": "a run has one low-precision format"},
    pairs=(
        Pair("fp8", "bf16", (hopper("FP8 rollout"),), DRIFT),
        Pair("fp8", "fp8", (hopper("FP8 training"),)),
    ),
    aliases={"--rollout-fp8": {"rollout.precision": "fp8"}},
)
mxfp8 = Plugin(
    "mxfp8",
    "MXFP8",
    "0.1.0",
    CORE_RANGE,
    formats={"mxfp8": "miles_mxfp8.format:Mxfp8"},
    claims={"precision": "a run has one low-precision format"},
    requires=(
        Rule(
            "rollout.precision == mxfp8",
            "MXFP8 training is only exact against MXFP8 rollout",
            when="train.precision == mxfp8",
        ),
        Rule("sglang.moe_a2a_backend != deepep", "SGLang has no MXFP8 DeepEP kernel yet", when="engine == sglang"),
    ),
    pairs=(Pair("mxfp8", "bf16", (BLACKWELL,), DRIFT), Pair("mxfp8", "mxfp8", (BLACKWELL,))),
)
nvfp4 = Plugin(
    "nvfp4",
    "NVFP4 expert GEMMs",
    "0.1.0",
    CORE_RANGE,
    formats={"nvfp4": "miles_nvfp4.format:Nvfp4"},
    claims={"precision": "a run has one low-precision format"},
    pairs=(Pair("nvfp4", "nvfp4", (FP4,), experimental=True),),
)
int4 = Plugin(
    "int4",
    "INT4 weights with quantisation-aware training",
    "0.1.0",
    CORE_RANGE,
    config=Int4Config,
    formats={"int4": "miles_int4.format:Int4"},
    claims={"precision": "a run has one low-precision format"},
    pairs=(Pair("int4", "bf16", (), DRIFT), Pair("int4", "int4")),
)
r3 = Plugin(
    "r3",
    "Rollout routing replay",
    "0.1.0",
    CORE_RANGE,
    hooks={"": "miles_r3.hooks:R3", "trainer == megatron": "miles_r3.megatron:MegatronR3"},
    fields=(Field("routed_experts", "int16", "token-1", pad=-1, shape=(None, None)),),
    sets={"sglang.enable_return_routed_experts": True, "megatron.moe_enable_routing_replay": True},
    uses={"routed_experts": "R3 replays the routing the engine reports"},
    requires=(Rule("model.moe", "there is no router to replay in a dense model"),),
    before=("tis",),
)
tis = Plugin(
    "tis", "Importance-sampling corrections", "0.1.0", CORE_RANGE, config=TisConfig, hooks={"": "miles_tis.hooks:Tis"}
)
sglang = Plugin(
    "sglang",
    "SGLang engine",
    "0.1.0",
    CORE_RANGE,
    config=SglangConfig,
    provides={"engine": {"sglang": "miles_sglang.engine:make_engine"}},
    capabilities={"engine": ("routed_experts", "score", "token_versions", "format:*")},
)
plain = Plugin(
    "plain",
    "An engine that returns tokens only",
    "0.1.0",
    CORE_RANGE,
    provides={"engine": {"plain": "miles_plain.engine:make_engine"}},
    capabilities={"engine": ("format:*",)},
)
ray = Plugin(
    "ray",
    "Ray runtime",
    "0.1.0",
    CORE_RANGE,
    provides={"runtime": {"ray": "miles_ray.runtime:make_runtime"}},
    capabilities={"runtime": ("remote",)},
)

ALL = {p.name: p for p in (fp8, mxfp8, nvfp4, int4, r3, tis, sglang, plain, ray)}
#: ... and the backend that ships with core.
INSTALLED = {**ALL, "embedded": embedded}


def gpu(name: str = "H200", sm: int = 90) -> list[Fact]:
    origin = f"detected: NVIDIA {name}"
    return [Fact("gpu", name, origin), Fact("gpu.sm", sm, origin), Fact("gpu.count", 8, origin)]


def chosen(path: str, value: object, flag: str = "") -> Fact:
    flag = flag or "--" + path.replace(".", "-").replace("_", "-")
    return Fact(path, value, f"{flag} {value}", flag=flag, chosen=True)


def defaults(*manifests: Plugin) -> list[Fact]:
    """Return the facts of core's options and of these plugins' options, all with their defaults."""
    return load([], manifests=manifests, environment={}).facts()


OPTIONS = defaults(*ALL.values())


def facts(*more: Fact, sm: int = 100, moe: bool = True, **precision: str) -> Facts:
    """A host, a model and options; ``rollout=`` and ``train=`` choose precisions."""
    base = [*OPTIONS, *gpu("B200" if sm >= 100 else "H200", sm), Fact("model.moe", moe, "config.json: num_experts=128")]
    base += [Fact("model.quantized", "none", "config.json: no quantization_config")]
    base += [Fact("model.dtype", "bfloat16", "default")]
    base += [chosen(f"{side}.precision", value) for side, value in precision.items()]
    return Facts([*base, *more])
