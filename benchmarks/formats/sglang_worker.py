"""SGLang's side of ``sglang_interop.py``, in a process of its own; it needs no miles and may have another Python.

A scheduler that fails ends the process that started the engine, so an engine is never started in the script itself. The
job is a JSON file, and so is the answer. ``--build NAME`` only compiles one of SGLang's kernel modules.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    if sys.argv[1] == "--build":
        build(sys.argv[2])
    else:
        answer(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))


def answer(job: dict[str, Any], out: Path) -> None:
    """Start an engine as ``job`` says, ask it twice, and write what it said to ``out``.

    Args:
        job: ``options`` (arguments of the engine), ``prompts`` (token ids) and ``tokens`` (of each response).
        out: the answer: seconds, and ``greedy`` and ``sampled`` with token ids and log-probabilities a prompt.
    """
    import sglang
    import torch

    start = time.perf_counter()
    engine = sglang.Engine(**job["options"])
    found: dict[str, Any] = {
        "versions": {"sglang": sglang.__version__, "torch": torch.__version__},
        "device": device(torch),
        "start_seconds": round(time.perf_counter() - start, 1),
    }
    print("SGLang has started", file=sys.stderr, flush=True)
    try:
        short = {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True}
        start = time.perf_counter()
        engine.generate(input_ids=job["prompts"][:1], sampling_params=short)
        found["first_request_seconds"] = round(time.perf_counter() - start, 1)
        print(f"first request answered after {found['first_request_seconds']} s", file=sys.stderr, flush=True)
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            how = {"temperature": temperature, "max_new_tokens": job["tokens"], "ignore_eos": True}
            start = time.perf_counter()
            rows = engine.generate(input_ids=job["prompts"], sampling_params=how, return_logprob=True)
            found[f"{name}_seconds"] = round(time.perf_counter() - start, 2)
            found[name] = [response(row["meta_info"]) for row in rows]
        out.write_text(json.dumps(found), encoding="utf-8")
    finally:
        engine.shutdown()


def response(meta: dict[str, Any]) -> dict[str, list[Any]]:
    """Token ids and log-probabilities (full vocabulary, natural logarithm) of one response."""
    triples = meta["output_token_logprobs"]
    return {"tokens": [t[1] for t in triples], "log_probs": [t[0] for t in triples]}


def device(torch: Any) -> str:
    """The first GPU and its compute capability, or ``cpu``."""
    if not torch.cuda.is_available():
        return "cpu"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (sm_{major}{minor})"


def build(name: str) -> None:
    """Compile a kernel module that SGLang 0.5.17 compiles in the first request otherwise, and print the seconds.

    It is kept in ``~/.cache/tvm-ffi`` (``TVM_FFI_CACHE_DIR``), so every later engine finds it.
    """
    import torch
    from sglang.kernels.ops.moe.moe_wna16_marlin import _jit_moe_wna16_marlin_module
    from sglang.kernels.ops.quantization.gptq_marlin import _jit_gptq_marlin_module

    start = time.perf_counter()
    if name == "gptq_marlin":
        _jit_gptq_marlin_module(torch.bfloat16)
    elif name == "moe_wna16_marlin":
        _jit_moe_wna16_marlin_module(torch.bfloat16, False, False)  # no expert parallelism, no bias
    else:
        raise SystemExit(f"no kernel module {name!r}: gptq_marlin or moe_wna16_marlin")
    print(round(time.perf_counter() - start, 1))


if __name__ == "__main__":
    main()
