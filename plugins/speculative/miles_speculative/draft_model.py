"""A draft from a separate directory: a small model with the same tokenizer, or an EAGLE head.

A small model becomes the policy's submodule ``draft``, so that weight updates, checkpoints, formats and the optimizer include its
parameters. It stores keys and values in the policy's cache under the layer indices after the policy's layers. It ignores hidden states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from miles_embedded import backbone, decoder_layers, load_model, logits_of, mask_for
from miles_speculative.draft import Draft
from miles_speculative.draft_files import is_eagle
from miles_speculative.eagle import Eagle, attach_eagle


class DraftModel(Draft):
    """A small model as the policy's submodule."""

    HIDDEN = False

    def __call__(self, tokens: Tensor, hidden: Tensor, positions: Tensor, call: Any) -> Tensor:
        """See ``Draft``; ignores ``hidden``."""
        run: Any = backbone(self.module)
        out: Tensor = run(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            attention_mask=mask_for(run),
            use_cache=False,
            call=call,
        ).last_hidden_state[0]
        return out

    def logits(self, out: Tensor) -> Tensor:
        """Compute [n, vocab] logits from [n, hidden] with the small model's output layer."""
        return logits_of(self.module, out)


def draft_on(policy: Any) -> Draft:
    """Return the draft that ``attach_model`` attached to ``policy``."""
    return Eagle(policy, policy.draft) if hasattr(policy.draft, "fc") else DraftModel(policy, policy.draft)


def attach_model(policy: Any, path: str | Path) -> Draft:
    """Load the draft in ``path`` and attach it to ``policy``, with the policy's dtype and device."""
    if is_eagle(path):
        return attach_eagle(policy, path)
    like = next(policy.parameters())
    draft: Any = load_model(path, str(like.dtype).removeprefix("torch."), like.device)
    behind = len(getattr(backbone(policy), "layers", None) or decoder_layers(policy))  # with additional layers
    for module in draft.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx += behind
    policy.draft = draft
    return DraftModel(policy, draft)
