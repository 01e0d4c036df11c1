"""What flows: prompts, samples, batches, weight units.

A ``Sample`` is one response and everything recorded about it, a ``Batch`` many of them as flat columns, a ``Field`` a column
that a plugin adds, a ``Unit`` a few tensors of the weight export. Prompt files, chat templates and tokenizers are read here,
and how samples are shared out over ranks (``world``). Knows no run, no option and no plugin.

Importable from here is what plugins use of it; names are looked up when they are first used, so that a manifest imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.lookup import looked_up

if TYPE_CHECKING:
    from miles_core.data.batch import Batch as Batch, Ragged as Ragged, collate as collate
    from miles_core.data.field import SAMPLING_SUPPORT as SAMPLING_SUPPORT, Field as Field
    from miles_core.data.prompt_source import PromptSource as PromptSource, Row as Row
    from miles_core.data.renderer import CannotExtend as CannotExtend, Renderer as Renderer
    from miles_core.data.sample import Sample as Sample, Status as Status
    from miles_core.data.unit import Encoded as Encoded, Unit as Unit

__getattr__, __dir__ = looked_up(
    __name__,
    {
        "miles_core.data.batch": "Batch Ragged collate",
        "miles_core.data.field": "Field SAMPLING_SUPPORT",
        "miles_core.data.prompt_source": "PromptSource Row",
        "miles_core.data.renderer": "CannotExtend Renderer",
        "miles_core.data.sample": "Sample Status",
        "miles_core.data.unit": "Encoded Unit",
    },
)
__all__ = __dir__()
