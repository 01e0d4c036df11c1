"""Per-token fields that samples carry beside their tokens.

A field is declared once (in a plugin's manifest, or here for core's own) and everything else follows from the
declaration: validation when a sample is finished, packing into batch columns, slicing, transport between
processes and checkpoints. No other part of the code lists fields by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Align = Literal["response", "token", "token-1", "sample"]


@dataclass(frozen=True)
class Field:
    """One column a sample may carry.

    Attributes:
        name: attribute in ``Sample.fields`` and column name in a batch.
        dtype: numpy dtype name, e.g. ``"float32"`` or ``"int32"``.
        align: what one row belongs to. ``response``: one row a response token. ``token``: one row a token.
            ``token-1``: row t belongs to token t as *input*, so the last token has none. ``sample``: one row in all.
        pad: the value of rows that do not exist (prompt rows of a response field, the last row of a token-1 field).
        shape: trailing shape of a row; ``None`` entries are free but equal within a batch, e.g. ``(None, None)``.
        ragged: rows are lists of different length (``shape`` must be empty).
        required: a finished sample without it is an error (else the column is absent or padded).
        label: what it is in a word or two, for people (a row of the mismatch budget); its name where empty.
    """

    name: str
    dtype: str
    align: Align
    pad: float | int = 0
    shape: tuple[int | None, ...] = ()
    ragged: bool = False
    required: bool = False
    label: str = ""

    def __post_init__(self) -> None:
        if self.ragged and self.shape:
            raise ValueError(f"field {self.name!r}: a ragged field has no trailing shape, got {self.shape}")


#: What every sample carries.
CORE_FIELDS = (
    Field("loss_mask", "float32", "response"),
    Field("rollout_log_probs", "float32", "response"),
)

#: Token ids the engine could have sampled at each response position (top-k, top-p); always contains the sampled one.
SAMPLING_SUPPORT = Field("sampling_support", "int32", "response", ragged=True, label="sampler truncation")

#: Token ids whose log-probabilities the forward pass returns at each response position next to the sampled token's
#: (``Output.candidate_log_probs``), [response_length, k]. A ``wrap_learn`` attaches them, for example a teacher's most probable tokens.
CANDIDATES = Field("candidates", "int32", "response", shape=(None,))
