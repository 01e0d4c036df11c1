"""The number formats in which SGLang computes: the table behind the manifest, the plan and the engine. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.plugin import Capability


@dataclass(frozen=True)
class Served:
    """How SGLang computes in one number format.

    Attributes:
        sm: compute capability x 10 of the first GPUs with SGLang's kernels.
        in_place: whether a running SGLang can load new weights.
        repacked: whether the plugin's code in SGLang (``repacking``) packs them again, so only a process of this run can load them.
        compiles: whether its kernels are compiled during the first request.
    """

    sm: int
    in_place: bool = False
    repacked: bool = False
    compiles: bool = False


#: Number format -> how SGLang computes in it.
FORMATS = {
    "fp8": Served(89, in_place=True),
    "int4": Served(80, in_place=True, repacked=True, compiles=True),
    "mxfp8": Served(100, compiles=True),
}
#: SGLang has no kernels for these formats on a CPU and emulates none. Only a process that this run started can be asked to quantise the
#: probes at the start of a run, and can be restarted.
_OWN_GPU = "not sglang.url and model.device != cpu"
CAPABILITIES = tuple(Capability(f"format:{name}", f"{_OWN_GPU} and gpu.sm >= {f.sm}") for name, f in FORMATS.items())


def loads_in_place(precision: str, ours: bool = True) -> bool:
    """Whether a running SGLang can load new weights of a precision: the name of a number format, or ``bf16`` (also "").

    Args:
        precision: see above.
        ours: SGLang is a process of this run.
    """
    if precision in ("", "bf16"):
        return True
    served = FORMATS.get(precision)
    return served is not None and served.in_place and (ours or not served.repacked)


def compiles(precision: str) -> bool:
    """Whether SGLang compiles the kernels of a number format during the first request, which takes minutes."""
    return precision in FORMATS and FORMATS[precision].compiles
