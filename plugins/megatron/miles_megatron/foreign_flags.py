"""Flags of Megatron-LM's training script that this trainer does not need or names differently."""

from __future__ import annotations

#: Model flags that ``config.json`` replaces: flags with a value, and switches.
_MODEL = (
    "num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels vocab-size normalization norm-epsilon "
    "position-embedding-type rotary-percent rotary-base rotary-scaling-factor max-position-embeddings seq-length num-experts "
    "moe-ffn-hidden-size moe-router-topk moe-layer-freq moe-router-score-function moe-router-num-groups moe-router-group-topk "
    "moe-router-topk-scaling-factor moe-router-pre-softmax moe-shared-expert-intermediate-size moe-router-dtype "
    "moe-router-load-balancing-type q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim "
    "make-vocab-size-divisible-by mscale mscale-all-dim beta-fast beta-slow original-max-position-embeddings rope-type softmax-type "
    "window-size window-attn-skip-freq moe-latent-size linear-attention-freq attention-dropout-rate activation-func-clamp-value "
    "experimental-attention-variant dsa-indexer-topk dsa-indexer-n-heads dsa-indexer-head-dim original-vocab-size"
)
_SWITCHES = (
    "disable-bias-linear add-bias-linear add-qkv-bias qk-layernorm group-query-attention swiglu untie-embeddings-and-output-weights "
    "multi-latent-attention moe-router-enable-expert-bias no-rope-fusion use-rotary-position-embeddings use-rope-scaling "
    "no-position-embedding rotary-interleaved post-self-attn-layernorm post-mlp-layernorm use-gated-attention attention-output-gate "
    "apply-layernorm-1p moe-shared-expert-gate no-activation-func-clamp-shared-expert"
)
_DROPPED = {"**": ""}

FOREIGN_FLAGS: dict[str, str | dict[str, str]] = {
    **{f"--{name}": _DROPPED for name in f"{_MODEL} {_SWITCHES}".split()},
    "--megatron-to-hf-mode": {"*": ""},
    "--optimizer": {"adam": "", "adamw": ""},
    "--attention-dropout": {"0": "", "0.0": ""},
    "--hidden-dropout": {"0": "", "0.0": ""},
    "--accumulate-allreduce-grads-in-fp32": {"": "--grad-reduce-in-fp32"},
    "--moe-aux-loss-coeff": {"*": "--aux-loss-coef {}"},
    "--moe-enable-deepep": {"": "--moe-token-dispatcher-type flex"},
    "--decoder-first-pipeline-num-layers": {"*": "--num-layers-in-first-pipeline-stage {}"},
    "--decoder-last-pipeline-num-layers": {"*": "--num-layers-in-last-pipeline-stage {}"},
    "--no-check-for-nan-in-loss-and-grad": {"": ""},
    "--use-distributed-optimizer": {"": ""},
}
