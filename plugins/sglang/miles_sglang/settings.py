"""The settings of an SGLang engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from miles_formats import Codec
from miles_formats.convert import Layout
from miles_sglang.responses import Translator
from miles_sglang.weight_names import WeightNames
from miles_workers import Restarts


@dataclass(frozen=True)
class Settings:
    """Everything that the engine needs in addition to the connection to SGLang.

    Attributes:
        translator: converts requests and responses.
        codec: codec of the weight updates.
        names: checks the names of the weights.
        weights_dir: directory for updates that SGLang reads from files.
        described: the checkpoint's files without its weights.
        model_facts: facts from ``config.json`` of the served model.
        capabilities: engine capabilities under SGLang's options.
        bucket_bytes: maximum bytes of a bucket of weights.
        device: ``cuda`` if this run started SGLang on a GPU that this process can use: host weights are copied there first and SGLang
            copies them through CUDA IPC; empty if they are sent as bytes.
        separate_draft: SGLang drafts with a separate model, which updates must not change.
        allow_mismatch: continue if an update does not write all parameters.
        restarts: counts how often SGLang may be restarted after it died.
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
