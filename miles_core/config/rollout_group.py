"""The options of generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles_core.plugin.options import option


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """How samples are generated."""

    batch_size: int = option(32, flag="--rollout-batch-size", help="prompts per rollout step", ge=1, le=100_000)
    n_samples_per_prompt: int = option(8, help="samples per prompt: one group", ge=1, le=100_000)
    num_rollout: int = option(100, help="total number of rollout steps", ge=0)
    temperature: float = option(1.0, flag="--rollout-temperature", help="sampling temperature", gt=0)
    top_p: float = option(
        1.0, flag="--rollout-top-p", help="nucleus: keep the most probable tokens up to this mass; 1 is off", gt=0, le=1
    )
    top_k: int = option(-1, flag="--rollout-top-k", help="keep the k most probable tokens; -1 is off", ge=-1)
    max_response_len: int = option(1024, flag="--rollout-max-response-len", help="maximum tokens in a response", ge=1)
    max_prompt_len: int | None = option(
        None, flag="--rollout-max-prompt-len", help="skip, and count, prompts with more tokens than this", ge=1
    )
    max_context_len: int | None = option(
        None,
        flag="--rollout-max-context-len",
        help="maximum tokens in prompt and response (default: the model's)",
        ge=1,
    )
    stop: tuple[str, ...] = option((), flag="--rollout-stop", help="strings that end a response", metavar="TEXT,...")
    stop_token_ids: tuple[int, ...] = option(
        (), flag="--rollout-stop-token-ids", help="token ids that end a response, in addition to the model's own", ge=0
    )
    over_sampling_batch_size: int | None = option(
        None, help="prompts requested at a time if groups may be filtered out (default: --rollout-batch-size)", ge=1
    )
    dynamic_sampling_filter_path: str | None = option(
        None, help="keep(args, group) -> bool; groups for which it returns False are replaced", metavar="FILE.py:FN"
    )
    partial_rollout: bool | None = option(
        None,
        help="continue unfinished responses with the new weights when a collection ends or weights change (default: "
        "with --schedule async)",
    )
    mask_offpolicy_in_partial_rollout: bool = option(
        False, help="train only on the tokens of such a response that the newest weights generated"
    )
    pause_generation_mode: Literal["abort", "retract", "in_place"] = option(
        "abort",
        help="how the engine pauses for new weights: abort returns partial responses, which are requested again; retract keeps the "
        "requests and recomputes their cache; in_place keeps the cache of the old weights",
    )
    max_weight_staleness: int | None = option(
        None,
        help="with --schedule async: maximum age of a sample, in weight versions, when it is trained on (default: 1)",
        ge=0,
        only_if="schedule == async",
    )
    stale_samples: Literal["drop", "train"] = option(
        "drop",
        help="how to handle groups that exceed that age: drop sends their prompts again, train trains on them",
        only_if="schedule == async",
    )
    custom_generate_function_path: str | None = option(
        None, help="async generate(args, sample, sampling_params) -> Sample or list of siblings", metavar="FILE.py:FN"
    )
    generate: str = option(
        "turn",
        flag="--generate",
        help="rollout function: turn generates one response to the prompt",
        choices=("turn", "*"),
        part="generate",
    )
    generate_key: str | None = option(
        None,
        help="metadata entry with the name of a prompt's rollout function, if it differs from --generate",
        metavar="KEY",
    )
    workers: int | None = option(
        None, flag="--rollout-workers", help="processes that generate and score groups (default: the driver)", ge=1
    )
    max_concurrent_samples: int | None = option(
        None,
        help="maximum number of samples that rollout functions generate at the same time (default: no limit)",
        ge=1,
    )
    full_vocab_logprobs: bool = option(
        False,
        help="log-probs over the full vocabulary on both sides even with top-p or top-k (biased)",
        only_if="rollout.top_p < 1 or rollout.top_k > 0",
    )
    max_running_requests: int = option(256, help="maximum number of sequences the engine decodes concurrently", ge=1)
    kv_cache_dtype: Literal["auto", "bfloat16", "float8_e4m3fn", "float8_e5m2"] = option(
        "auto", flag="--kv-cache-dtype", help="dtype of cached keys and values in the engine"
    )
    precision: str = option(
        "bf16",
        flag="--rollout-precision",
        help="number format of the engine's weights",
        choices=("bf16", "*"),
        part="format",
    )
