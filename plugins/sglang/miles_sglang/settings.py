"""What an engine on top of SGLang is made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from miles_core.format import Codec
from miles_runtime import Restarts
from miles_sglang.responses import Translator
from miles_sglang.weight_names import WeightNames
from miles_tools.convert import Layout


@dataclass(frozen=True)
class Settings:
    """What the engine needs beside SGLang.

    Attributes:
        translator: of requests and responses.
        codec: of the weights that arrive.
        names: of the model's weights; ``described``: the rest of its checkpoint.
        weights_dir: where weights go that SGLang reads from files.
        model_facts: what ``config.json`` says of the model it serves.
        capabilities: that hold with the options SGLang was started with.
        bucket_bytes: at most, of weights that travel together.
        device: ``cuda`` where SGLang was started here on a GPU that this process sees too: weights from host memory go there, and
            SGLang copies them from there instead of out of a message; else empty.
        separate_draft: SGLang drafts with a model of its own, which updates must leave alone.
        allow_mismatch: go on where an update does not reach all parameters.
        restarts: how often SGLang may be started again when it died.
    """

    translator: Translator
    codec: Codec
    names: WeightNames
    weights_dir: Path
    described: Layout | None = None
    model_facts: Mapping[str, object] = field(default_factory=dict)
    capabilities: frozenset[str] = frozenset()
    bucket_bytes: int = 512 << 20
    device: str = ""
    separate_draft: bool = False
    allow_mismatch: bool = False
    restarts: Restarts = field(default_factory=lambda: Restarts(0))
