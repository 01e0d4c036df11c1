"""Run a model's forward without data: on the meta device, where operations check and compute shapes only.

Some errors of a ``config.json`` do not show when the model is built: a missing entry that only the forward reads, rotary sections that do
not add up to the head's size, a router that chooses more experts than there are. A forward of a few tokens on the meta device finds them
before a run starts, in a fraction of a second for any model size.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from miles_core.errors import CheckpointError, first_line

NAME = "miles_shapes"
#: Tokens of the forward: more than any window of a test model, few enough for all others.
TOKENS = 8


def check_forward(model: nn.Module) -> None:
    """Run a forward of ``model``, whose parameters are on the meta device. The model keeps the attention and experts that it gets here.

    A forward that reads values of tensors cannot be checked; it is accepted.

    Raises:
        CheckpointError: the forward fails.
    """
    named: Any = model
    device = torch.device("meta")
    ids, mask = (torch.ones(1, TOKENS, dtype=torch.long, device=device) for _ in range(2))
    try:
        named.set_attn_implementation(NAME)
        named.set_experts_implementation(NAME)
        with torch.no_grad(), device:
            # with a mask given, Transformers does not read the positions to find packed sequences
            named.eval().float()(input_ids=ids, attention_mask=mask, use_cache=False)
    except NotImplementedError:
        return  # an operation whose result has a data-dependent shape
    except Exception as error:
        if isinstance(error, RuntimeError) and "meta" in str(error):
            return  # an operation that reads values, or a tensor that the model's code put on another device
        raise CheckpointError(
            f"the forward of {type(model).__name__} fails ({type(error).__name__}: {first_line(error)}; {_where(error)}): an entry of "
            "config.json that this code reads is missing or does not fit the others"
        ) from error


def _where(error: Exception) -> str:
    """Return the function, file and line of the model's own code in which the error occurred."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "modeling_" in frame.filename] or frames
    return f"in {own[-1].name}, {own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}"


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention function that computes shapes only: query [1, heads, rows, dim] -> [1, rows, heads, value dim]."""
    heads = query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    return (query @ key.transpose(-1, -2) @ value).transpose(1, 2).contiguous(), None


def make_mask(batch_size: int = 1, q_length: int = TOKENS, kv_length: int = TOKENS, **kwargs: Any) -> Tensor:
    """Mask function that returns a mask [batch, 1, queries, keys] without values."""
    return torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")


def experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts function that computes shapes only: [rows, hidden] and the choices [rows, k] -> [rows, hidden]."""
    return torch.empty_like(hidden_states)


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, make_mask)
ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
