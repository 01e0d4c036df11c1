"""Describes what a simulation assumes: each number, and whether it was given, measured or computed."""

from __future__ import annotations

from miles_core.config.config import Config
from miles_planner.simulation.options import SimulationConfig
from miles_planner.simulation.setup import NAME, Setup

#: Batch size of the second point at which the seconds of a decode step are shown.
_BATCH = 64


def describe_setup(config: Config, setup: Setup) -> tuple[str, ...]:
    """Return one line about the lengths, and one for the speed of each part of the run."""
    options: SimulationConfig = config.plugin(NAME)
    chosen = {fact.name for fact in config.facts() if fact.chosen}

    def source(name: str) -> str:
        return "given" if f"{NAME}.{name}" in chosen else "default"

    def computed(name: str, how: str = "") -> str:
        return "given" if getattr(options, name) is not None else f"computed{how}"

    decode, one = setup.speed.decode, setup.speed.decode.base(1)
    measured = options.decode_curve is not None
    where = (
        f"measured, {options.decode_curve}" if measured else f"computed from the peak rates of {options.gpu.upper()}"
    )
    rate = f"{1 / setup.speed.train:,.0f} tokens/s" if setup.speed.train else "no seconds per token"
    cache = "unlimited" if setup.speed.cache == float("inf") else f"{setup.speed.cache:,.0f} tokens"
    return (
        f"lengths: responses {options.lengths} ({source('lengths')}), at most {config.rollout.max_response_len:,} tokens; "
        f"prompts {options.prompt_lengths} ({source('prompt_lengths')})",
        f"decoding of an engine: {1e3 * one:.1f} ms per step with one request, {1e3 * decode.base(_BATCH):.1f} with {_BATCH}, and "
        f"{1e6 * decode.per_token:.3g} ms for 1,000 tokens of context ({where}); cache {cache} ({computed('cache_tokens')})",
        f"training: {rate} ({computed('train', f', {options.mfu:g} of the peak')}); weight sync {setup.speed.sync:.1f} s ({computed('sync')})",
    )
