"""The embedded engine's part of the self-check: packed sequences, and tokens fed one by one behind cached prompts."""

from __future__ import annotations

import numpy as np
from torch import nn

from miles_embedded.engine.runner import Runner
from miles_embedded.model.self_check import check_scores

#: Tokens of the shortest prompt that is cached, and the tokens that are fed behind each prompt.
PROMPT, FED = 5, 3


def self_check(model: nn.Module) -> None:
    """Compare scores and decodes of the engine with plain forwards.

    Raises:
        CheckpointError: they differ by more than rounding, or the model cannot be run in this way.
    """
    runner = Runner(model)
    check_scores(
        model,
        {
            "packed sequences are scored": lambda sequences: runner.score(sequences, 1.0),
            "tokens are generated": lambda sequences: _decoded(runner, sequences, [PROMPT] * len(sequences)),
            "tokens are generated behind long prompts": lambda sequences: _decoded(
                runner, sequences, [_last_prompt(runner, sequence) for sequence in sequences]
            ),
        },
    )


def _last_prompt(runner: Runner, sequence: list[int]) -> int:
    """Tokens of a prompt behind which the sequence ends; where rotary frequencies change at a length, it ends before."""
    end = min(len(sequence), runner.switch + 1) if runner.switch else len(sequence)
    return end - FED - 1


def _decoded(runner: Runner, sequences: list[list[int]], prompts: list[int]) -> list[np.ndarray]:
    """log p of every token after the first, [len - 1]; NaN but for those after each of ``FED`` tokens that are fed one by one behind cached
    prompts of these lengths."""
    slots, _, _ = runner.prefixes([s[:n] for s, n in zip(sequences, prompts, strict=True)], set())
    rows = runner.cache.add_rows(slots.tolist())
    found = [np.full(len(s) - 1, np.nan, np.float32) for s in sequences]
    for step in range(FED):
        fed = [[s[n + step]] for s, n in zip(sequences, prompts, strict=True)]
        logits = runner.forward(rows, fed, set()).logits.float().log_softmax(-1).cpu()
        for i, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
            found[i][prompt + step] = logits[i, sequence[prompt + step + 1]].item()
    return found
