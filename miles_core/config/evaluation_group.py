"""The options of evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.plugin.options import option


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluation on held-out prompts during training. Unset sampling options default to those of the rollout."""

    interval: int | None = option(
        None,
        flag="--eval-interval",
        help="evaluate before the first and after every N rollout steps",
        ge=1,
        only_if="evaluation.prompt_data",
    )
    prompt_data: tuple[str, ...] = option(
        (),
        flag="--eval-prompt-data",
        help="held-out prompts: FILE or NAME=FILE",
        metavar="[NAME=]FILE,...",
        only_if="evaluation.interval",
    )
    prompts: tuple[str, ...] = option(
        (),
        flag="--eval-prompts",
        help="sources of held-out prompts, as for --prompts: one name for all data sets, or one per data set (default: file)",
        metavar="NAME,...",
        only_if="evaluation.prompt_data",
    )
    n_samples: int = option(
        1, flag="--n-samples-per-eval-prompt", help="samples per prompt", ge=1, only_if="evaluation.prompt_data"
    )
    temperature: float | None = option(
        None,
        flag="--eval-temperature",
        help="sampling temperature; 0 is greedy",
        ge=0,
        only_if="evaluation.prompt_data",
    )
    top_p: float | None = option(
        None, flag="--eval-top-p", help="nucleus", gt=0, le=1, only_if="evaluation.prompt_data"
    )
    top_k: int | None = option(
        None,
        flag="--eval-top-k",
        help="keep the k most probable tokens; -1 is off",
        ge=-1,
        only_if="evaluation.prompt_data",
    )
    max_response_len: int | None = option(
        None,
        flag="--eval-max-response-len",
        help="maximum tokens in a response",
        ge=1,
        only_if="evaluation.prompt_data",
    )
