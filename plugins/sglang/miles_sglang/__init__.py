"""SGLang as the rollout engine, for miles-core."""

from miles_core.plugin import Capability, Package, Plugin, Rule, Set
from miles_sglang.config import OWN, SglangConfig
from miles_sglang.formats import CAPABILITIES
from miles_sglang.installed import INSTALL, TESTED

__version__ = "0.1.0"

_SPECULATIVE = "sglang.speculative_algorithm"
#: SGLang computes with the kernels of the trainer.
_EXACT = "plugin.true_on_policy and engine == sglang"
#: Algorithms that draft with the checkpoint's MTP layer when no draft model is configured.
HEADS = ("EAGLE", "EAGLE3", "NEXTN")
#: The schedulers run this plugin's code, and its digest can be checked in all of them.
_OWN_SCHEDULERS = "not sglang.url and not sglang.enable_dp_attention and not sglang.pp_size > 1"
_WITH_HEAD = f"{_SPECULATIVE} in {{{', '.join(HEADS)}}}"
#: Families whose MTP layer SGLang 0.5.17 extracts from the checkpoint. For other families it loads the whole model as the draft.
_HEADED = "bailing_moe, deepseek_v3, deepseek_v32, deepseek_v4, glm4_moe, glm4_moe_lite, glm_moe_dsa, hy_v3"
#: SGLang 0.5.17 constructs ``TopK`` without ``layer_id`` in these families; recording routes then fails during CUDA graph capture.
_UNRECORDED = (
    "afmoe, dbrx, ernie4_5_moe_vl, exaone_moe, granitemoe, granitemoehybrid, hy_v3, kimi_linear, llama4, llama4_text, mimo_v2_flash, "
    "minimax_m2, mixtral, nemotron_h, olmoe, phimoe"
)

plugin = Plugin(
    name="sglang",
    summary="SGLang as the rollout engine: a separate local process, or servers that are already running",
    version=__version__,
    core="~=0.1",
    config=SglangConfig,
    notes={
        "engine == sglang and model.quantized != none and rollout.precision == bf16": (
            "the checkpoint stores quantised weights, and SGLang receives the dequantised ones in BF16: only --rollout-precision selects a "
            "format for the rollout, while a server of SGLang alone would take the checkpoint's"
        ),
        "engine == sglang and sglang.url and not sglang.weights_dir": (
            "the running servers receive weights over HTTP, in messages with checksums; --sglang-weights-dir DIR sends them as files instead, in a "
            "directory that all servers can read"
        ),
        "engine == sglang and sglang.url and sglang.weights_dir": (
            "the running servers receive weights as files, which they must be able to read in --sglang-weights-dir"
        ),
    },
    foreign_flags={
        f"--sglang-{name.replace('_', '-')}": f"give {flag}" if flag else "the engine sets it"
        for name, flag in OWN.items()
    }
    | {
        "--sglang-cuda-graph-bs": {"**": "--sglang-cuda-graph-bs-decode {list}"},
        "--sglang-cuda-graph-max-bs": {"*": "--sglang-cuda-graph-max-bs-decode {}"},
        "--sglang-max-running-requests": {"*": "--max-running-requests {}"},
        "--sglang-tp": {"*": "--sglang-tp-size {}"},
        "--sglang-tensor-parallel-size": {"*": "--sglang-tp-size {}"},
        "--sglang-enable-ep-moe": {"": ""},
        "--sglang-enable-deepep-moe": {"": "--sglang-moe-a2a-backend deepep"},
        "--sglang-expert-parallel-size": {"*": "--sglang-ep-size {}"},
        "--sglang-data-parallel-size": {"*": "--sglang-dp-size {}"},
        "--sglang-pipeline-parallel-size": {"*": "--sglang-pp-size {}"},
        "--sglang-server-concurrency": {"*": "--max-running-requests {}"},
    },
    provides={"engine": {"sglang": "miles_sglang.build:make_engine"}},
    capabilities={
        "engine": (
            "score",
            "media",
            "hot_update",
            "span",
            "transport:buckets",
            "transport:adapter",
            *CAPABILITIES,
            Capability("sleep", when="sglang.enable_memory_saver"),
            # by a restart, which takes the memory of a trainer that is awake on the same GPU
            Capability("rebuild", when="not sglang.url and not sglang.enable_memory_saver"),
            Capability("sampling_support", when=f"not {_SPECULATIVE}"),
            Capability("routed_experts", when="sglang.enable_return_routed_experts"),
            Capability("token_versions", when=_OWN_SCHEDULERS),
            Capability(
                "draft",
                when=f"({_WITH_HEAD} and not sglang.speculative_draft_model_path) or (sglang.speculative_draft_model_path and "
                f"{_OWN_SCHEDULERS})",
            ),
            Capability("keyed_sampling", when=f"sglang.enable_deterministic_inference and not {_SPECULATIVE}"),
        )
    },
    sets={
        "sglang.enable_memory_saver": (
            Set(
                True,
                when="colocate and engine == sglang",
                because="the trainer needs the memory during the training step",
            ),
            Set(
                True,
                when="sglang.enable_draft_weights_cpu_backup and engine == sglang",
                because="the CPU copy restores draft weights after SGLang released their memory",
            ),
        ),
        "sglang.model_impl": Set(
            "transformers", when=_EXACT, because="true_on_policy replaces the steps of the model's Transformers code"
        ),
        "sglang.enable_deterministic_inference": Set(
            True, when=_EXACT, because="a token must not depend on the other requests of a batch"
        ),
        "sglang.attention_backend": Set(
            "triton", when=_EXACT, because="true_on_policy's attention reads the cache of this backend"
        ),
        "sglang.disable_cuda_graph": Set(
            True, when=_EXACT, because="true_on_policy's attention reads the lengths of the sequences on the host"
        ),
        "sglang.enable_precise_embedding_interpolation": Set(
            True,
            when="data.media and engine == sglang",
            because="SGLang otherwise resamples the positions of a tower (Qwen3-VL) in another way than the trainer",
        ),
        "sglang.enable_return_routed_experts": Set(
            True, when="plugin.r3 and engine == sglang", because="r3 replays the experts that SGLang chose"
        ),
        "sglang.disable_shared_experts_fusion": Set(
            True,
            when="sglang.enable_return_routed_experts and model.type == qwen3_next",
            because="SGLang 0.5.17 fails to record routed experts beside a shared expert that it stores among them",
        ),
    },
    requires=(
        Rule(
            needs="gpu.count > 0 or model.device == cpu or sglang.url",
            because="SGLang needs a GPU; --engine embedded also runs on a CPU",
        ),
        Rule(
            needs=f"model.type not in {{{_UNRECORDED}}}",
            when="sglang.enable_return_routed_experts",
            because="SGLang 0.5.17 does not pass the layer index to these models' routers, so it cannot record routed experts; use "
            "--engine embedded, or leave r3 out",
        ),
        Rule(
            needs="model.type not in {glm4_moe, glm4_moe_lite, glm4v_moe, glm4v_moe_text}",
            when="sglang.url",
            because="SGLang 0.5.17 multiplies in these families' routers with a copy of the weights that updates do not change; an SGLang that "
            "the run starts updates the copy",
        ),
        Rule(
            needs="not sglang.dp_size > 1 or sglang.enable_dp_attention",
            because="SGLang accepts new weights only without data-parallel copies, or with --sglang-enable-dp-attention; leave "
            "--sglang-dp-size out",
        ),
        Rule(
            needs=f"not {_SPECULATIVE}",
            when="rollout.top_p < 1 or rollout.top_k > 0",
            because="SGLang returns no sampling supports with speculative decoding, and the trainer needs them for top-k and top-p",
        ),
        Rule(
            needs="sglang.speculative_draft_model_path or model.mtp_layers >= 1",
            when=_WITH_HEAD,
            because="the checkpoint has no MTP layer to draft with: give --sglang-speculative-draft-model-path DIR, or draft from the "
            "generated text (--sglang-speculative-algorithm NGRAM)",
        ),
        Rule(
            needs=f"sglang.speculative_draft_model_path or model.type in {{{_HEADED}}}",
            when=f"{_WITH_HEAD} and model.mtp_layers >= 1",
            because="SGLang 0.5.17 drafts with a checkpoint's MTP layer in these families only: give "
            "--sglang-speculative-draft-model-path DIR, or draft on the embedded engine (--engine embedded --plugins speculative)",
        ),
        Rule(
            needs="model.device != cpu or sglang.url",
            when=_SPECULATIVE,
            because="on a CPU, SGLang 0.5.17 verifies drafts greedily, whatever the temperature, so the samples do not follow the "
            "policy's distribution; draft on the embedded engine (--engine embedded --plugins speculative)",
        ),
        Rule(
            needs="sglang.speculative_draft_model_path",
            when=f"{_SPECULATIVE} == STANDALONE",
            because="STANDALONE drafts with a separate model: give --sglang-speculative-draft-model-path DIR",
        ),
        Rule(
            needs=_SPECULATIVE,
            when="sglang.speculative_draft_model_path or sglang.speculative_num_steps or sglang.speculative_num_draft_tokens",
            because="these options configure drafting, and SGLang drafts only with --sglang-speculative-algorithm",
        ),
        Rule(
            needs="not sglang.speculative_accept_threshold_single < 1 and not sglang.speculative_accept_threshold_acc < 1",
            because="below 1, SGLang accepts draft tokens that the policy would not have sampled, and the returned log-probs are not those "
            "of the sampling distribution",
        ),
        Rule(
            needs="not sglang.speculative_use_rejection_sampling",
            when="sglang.enable_deterministic_inference",
            because="SGLang's rejection sampling uses one random stream for the whole batch, so its tokens depend on the batch",
        ),
        Rule(
            needs="not sglang.enable_dp_attention",
            when=f"{_SPECULATIVE} == STANDALONE",
            because="SGLang does not support data-parallel attention with a separate draft model",
        ),
        Rule(
            needs="sglang.enable_draft_weights_cpu_backup",
            when="sglang.enable_memory_saver and sglang.speculative_draft_model_path",
            because="a separate draft model is not part of every update, so only the CPU copy can restore its weights after SGLang "
            "released their memory",
        ),
        Rule(
            needs="sglang.moe_a2a_backend != deepep",
            when="rollout.precision == mxfp8",
            because="SGLang has no MXFP8 kernel for DeepEP's all-to-all",
        ),
        Rule(
            needs="rollout.pause_generation_mode != in_place",
            because="a step that SGLang computes during the pause would be recorded with the version of the new weights: "
            "give --pause-generation-mode retract",
        ),
        Rule(
            needs="rollout.pause_generation_mode != retract",
            when="colocate or transport == adapter",
            because="SGLang releases memory, and unloads an adapter, only when no request is in flight",
        ),
        Rule(
            needs="not sglang.url",
            when="data.media",
            because="a server that the run did not start takes no processed images; leave the address out, and the run starts SGLang",
        ),
        Rule(
            needs=f"not {_SPECULATIVE}",
            when="data.media",
            because="SGLang's drafts with images have not been tested; run it without drafts",
        ),
        Rule(
            needs="transport != adapter and rollout.precision == bf16",
            when="data.media",
            because="adapters and number formats of models that read images have been tested with --engine embedded only",
        ),
        Rule(
            needs="not sglang.language_only and not sglang.encoder_only",
            when="data.media",
            because="one SGLang computes the images and the text",
        ),
        Rule(
            needs="not sglang.enable_lora",
            because="weight updates contain the full model and no adapter, so SGLang would serve another function than the trained one",
        ),
    ),
    packages=(
        Package(
            "sglang",
            TESTED,
            when="engine == sglang and not sglang.url and not sglang.python_path",
            install=f"{INSTALL}; or give --sglang-url with the address of a running server",
        ),
    ),
    hooks={"": "miles_sglang.early:Early", "sglang.url": "miles_sglang.pool:SglangMetrics"},
    review="miles_sglang.review:review",
    memory="miles_sglang.memory:usage",
)
