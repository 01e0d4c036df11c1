"""The options of ``miles simulate`` in addition to those of ``miles train``."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.plugin.options import option


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """Lengths, GPUs, speeds and failures of the simulated run."""

    lengths: str = option(
        "lognormal:2000,1.0",
        flag="--lengths",
        help="tokens of a response: constant:N, uniform:LOW,HIGH, lognormal:MEDIAN,SIGMA, run:DIRECTORY (drawn from its saved rollouts) or "
        "replay:DIRECTORY (in their order)",
        metavar="DISTRIBUTION",
    )
    prompt_lengths: str = option(
        "constant:512",
        flag="--prompt-lengths",
        help="tokens of a prompt, in the same form",
        metavar="DISTRIBUTION",
    )
    correlation: float = option(
        0.0,
        flag="--length-correlation",
        help="fraction of the variance of response lengths that the prompt determines",
        ge=0,
        le=1,
    )
    gpu: str = option("H100", flag="--gpu", help="kind of GPU, for the computed speeds", metavar="NAME")
    trainer_gpus: int = option(8, flag="--trainer-gpus", help="GPUs that train", ge=1)
    engine_gpus: int | None = option(
        None, flag="--engine-gpus", help="GPUs that generate (default: 8; with --colocate, the trainer's)", ge=1
    )
    engine_size: int = option(1, flag="--engine-size", help="GPUs of one engine", ge=1)
    model_config: str | None = option(
        None, flag="--model-config", help="config.json of the model, for the computed speeds", metavar="FILE"
    )
    parameters: float | None = option(None, flag="--parameters", help="parameters, instead of --model-config", gt=0)
    layers: int = option(36, flag="--layers", help="layers, with --parameters", ge=1)
    kv_bytes: float = option(
        131072, flag="--kv-bytes-per-token", help="cache of a token in bytes, with --parameters", ge=0
    )
    weight_bytes: float = option(
        2.0, flag="--engine-weight-bytes", help="bytes of a parameter in the engine (FP8: 1)", gt=0
    )
    decode_floor: float | None = option(
        None,
        flag="--decode-seconds-per-step",
        help="seconds of a decode step that do not depend on the batch: launches, collectives (default: 60 us per layer, 25 on one GPU, "
        "132 over several machines)",
        ge=0,
    )
    bandwidth: float = option(
        0.65, flag="--decode-bandwidth", help="fraction of the memory bandwidth that decoding reaches", gt=0, le=1
    )
    decode_curve: str | None = option(
        None,
        flag="--decode-curve",
        help="measured seconds of a decode step by batch size, instead of the computed ones",
        metavar="FILE",
    )
    prefill: float | None = option(
        None, flag="--prefill-seconds-per-token", help="of one engine (default: computed)", ge=0
    )
    train: float | None = option(
        None, flag="--train-seconds-per-token", help="of the whole trainer (default: computed)", ge=0
    )
    train_fixed: float = option(
        0.0, flag="--train-seconds-per-step", help="seconds of a training step in addition to those of its tokens", ge=0
    )
    mfu: float = option(
        0.3, flag="--train-mfu", help="fraction of the peak arithmetic that training reaches", gt=0, le=1
    )
    passes: float = option(
        1.0, flag="--train-extra-passes", help="forward passes before training: old and reference log-probs", ge=0
    )
    recompute: bool = option(
        True, flag="--train-recompute", help="the forward pass is computed again in the backward pass"
    )
    sync: float | None = option(
        None, flag="--sync-seconds", help="of one weight sync (default: weights at 30 GB/s, and 1 s)", ge=0
    )
    switch: float = option(
        5.0, flag="--switch-seconds", help="with --colocate: move trainer or engine into memory, or out of it", ge=0
    )
    cache_memory: float = option(
        0.8, flag="--engine-memory", help="fraction of a GPU's memory for weights and cache of the engine", gt=0, le=1
    )
    cache_tokens: int | None = option(
        None, flag="--cache-tokens", help="tokens in the cache of one engine (default: computed)", ge=1
    )
    reward_seconds: float = option(0.0, flag="--reward-seconds", help="seconds of a call of the reward function", ge=0)
    failure_hours: float | None = option(
        None,
        flag="--engine-failure-hours",
        help="mean hours between failures of one engine (default: none fails)",
        gt=0,
    )
    restart: float = option(300.0, flag="--engine-restart-seconds", help="seconds to replace a failed engine", ge=0)
    warm_up: int | None = option(
        None,
        flag="--warm-up-steps",
        help="first steps that the averages leave out (default: 1, and with ahead and async as many as a sample may be old)",
        ge=0,
    )
    resolution: int = option(
        64,
        flag="--resolution",
        help="parts into which the driver divides the longest response; engines and trainer count exactly",
        ge=1,
    )
