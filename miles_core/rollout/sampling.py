"""Builds the sampling parameters of training rollouts and of evaluation from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.contracts.engine import Sampling

if TYPE_CHECKING:
    from miles_core.config.config import Config


def training_sampling(config: Config) -> Sampling:
    """Return the sampling parameters of training rollouts."""
    options = config.rollout
    return Sampling(
        max_new_tokens=options.max_response_len,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        stop=tuple(options.stop),
        stop_token_ids=tuple(options.stop_token_ids),
    )


def evaluation_sampling(config: Config) -> Sampling:
    """Return the sampling parameters of evaluation. An unset evaluation option takes the value used for training."""
    options, base = config.evaluation, training_sampling(config)

    def pick(value: float | int | None, default: float | int) -> float | int:
        return default if value is None else value

    return Sampling(
        max_new_tokens=int(pick(options.max_response_len, base.max_new_tokens)),
        temperature=pick(options.temperature, base.temperature),
        top_p=pick(options.top_p, base.top_p),
        top_k=int(pick(options.top_k, base.top_k)),
        stop=base.stop,
        stop_token_ids=base.stop_token_ids,
    )
