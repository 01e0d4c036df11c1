"""Compiles every kernel that takes ``OVERLAP`` for sm_90, on a machine with or without a GPU.

``python overlapping_kernels.py FOLDER`` writes ``NUMBER-KERNEL-on.ptx`` and ``NUMBER-KERNEL-off.ptx`` for each of ``CASES``. Triton's interpreter
would replace the kernels, so this needs a process without it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from miles_fp8.row_codes import store_codes

ENGINE, KERNELS, FP8 = "miles_embedded.engine", "miles_embedded.kernels", "miles_fp8"
APPEND = {"QUERIES": 1, "HEADS": 2, "DIM": 16, "VALUE_DIM": 16, "BLOCK": 32, "BLOCK_VALUE": 32}
HEADS = {
    "QUERIES": 1,
    "KV_HEADS": 1,
    "SHARED": 2,
    "DIM": 16,
    "VALUE_DIM": 16,
    "WINDOW": 0,
    "CHUNK": 0,
    "CAPPED": False,
    "FED": True,
}
HEAD_BLOCKS = {"BLOCK_HEADS": 16, "BLOCK_DIM": 16, "BLOCK_VALUE": 16, "BLOCK_KEYS": 32}
MERGE = {"QUERIES": 1, "VALUE_DIM": 128, "SINKS": True, "BLOCK_VALUE": 128, "AT_ONCE": 4}
GROUPED = {"BLOCK_ROWS": 16, "BLOCK_COLUMNS": 16, "BLOCK_INNER": 32}
NORM = {"DIM": 128, "BLOCK_ROWS": 1, "BLOCK_DIM": 128}
ROTATION = {"HALF": 16, "BLOCK_HEADS": 2, "BLOCK_HALF": 16, "BACKWARD": False}
CHOICE = {"K": 2, "NORMALIZED": True, "BLOCK": 16, "BLOCK_K": 2}
LINEAR = {"POWER_OF_TWO": False, "BIAS": True, "SPLITS": 2, "BLOCK_ROWS": 16, "BLOCK_COLUMNS": 64, "TILE": 128}
EXPERTS = {"BLOCK_ROWS": 16, "BLOCK_COLUMNS": 64, "TILE": 128}
DRAW_TYPES = {
    "*bf16": "logits",
    "*fp32": "temperatures",
    "*i64": "greedy keys prompt_lengths tokens lengths",
    "*fp64": "results",
    "i64": "start",
}
SPLIT_TYPES = {
    "*bf16": "q fed_keys fed_values prompt_keys prompt_values own_keys own_values",
    "*i64": "prompt_slots prompt_lengths own_lengths",
    "*fp32": "partial sums",
    "fp32": "scaling cap",
}
DIRECT_TYPES = SPLIT_TYPES | {"*bf16": SPLIT_TYPES["*bf16"] + " partial", "*fp32": "sums"}
MERGE_TYPES = {
    "*fp8e4nv": "first",
    "*fp32": "partial sums second",
    "*bf16": "sinks out",
    "*i64": "prompt_lengths own_lengths",
}
NORM_TYPES = {"*fp8e4nv": "first", "*bf16": "x weight out", "*fp32": "second", "fp32": "eps"}
ADD_NORM_TYPES = NORM_TYPES | {"*bf16": "x other weight total out"}
SUM_TYPES = {"*bf16": "x weights out", "*i64": "place"}
GROUPED_TYPES = {"*bf16": "x weight out", "*i64": "row_of", "*i32": "ends"}
GATE_TYPES = {"*fp8e4nv": "first", "*bf16": "gate up out", "*fp32": "second"}
ROWS_TYPES = {"*bf16": "x_ptr", "*fp8e4nv": "codes_ptr", "*fp32": "scales_ptr"}
CODES, NO_CODES = {"STORE": store_codes}, {"STORE": None}
LINEAR_TYPES = {"*fp8e4nv": "x codes", "*fp32": "x_scales scales partial", "*bf16": "bias out", "*i32": "tickets"}
FUSED_TYPES = {"*fp8e4nv": "codes", "*fp32": "scales partial", "*bf16": "x x_scales bias out", "*i32": "tickets"}
EXPERTS_TYPES = {"*fp8e4nv": "x codes", "*fp32": "x_scales scales", "*i64": "row_of", "*i32": "ends", "*bf16": "out"}
#: Module, kernel, its parameters by type (all others are i32), its constants.
CASES: list[tuple[str, str, dict[str, str], dict[str, Any]]] = [
    (f"{ENGINE}.attention_kernel", "_append_row", {"*bf16": "key value keys values", "*i64": "lengths"}, APPEND),
    (f"{ENGINE}.attention_kernel", "_attend_split", SPLIT_TYPES, HEADS | HEAD_BLOCKS | {"DIRECT": False}),
    (f"{ENGINE}.attention_kernel", "_attend_split", DIRECT_TYPES, HEADS | HEAD_BLOCKS | {"DIRECT": True}),
    (f"{ENGINE}.attention_kernel", "_merge_splits", MERGE_TYPES, MERGE | CODES),
    (f"{ENGINE}.attention_kernel", "_merge_splits", MERGE_TYPES, MERGE | NO_CODES),
    (f"{KERNELS}.draw", "_draw", DRAW_TYPES, {"BLOCK": 128, "BLOCKS": 2}),
    (f"{KERNELS}.experts", "_sort", {"*i64": "expert_of order place row_of", "*i32": "ends"}, {"K": 2, "BLOCK": 128}),
    (f"{KERNELS}.experts", "_sum_choices", SUM_TYPES, {"K": 2, "WEIGHTED": True, "BLOCK": 128}),
    (f"{KERNELS}.experts", "_sum_choices", SUM_TYPES, {"K": 2, "WEIGHTED": False, "BLOCK": 128}),
    (f"{KERNELS}.grouped", "_product", GROUPED_TYPES, GROUPED | {"GATED": True, "GATHERED": True}),
    (f"{KERNELS}.grouped", "_product", GROUPED_TYPES, GROUPED | {"GATED": False, "GATHERED": False}),
    (f"{KERNELS}.norm", "_forward", NORM_TYPES, NORM | {"UNIT": 16} | CODES),
    (f"{KERNELS}.norm", "_forward", NORM_TYPES, NORM | {"UNIT": 16} | NO_CODES),
    (f"{KERNELS}.norm", "_add_forward", ADD_NORM_TYPES, NORM | CODES),
    (f"{KERNELS}.norm", "_add_forward", ADD_NORM_TYPES, NORM | NO_CODES),
    (f"{KERNELS}.rotation", "_rotate", {"*bf16": "query key cosine sine query_out key_out"}, ROTATION),
    (f"{KERNELS}.route", "_choose", {"*bf16": "logits weights", "*i64": "given index"}, CHOICE | {"GIVEN": False}),
    (f"{KERNELS}.route", "_choose", {"*bf16": "logits weights", "*i64": "given index"}, CHOICE | {"GIVEN": True}),
    (f"{KERNELS}.swiglu", "_forward", GATE_TYPES, {"BLOCK": 128} | CODES),
    (f"{KERNELS}.swiglu", "_forward", GATE_TYPES, {"BLOCK": 128} | NO_CODES),
    (f"{FP8}.kernels", "_activation_codes", ROWS_TYPES, {"POWER_OF_TWO": False, "ROWS": 4, "TILE": 128}),
    (f"{FP8}.product_kernels", "_linear", LINEAR_TYPES, LINEAR | {"FUSED": False}),
    (f"{FP8}.product_kernels", "_linear", LINEAR_TYPES, LINEAR | {"FUSED": False, "SPLITS": 1, "BLOCK_ROWS": 64}),
    (f"{FP8}.product_kernels", "_linear", FUSED_TYPES, LINEAR | {"FUSED": True}),
    (f"{FP8}.product_kernels", "_experts", EXPERTS_TYPES, EXPERTS | {"GATED": True, "BLOCK_ROWS": 64}),
    (f"{FP8}.product_kernels", "_experts", EXPERTS_TYPES, EXPERTS | {"GATED": False}),
]


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> str:
    """Return the PTX of ``kernel`` for memory and sizes that are multiples of 16, which pipelined loops need."""
    names = kernel.arg_names
    typed = {name: kind for kind, listed in types.items() for name in listed.split()}
    unknown = (typed.keys() | constants.keys()) - set(names)
    assert not unknown, f"{kernel.__name__} has no parameters {unknown}"
    signature = {name: "constexpr" if name in constants else typed.get(name, "i32") for name in names}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    whole = [i for i, kind in enumerate(signature.values()) if kind not in ("constexpr", "fp32")]
    source = ASTSource(kernel, signature, fixed, {(i,): [["tt.divisibility", 16]] for i in whole})
    ptx: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_stages": 3}).asm["ptx"]
    return ptx


def main(folder: Path) -> None:
    for number, (module, name, types, constants) in enumerate(CASES):
        kernel = getattr(import_module(module), name)
        for word, value in {"on": True, "off": False}.items():
            text = compile_kernel(kernel, types, constants | {"OVERLAP": value})
            (folder / f"{number}-{module}.{name}-{word}.ptx").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
