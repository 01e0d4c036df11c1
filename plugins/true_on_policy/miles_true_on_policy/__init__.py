"""Bit-identical log-probabilities in engine and trainer for any batch, for miles-core."""

from miles_core.plugin import Hint, Plugin, Remedy, Rule, Set, above
from miles_true_on_policy.config import TrueOnPolicyConfig

__version__ = "0.1.0"

#: Conditions under which SGLang computes the trainer's bits, and reasons.
_INSIDE_SGLANG = (
    (
        "model.type in {qwen3, qwen3_moe}",
        "SGLang runs the steps of each family in its own code, and equal bits were verified for these two; --engine embedded supports the others",
    ),
    (
        "model.device != cpu and gpu.sm == 90",
        "inside SGLang only the plugin's GPU kernels can read the cache, and equal bits were verified on Hopper GPUs (sm_90)",
    ),
    ("not sglang.url", "a server that runs elsewhere does not load the plugin's kernels"),
    (
        "rollout.precision == bf16 and not plugin.lora",
        "SGLang computes quantised layers and adapters with kernels of its own; --engine embedded supports them",
    ),
    (
        "not sglang.tp_size > 1 and not sglang.pp_size > 1 and not sglang.ep_size > 1 and not sglang.dp_size > 1",
        "several GPUs of an engine add parts of a sum in another order than one trainer",
    ),
    ("not sglang.speculative_algorithm", "SGLang verifies drafts with attention kernels of its own"),
    (
        "rollout.top_p == 1 and rollout.top_k <= 0",
        "SGLang normalizes the log-probabilities of truncated sampling with its own functions",
    ),
)

#: When responses continue under new weights.
_OLDER = "rollout.partial_rollout or schedule == async and rollout.partial_rollout != false"

_NOT_EXACT = "{metric} is {value}, and with --true-on-policy-mode it is exactly 0"
_ADVICE = "miles verify --exact names the first layer whose outputs differ"

plugin = Plugin(
    name="true_on_policy",
    summary="bit-identical log-probs in engine and trainer for any batch, packing and number of threads",
    version=__version__,
    core="~=0.1",
    config=TrueOnPolicyConfig,
    hooks={"": "miles_true_on_policy.hooks:TrueOnPolicy"},
    provides={"check": {"true_on_policy": "miles_true_on_policy.start_check:make_check"}},
    sets={
        "r3.recomputed": Set(
            "newest",
            when=f"plugin.r3 and ({_OLDER})",
            because="the engine computes a continued response again with its new weights, and the trainer must use the experts of that "
            "computation",
        )
    },
    requires=(
        Rule(
            needs="engine in {embedded, sglang} and trainer == embedded",
            because="both sides must compute with the same functions, and the plugin replaces those of the embedded trainer, of the embedded "
            "engine and of SGLang",
        ),
        *(Rule(needs=needs, when="engine == sglang", because=because) for needs, because in _INSIDE_SGLANG),
        Rule(
            needs="model.device == cpu or model.device == auto and gpu == none or gpu.sm == 90",
            because="equal bits were verified on CPUs and on Hopper GPUs (sm_90) only, and the libraries may choose other kernels on other GPUs; "
            "give --device cpu",
        ),
        Rule(
            needs="precision.emulated",
            when="model.device != cpu and gpu.sm > 0 and rollout.precision not in {bf16, fp8}",
            because="the libraries' products of quantised operands choose their order of additions by the number of rows; emulated formats use "
            "the plugin's products",
        ),
        Rule(
            needs="precision.emulated or fp8.fixed_order",
            when="model.device != cpu and gpu.sm > 0 and rollout.precision == fp8",
            because="the kernels of FP8 products depend on the number of rows unless --fp8-fixed-order chooses one",
        ),
        Rule(
            needs="not plugin.cpu_kernels",
            because="its compiled attention, experts and norms add in another order in decoding than in training",
        ),
        Rule(
            needs="rollout.precision == bf16 or train.precision != bf16",
            because="an engine in a number format computes another function than a plain trainer",
        ),
        Rule(
            needs="train.precision == bf16 or rollout.precision != bf16",
            because="a trainer in a number format computes another function than a plain engine",
        ),
        Rule(
            needs="rollout.kv_cache_dtype == auto",
            because="the engine would attend to rounded keys and values, and the trainer has no cache to round",
        ),
        Rule(
            needs="rollout.pause_generation_mode != in_place",
            because="the engine would attend to keys and values of older weights, and the trainer computes them with its own; abort and retract "
            "compute them again",
        ),
        Rule(
            needs="lora.sync == adapter",
            when="plugin.lora",
            because="the engine would multiply by base plus adapters as one matrix, and the trainer by base and adapters apart",
        ),
        Rule(
            needs="lora.dropout == 0",
            when="plugin.lora",
            because="the trainer would drop inputs of the adapters at random, and the engine drops none; leave --lora-dropout out",
        ),
        Rule(
            needs="not experts.capacity_factor",
            when="plugin.experts",
            because="the trainer would drop tokens of experts above their capacity, and the engine drops none; leave --moe-capacity-factor "
            "out, and balance the experts with --aux-loss-coef",
        ),
        Rule(
            needs="speculative.topk == 1 and (not speculative.eagle_topk or speculative.eagle_topk == 1)",
            when="plugin.speculative",
            because="trees of drafts have no attention here whose result is independent of the batch; --spec-topk 1 drafts a chain",
        ),
        Rule(
            needs="model.type not in {deepseek_v32, glm_moe_dsa}",
            because="the keys that their indexers choose have no attention here whose result is independent of the batch",
        ),
    ),
    remedies=(
        Remedy(
            "mismatch",
            "compute the same bits on both sides (--plugins true_on_policy)",
            when="engine == embedded and trainer == embedded and not plugin.true_on_policy",
        ),
    ),
    hints=(
        Hint(
            "not-exact",
            "*mismatch/abs_log_prob",
            above(0.0, steps=1),
            _NOT_EXACT,
            _ADVICE,
            when=f"plugin.true_on_policy and schedule == sync and not ({_OLDER})",
        ),
        Hint(
            "current-tokens-not-exact",
            "*mismatch/current_abs_log_prob",
            above(0.0, steps=1),
            _NOT_EXACT,
            _ADVICE,
            when="plugin.true_on_policy",
        ),
    ),
)
