"""Notes of the plan about runs with the embedded backend."""

_IN_PROCESS = "engine == embedded and runtime == inline"
#: The engine decodes with CUDA graphs, unless the model cannot (the log says why).
_GRAPHS = "engine == embedded and gpu != none and model.device != cpu and not embedded.disable_cuda_graph"
#: Options that have no effect.
_IDLE = {
    f"{_IN_PROCESS} and transport == copy and sync_bucket_size != 536870912": (
        "no effect: --sync-bucket-size limits what an engine in another process receives at a time, and this engine is in the process of "
        "the trainer"
    ),
    f"{_IN_PROCESS} and not rollout.workers and max_restarts != 3": (
        "no effect: --max-restarts counts lost workers, and this run has none"
    ),
    "trainer == embedded and runtime == inline and embedded.sharding_strategy != full_shard": (
        "no effect: --sharding-strategy is about several trainer ranks, and this run has one"
    ),
    "engine == embedded and embedded.disable_cuda_graph and (model.device == cpu or gpu.count == 0)": (
        "no effect: --embedded-disable-cuda-graph is about GPUs, and this run has none"
    ),
    "engine == embedded and allow_mismatch and not model.self_check": (
        "no effect: --allow-mismatch is about the comparison of engine and trainer, which --no-self-check leaves out"
    ),
}
#: Condition -> note.
NOTES = {
    "engine == embedded and model.quantized != none and rollout.precision == bf16": (
        "the checkpoint stores quantised weights, and the engine computes with the dequantised ones in BF16: only --rollout-precision "
        "selects a format for the rollout, the checkpoint does not"
    ),
    f"{_GRAPHS} and (rollout.top_p < 1 or rollout.top_k > 0)": (
        "decoding is slower: top-k and top-p wait for the logits of each step"
    ),
    f"{_GRAPHS} and rollout.stop": (
        "decoding is slower: --rollout-stop reads the text of every new token; --rollout-stop-token-ids does not"
    ),
    **_IDLE,
}
