"""Parses the options of a simulation to lengths, speeds and sizes."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.config.config import Config
from miles_core.errors import ConfigError
from miles_planner.simulation.hardware import find_gpu
from miles_planner.simulation.lengths import Lengths, parse_distribution
from miles_planner.simulation.model_shape import ModelShape, read_shape
from miles_planner.simulation.options import SimulationConfig
from miles_planner.simulation.speed import (
    PREFILL_FLOPS,
    SYNC_BANDWIDTH,
    SYNC_FIXED,
    Decode,
    Roofline,
    Speed,
    read_curve,
)

#: Name of the plugin whose options describe the simulation.
NAME = "simulated"


@dataclass(frozen=True)
class Setup:
    """One simulated run.

    Attributes:
        speed: seconds of all parts.
        lengths: tokens of prompts and responses.
        engines: number of engines.
        gpus: all GPUs; shared ones count once.
        engine_gpus, trainer_gpus: those of each side.
        unit: tokens that one token of the driver stands for.
        restart: seconds to replace a failed engine.
        failure_seconds: mean seconds between failures of one engine; None if none fails.
        warm_up: steps that averages leave out.
        tail: steps to simulate after the last one that counts: a schedule that generates ahead has less to do at its end.
    """

    speed: Speed
    lengths: Lengths
    engines: int
    gpus: int
    engine_gpus: int
    trainer_gpus: int
    unit: int
    restart: float
    failure_seconds: float | None
    warm_up: int
    tail: int


def parse_setup(config: Config) -> Setup:
    """Parse the options of a configuration.

    Raises:
        ConfigError: a value is invalid, or two do not fit together.
    """
    options: SimulationConfig = config.plugin(NAME)
    shared = config.run.colocate
    engine_gpus = options.engine_gpus or (options.trainer_gpus if shared else 8)
    if shared and engine_gpus != options.trainer_gpus:
        raise ConfigError(
            f"--engine-gpus {engine_gpus}: with --colocate engines run on the {options.trainer_gpus} GPUs of --trainer-gpus; leave it out"
        )
    if engine_gpus % options.engine_size:
        flag = "--trainer-gpus (shared with --colocate)" if shared else "--engine-gpus"
        raise ConfigError(f"{flag} {engine_gpus} is not a multiple of --engine-size {options.engine_size}")
    bound = 0 if config.run.schedule == "sync" else config.rollout.max_weight_staleness or 1
    warm_up = 1 + bound if options.warm_up is None else options.warm_up
    if config.rollout.num_rollout <= warm_up:
        raise ConfigError(
            f"--num-rollout {config.rollout.num_rollout} leaves no step after --warm-up-steps {warm_up}; give more steps"
        )
    longest = config.rollout.max_response_len
    lengths = Lengths(
        parse_distribution(options.lengths, "--lengths"),
        parse_distribution(options.prompt_lengths, "--prompt-lengths", of_prompts=True),
        longest,
        config.rollout.n_samples_per_prompt,
        options.correlation,
        config.train.seed,
    )
    speed = _speed(options, longest)
    return Setup(
        speed,
        lengths,
        engine_gpus // options.engine_size,
        options.trainer_gpus if shared else options.trainer_gpus + engine_gpus,
        engine_gpus,
        options.trainer_gpus,
        -(-longest // options.resolution),
        options.restart,
        _failure_seconds(options, speed, longest),
        warm_up,
        bound + 1 if bound else 0,
    )


def _failure_seconds(options: SimulationConfig, speed: Speed, longest: int) -> float | None:
    """Return the mean seconds between failures of an engine; None if none fails.

    Raises:
        ConfigError: engines would hardly ever be up for as long as the longest response takes, so the run would not end."""
    if options.failure_hours is None:
        return None
    seconds, response = 3600 * options.failure_hours, longest * speed.decode.base(1)
    if seconds < options.restart + response:
        raise ConfigError(
            f"--engine-failure-hours {options.failure_hours:g}: an engine that fails every {seconds:.3g} s makes no progress, because it takes "
            f"{options.restart:g} s to replace (--engine-restart-seconds) and the longest response takes {response:,.0f} s"
        )
    return seconds


def _speed(options: SimulationConfig, longest: int) -> Speed:
    """Compute the speeds that no option gives."""
    given = (options.prefill, options.train, options.sync)
    needed = options.decode_curve is None or None in given
    model = _model(options, needed)
    if model is None:
        prefill, train, sync = (value or 0.0 for value in given)
        assert options.decode_curve is not None  # otherwise the model is needed
        cache = float(options.cache_tokens or "inf")
        _check_cache(cache, longest, f"--cache-tokens {options.cache_tokens}: the cache of an engine")
        return Speed(
            read_curve(options.decode_curve), prefill, train, sync, 0.0, options.train_fixed, options.switch, cache
        )
    gpu, size = find_gpu(options.gpu), options.engine_size
    decode: Decode = Roofline(model, gpu, size, options.weight_bytes, options.bandwidth, options.decode_floor)
    if options.decode_curve is not None:
        decode = read_curve(options.decode_curve)
    forward = 2 * model.active
    passes = 3 + options.recompute + options.passes
    peak = options.trainer_gpus * gpu.flops * options.mfu
    weights = model.parameters * options.weight_bytes
    return Speed(
        decode,
        forward / (size * gpu.flops * PREFILL_FLOPS) if options.prefill is None else options.prefill,
        passes * forward / peak if options.train is None else options.train,
        SYNC_FIXED + weights / SYNC_BANDWIDTH if options.sync is None else options.sync,
        passes * 4 * model.attention_width / peak if options.train is None else 0.0,
        options.train_fixed,
        options.switch,
        _cache(options, model, weights, gpu.memory, longest),
    )


def _cache(options: SimulationConfig, model: ModelShape, weights: float, memory: float, longest: int) -> float:
    """Return the tokens that fit into the cache of one engine."""
    if options.cache_tokens is not None:
        _check_cache(options.cache_tokens, longest, f"--cache-tokens {options.cache_tokens}: the cache of an engine")
        return options.cache_tokens
    free = options.engine_size * memory * options.cache_memory - weights
    if free <= 0:
        raise ConfigError(
            f"an engine of {options.engine_size} {options.gpu} has {options.engine_size * memory * options.cache_memory / 1e9:.0f} GB "
            f"(--engine-memory {options.cache_memory:g}), and its weights need {weights / 1e9:.0f} GB; raise --engine-size"
        )
    tokens = free / model.kv_bytes if model.kv_bytes else float("inf")
    _check_cache(
        tokens, longest, f"the cache of an engine of {options.engine_size} {options.gpu}", "; raise --engine-size"
    )
    return tokens


def _check_cache(tokens: float, longest: int, what: str, remedy: str = "") -> None:
    """Raise ConfigError if a cache cannot hold the longest response."""
    if tokens < longest:
        raise ConfigError(
            f"{what} holds {tokens:,.0f} tokens, and a response may have --rollout-max-response-len {longest:,}{remedy}"
        )


def _model(options: SimulationConfig, needed: bool) -> ModelShape | None:
    if options.model_config is not None:
        return read_shape(options.model_config)
    if options.parameters is not None:
        count = options.parameters
        return ModelShape(options.layers, count, 0.0, 1.0, options.kv_bytes, 0)
    if needed:
        raise ConfigError(
            "the speed of what? give --model-config FILE (a model's config.json) or --parameters N; or all of --decode-curve, "
            "--prefill-seconds-per-token, --train-seconds-per-token and --sync-seconds"
        )
    return None
