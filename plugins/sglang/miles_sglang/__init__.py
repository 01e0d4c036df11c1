"""SGLang as the rollout engine, for miles-core."""

from miles_core.plugin import Capability, Package, Plugin, Rule, Set
from miles_sglang.config import OWN, SglangConfig
from miles_sglang.installed import INSTALL, TESTED

__version__ = "0.1.0"

_SPECULATIVE = "sglang.speculative_algorithm"
#: Algorithms that draft with an MTP layer of the checkpoint where no draft model is named.
HEADS = ("EAGLE", "EAGLE3", "NEXTN")
_WITH_HEAD = f"{_SPECULATIVE} in {{{', '.join(HEADS)}}}"
#: Of which SGLang 0.5.17 takes the MTP layer out of the checkpoint; of others it would load the whole model as its own draft.
_HEADED = "bailing_moe, deepseek_v3, deepseek_v32, deepseek_v4, glm4_moe, glm4_moe_lite, glm_moe_dsa, hy_v3"
#: Their implementations in SGLang 0.5.17 make ``TopK`` without ``layer_id``; recording routes then fails while graphs are captured.
_UNRECORDED = (
    "afmoe, dbrx, ernie4_5_moe_vl, exaone_moe, granitemoe, hy_v3, kimi_linear, llama4, llama4_text, minimax_m2, mixtral, "
    "nemotron_h, olmoe, phimoe"
)

plugin = Plugin(
    name="sglang",
    summary="SGLang as the rollout engine: started here in a process of its own, or a server that runs already",
    version=__version__,
    core="~=0.1",
    config=SglangConfig,
    elsewhere={
        f"--sglang-{name.replace('_', '-')}": f"give {flag}" if flag else "the engine sets it itself"
        for name, flag in OWN.items()
    }
    | {
        "--sglang-cuda-graph-bs": {"**": "--sglang-cuda-graph-bs-decode {list}"},
        "--sglang-enable-ep-moe": {"": ""},
    },
    provides={"engine": {"sglang": "miles_sglang.build:make_engine"}},
    capabilities={
        "engine": (
            "score",
            "hot_update",
            "transport:buckets",
            Capability("sleep", when="sglang.enable_memory_saver"),
            Capability("sampling_support", when=f"not {_SPECULATIVE}"),
            Capability("routed_experts", when="sglang.enable_return_routed_experts"),
            Capability("draft", when=f"{_WITH_HEAD} and not sglang.speculative_draft_model_path"),
            Capability("keyed_sampling", when=f"sglang.enable_deterministic_inference and not {_SPECULATIVE}"),
        )
    },
    sets={
        "sglang.enable_memory_saver": Set(
            True, when="colocate and engine == sglang", because="the trainer needs the memory while it learns"
        ),
        "sglang.enable_return_routed_experts": Set(
            True, when="plugin.r3 and engine == sglang", because="the experts to replay are the ones that SGLang chose"
        ),
    },
    requires=(
        Rule(
            needs="gpu.count > 0 or model.device == cpu or sglang.url",
            because="SGLang computes on a GPU; --engine embedded runs anywhere",
        ),
        Rule(
            needs=f"model.type not in {{{_UNRECORDED}}}",
            when="sglang.enable_return_routed_experts",
            because="SGLang 0.5.17 does not tell these models' routers their layer, and fails when it is to record them; use --engine "
            "embedded, or leave r3 out",
        ),
        Rule(
            needs="not sglang.dp_size > 1 or sglang.enable_dp_attention",
            because="SGLang takes new weights only without data-parallel copies, or with --sglang-enable-dp-attention; leave "
            "--sglang-dp-size out",
        ),
        Rule(
            needs=f"not {_SPECULATIVE}",
            when="rollout.top_p < 1 or rollout.top_k > 0",
            because="SGLang returns no sampling supports while it speculates, and under top-k or top-p the trainer needs them",
        ),
        Rule(
            needs="sglang.speculative_draft_model_path or model.mtp_layers >= 1",
            when=_WITH_HEAD,
            because="the checkpoint has no MTP layer to draft with: give --sglang-speculative-draft-model-path DIR, or draft from the text "
            "itself (--sglang-speculative-algorithm NGRAM)",
        ),
        Rule(
            needs=f"sglang.speculative_draft_model_path or model.type in {{{_HEADED}}}",
            when=f"{_WITH_HEAD} and model.mtp_layers >= 1",
            because="SGLang 0.5.17 drafts with a checkpoint's own MTP layer in these families only: give "
            "--sglang-speculative-draft-model-path DIR, or draft on the embedded engine (--engine embedded --plugins speculative)",
        ),
        Rule(
            needs="model.device != cpu or sglang.url",
            when=_SPECULATIVE,
            because="on a CPU SGLang 0.5.17 keeps the drafts that the policy finds most probable, whatever the temperature, so the text would "
            "not be the policy's; draft on the embedded engine (--engine embedded --plugins speculative)",
        ),
        Rule(
            needs="sglang.speculative_draft_model_path",
            when=f"{_SPECULATIVE} == STANDALONE",
            because="STANDALONE drafts with a small model of its own: give --sglang-speculative-draft-model-path DIR",
        ),
        Rule(
            needs=_SPECULATIVE,
            when="sglang.speculative_draft_model_path or sglang.speculative_num_steps or sglang.speculative_num_draft_tokens",
            because="these options are about drafts, and without --sglang-speculative-algorithm SGLang drafts nothing",
        ),
        Rule(
            needs="not sglang.speculative_accept_threshold_single < 1 and not sglang.speculative_accept_threshold_acc < 1",
            because="below 1 SGLang keeps drafts that the policy would not have sampled, and their log-probs are not those they were drawn with",
        ),
        Rule(
            needs="not sglang.speculative_use_rejection_sampling",
            when="sglang.enable_deterministic_inference",
            because="SGLang's rejection sampling draws from one stream for the whole batch, so its tokens depend on the batch",
        ),
        Rule(
            needs="not sglang.enable_dp_attention",
            when=f"{_SPECULATIVE} == STANDALONE",
            because="SGLang has no data-parallel attention for a separate draft model",
        ),
        Rule(
            needs="sglang.enable_memory_saver",
            when="sglang.enable_draft_weights_cpu_backup",
            because="the copy is for drafts whose memory is given back, which --sglang-enable-memory-saver does",
        ),
        Rule(
            needs="sglang.enable_draft_weights_cpu_backup",
            when="sglang.enable_memory_saver and sglang.speculative_draft_model_path",
            because="a separate draft is in no sync, so nothing would bring its weights back after its memory was given back",
        ),
        Rule(
            needs="sglang.moe_a2a_backend != deepep",
            when="rollout.precision == mxfp8",
            because="SGLang has no MXFP8 kernel for the all-to-all of DeepEP",
        ),
        Rule(
            needs="rollout.precision in {bf16, fp8}",
            when="sglang.url",
            because="SGLang packs other formats when it loads them and cannot load into that again, and a server that was not "
            "started here cannot be started anew",
        ),
        Rule(
            needs="not sglang.enable_lora",
            because="weights arrive for the model itself, and an adapter on top of it would not be what is trained",
        ),
    ),
    packages=(
        Package(
            "sglang",
            TESTED,
            when="engine == sglang and not sglang.url",
            install=f"{INSTALL}; or give --sglang-url of a running server",
        ),
    ),
    review="miles_sglang.review:review",
    memory="miles_sglang.memory:usage",
)
