"""Data types of a run: prompts, samples, batches, weight units.

A ``Sample`` is one response with everything recorded about it, a ``Batch`` holds many samples as flat columns, a ``Field`` is a
column that a plugin adds, and a ``WeightUnit`` holds a few tensors of the weight export. This package also reads prompt files, chat
templates and tokenizers, and distributes samples over ranks (``world``). It does not depend on runs, plugins or (except for error
messages) options.

Plugins import what they use of it from here. Names are looked up when they are first used, so that a manifest imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.lookup import make_lazy_exports

if TYPE_CHECKING:
    from miles_core.data.batch import Batch as Batch, Ragged as Ragged, Unmasked as Unmasked, collate as collate
    from miles_core.data.field import CANDIDATES as CANDIDATES, Field as Field, SAMPLING_SUPPORT as SAMPLING_SUPPORT
    from miles_core.data.media import Media as Media
    from miles_core.data.media_reader import read_parts as read_parts
    from miles_core.data.parquet import ParquetFile as ParquetFile
    from miles_core.data.prompt_source import PromptSource as PromptSource, Row as Row
    from miles_core.data.prompts import Prompts as Prompts
    from miles_core.chat.renderer import CannotExtend as CannotExtend, Renderer as Renderer
    from miles_core.data.sample import Sample as Sample, Status as Status, number as number
    from miles_core.text import (
        describe_error as describe_error,
        valid_data as valid_data,
        valid_text as valid_text,
    )
    from miles_core.data.weight_unit import Encoded as Encoded, WeightUnit as WeightUnit

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "miles_core.data.batch": "Batch Ragged Unmasked collate",
        "miles_core.data.field": "CANDIDATES Field SAMPLING_SUPPORT",
        "miles_core.data.media": "Media",
        "miles_core.data.media_reader": "read_parts",
        "miles_core.data.parquet": "ParquetFile",
        "miles_core.data.prompt_source": "PromptSource Row",
        "miles_core.data.prompts": "Prompts",
        "miles_core.chat.renderer": "CannotExtend Renderer",
        "miles_core.data.sample": "Sample Status number",
        "miles_core.text": "describe_error valid_data valid_text",
        "miles_core.data.weight_unit": "Encoded WeightUnit",
    },
)
__all__ = __dir__()
