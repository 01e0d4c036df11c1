"""Self-check of the embedded engine: packed sequences, and tokens fed one at a time after cached prompts."""

from __future__ import annotations

import numpy as np
from torch import nn

from miles_embedded.engine.runner import Runner
from miles_embedded.model.self_check import check_scores

#: Tokens of the shortest cached prompt, and number of tokens fed after each prompt.
PROMPT, FED = 5, 3


def self_check(model: nn.Module) -> None:
    """Compare the engine's scores and decoded log-probabilities with those of plain forwards.

    Raises:
        CheckpointError: they differ by more than rounding, or the engine cannot run the model.
    """
    runner = Runner(model)
    check_scores(
        model,
        {
            "packed sequences are scored": lambda sequences: runner.score(sequences, 1.0),
            "tokens are generated": lambda sequences: _decode_scores(runner, sequences, [PROMPT] * len(sequences)),
            "tokens are generated after long prompts": lambda sequences: _decode_scores(
                runner, sequences, [_last_prompt(runner, sequence) for sequence in sequences]
            ),
        },
    )


def _last_prompt(runner: Runner, sequence: list[int]) -> int:
    """Return the longest prompt length whose fed tokens fit in the sequence and use the prompt's rotary frequencies."""
    end = min(len(sequence), runner.switch + 1) if runner.switch else len(sequence)
    return end - FED - 1


def _decode_scores(runner: Runner, sequences: list[list[int]], prompts: list[int]) -> list[np.ndarray]:
    """Feed ``FED`` tokens one at a time after cached prompts of these lengths; returns log p of every token after the first, [len - 1].
    Entries other than those predicted from fed tokens are NaN."""
    slots, _, _ = runner.prefixes([s[:n] for s, n in zip(sequences, prompts, strict=True)], set())
    rows = runner.cache.add_rows(slots.tolist())
    found = [np.full(len(s) - 1, np.nan, np.float32) for s in sequences]
    for step in range(FED):
        fed = [[s[n + step]] for s, n in zip(sequences, prompts, strict=True)]
        logits = runner.forward(rows, fed, set()).logits.float().log_softmax(-1).cpu()
        for i, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
            found[i][prompt + step] = logits[i, sequence[prompt + step + 1]].item()
    return found
