"""The number formats in which SGLang computes: the table behind the manifest, the plan and the engine. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.plugin import Capability


@dataclass(frozen=True)
class Served:
    """How SGLang computes in one number format.

    Attributes:
        sm: compute capability x 10 of the first GPUs with SGLang's kernels.
        in_place: whether a running SGLang can load new weights, because it stores them as sent. SGLang 0.5.17 repacks other formats after
            loading and cannot load new weights into the packed layout.
    """

    sm: int
    in_place: bool = False


#: Number format -> how SGLang computes in it.
FORMATS = {"fp8": Served(89, in_place=True), "int4": Served(80), "mxfp8": Served(100)}
#: SGLang has no kernels for these formats on a CPU and emulates none. Only a process that this run started can be asked to quantise the
#: probes at the start of a run, and can be restarted.
_OWN_GPU = "not sglang.url and model.device != cpu"
CAPABILITIES = tuple(Capability(f"format:{name}", f"{_OWN_GPU} and gpu.sm >= {f.sm}") for name, f in FORMATS.items())


def loads_in_place(precision: str) -> bool:
    """Whether a running SGLang can load new weights of a precision: the name of a number format, or ``bf16`` (also "")."""
    return precision in ("", "bf16") or (precision in FORMATS and FORMATS[precision].in_place)
