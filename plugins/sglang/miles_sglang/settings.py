"""The settings of an SGLang engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_formats import Codec
from miles_formats.convert import Layout
from miles_sglang.responses import Translator
from miles_workers import Restarts
from miles_workers.transport import WeightNames


@dataclass(frozen=True)
class Served:
    """The form in which SGLang holds the weights, which a precision warm-up changes.

    Attributes:
        codec: codec of the weight updates.
        names: checks the names of the weights.
        described: the checkpoint's files without its weights.
        arguments: SGLang's arguments for this form.
    """

    codec: Codec
    names: WeightNames
    described: Layout | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


def _fixed(precision: str) -> Served:
    raise RuntimeError(f"this engine was built without a way to serve {precision} (Settings.served_in)")


@dataclass(frozen=True)
class Settings:
    """Everything that the engine needs in addition to the connection to SGLang.

    Attributes:
        translator: converts requests and responses.
        served: the form of the weights at the start.
        served_in: precision -> form of the weights, for a precision warm-up.
        weights_dir: directory for updates that SGLang reads from files.
        model_facts: facts from ``config.json`` of the served model.
        capabilities: engine capabilities under SGLang's options.
        bucket_bytes: maximum bytes of a bucket of weights.
        device: ``cuda`` if this run started SGLang on a GPU that this process can use: host weights are copied there first and SGLang
            copies them through CUDA IPC; empty if they are sent as bytes.
        separate_draft: SGLang drafts with a separate model, which updates must not change.
        over_http: updates are sent to running servers over HTTP instead of through files.
        allow_mismatch: continue if an update does not write all parameters.
        restarts: counts how often SGLang may be restarted after it died.
    """

    translator: Translator
    served: Served
    weights_dir: Path
    served_in: Callable[[str], Served] = _fixed
    model_facts: Mapping[str, object] = field(default_factory=dict)
    capabilities: frozenset[str] = frozenset()
    bucket_bytes: int = 512 << 20
    device: str = ""
    separate_draft: bool = False
    over_http: bool = False
    allow_mismatch: bool = False
    restarts: Restarts = field(default_factory=lambda: Restarts(0))
