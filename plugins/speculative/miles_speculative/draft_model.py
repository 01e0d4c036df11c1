"""A draft from a directory of its own: a small model of the same tokenizer, or an EAGLE head.

A small model stands in the policy as ``draft``, so that sync, checkpoints, formats and optimiser know its parameters, and keeps its keys and values
in the policy's cache, under layer numbers behind the policy's. It needs no hidden states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from miles_embedded import backbone, load_model, logits_of
from miles_speculative.draft import Draft
from miles_speculative.draft_files import is_eagle
from miles_speculative.eagle import Eagle, attach_eagle


class DraftModel(Draft):
    """A small model in the policy."""

    def __call__(self, tokens: Tensor, hidden: Tensor, positions: Tensor, call: Any) -> Tensor:
        """See ``Draft``; ``hidden`` is not looked at."""
        run: Any = backbone(self.module)
        out: Tensor = run(
            input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, call=call
        ).last_hidden_state[0]
        return out

    def logits(self, out: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab], by the small model's own head."""
        return logits_of(self.module, out)


def draft_on(policy: Any) -> Draft:
    """The draft that ``attach_model`` gave to ``policy``."""
    return Eagle(policy, policy.draft) if hasattr(policy.draft, "fc") else DraftModel(policy, policy.draft)


def attach_model(policy: Any, path: str | Path) -> Draft:
    """Give ``policy`` the draft in ``path``, in its own dtype and on its device."""
    if is_eagle(path):
        return attach_eagle(policy, path)
    like = next(policy.parameters())
    draft: Any = load_model(path, str(like.dtype).removeprefix("torch."), like.device)
    behind = len(backbone(policy).layers)  # type: ignore[arg-type]
    for module in draft.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx += behind
    policy.draft = draft
    return DraftModel(policy, draft)
