"""Additional per-token data of samples.

A field is declared once, in a plugin's manifest or, for core's fields, in this module. The declaration determines the validation of
finished samples, packing into batch columns, slicing, transport between processes, and checkpoints. No other module lists fields by
name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Align = Literal["response", "token", "token-1", "sample"]


@dataclass(frozen=True)
class Field:
    """One column that a sample may have.

    Attributes:
        name: attribute in ``Sample.fields`` and column name in a batch.
        dtype: numpy dtype name, e.g. ``"float32"`` or ``"int32"``.
        align: alignment of rows. ``response``: one row per response token. ``token``: one row per token. ``token-1``: row t belongs
            to token t as *input*, so the last token has no row. ``sample``: one row per sample.
        pad: value of padding rows (prompt rows of a response field, the last row of a token-1 field).
        shape: trailing shape of a row; ``None`` entries are arbitrary but equal within a batch, e.g. ``(None, None)``.
        ragged: rows are lists of different length (``shape`` must be empty).
        required: a finished sample without the field is an error (otherwise the column is absent or padded).
        newest: if several requests of a response report the row of a token, the last one counts: it was computed with the weights that
            generated the tokens after it. Otherwise the first one counts.
        label: short description for users (a row of the mismatch budget); defaults to the name.
    """

    name: str
    dtype: str
    align: Align
    pad: float | int = 0
    shape: tuple[int | None, ...] = ()
    ragged: bool = False
    required: bool = False
    label: str = ""
    newest: bool = False

    def __post_init__(self) -> None:
        if self.ragged and self.shape:
            raise ValueError(f"field {self.name!r}: a ragged field has no trailing shape, got {self.shape}")
        if self.align not in get_args(Align):
            raise ValueError(
                f"field {self.name!r}: align is {self.align!r}; expected one of {', '.join(get_args(Align))}"
            )


#: Fields that every sample has.
CORE_FIELDS = (Field("loss_mask", "float32", "response"), Field("rollout_log_probs", "float32", "response"))

#: Token ids the engine could have sampled at each response position (top-k, top-p); always contains the sampled one.
SAMPLING_SUPPORT = Field("sampling_support", "int32", "response", ragged=True, label="sampler truncation")

#: Token ids whose log-probabilities the forward pass returns at each response position next to the sampled token's
#: (``Output.candidate_log_probs``), [response_length, k]. A ``wrap_learn`` attaches them, for example a teacher's most probable tokens.
CANDIDATES = Field("candidates", "int32", "response", shape=(None,))
