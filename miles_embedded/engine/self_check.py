"""Self-check of the embedded engine: packed sequences, and tokens fed one at a time after cached prompts."""

from __future__ import annotations

import numpy as np
from torch import nn

from miles_embedded.engine.runner import Runner
from miles_embedded.model.parts import decoder_layers
from miles_embedded.model.self_check import UNSCORED, check_scores
from miles_embedded.model.states import stateful_modules

#: Length of the short cached prompts, and number of tokens fed after each prompt: more if layers keep a state, because its errors
#: accumulate.
PROMPT, FED, FED_WITH_STATES = 5, 3, 8


def self_check(model: nn.Module) -> None:
    """Compare the engine's scores and decoded log-probabilities with those of plain forwards.

    Raises:
        CheckpointError: they differ by more than rounding, or the engine cannot run the model.
    """
    runner = Runner(model)
    stateful = any(True for layer in decoder_layers(model) for _ in stateful_modules(layer))
    fed = FED_WITH_STATES if stateful else FED
    check_scores(
        model,
        {
            "packed sequences are scored": lambda sequences: runner.score(sequences, 1.0),
            "tokens are generated": lambda sequences: _decode_scores(runner, sequences, [PROMPT] * len(sequences), fed),
            "tokens are generated after long prompts": lambda sequences: _decode_scores(
                runner, sequences, [_last_prompt(runner, sequence, fed) for sequence in sequences], fed
            ),
        },
    )


def _last_prompt(runner: Runner, sequence: list[int], fed: int) -> int:
    """Return the longest prompt length whose ``fed`` tokens fit in the sequence and use the prompt's rotary frequencies; at least 1."""
    end = min(len(sequence), runner.switch + 1) if runner.switch else len(sequence)
    return max(end - fed - 1, 1)


def _decode_scores(runner: Runner, sequences: list[list[int]], prompts: list[int], fed: int) -> list[np.ndarray]:
    """Feed up to ``fed`` tokens one at a time after cached prompts of these lengths, as far as the sequence reaches.

    Returns:
        log p of every token after the first, [len - 1]. Entries other than those predicted from fed tokens are ``UNSCORED``.
    """
    slots, _, _ = runner.prefixes([s[:n] for s, n in zip(sequences, prompts, strict=True)], set())
    rows = runner.cache.add_rows(slots.tolist())
    found = [np.full(len(s) - 1, UNSCORED) for s in sequences]
    for step in range(fed):
        going = [i for i, n in enumerate(prompts) if n + step + 1 < len(sequences[i])]
        tokens = [[sequences[i][prompts[i] + step]] for i in going]
        logits = runner.forward(rows[going], tokens, set()).logits.float().log_softmax(-1).cpu()
        for row, i in enumerate(going):
            at = prompts[i] + step
            found[i][at] = logits[row, sequences[i][at + 1]].item()
    return found
