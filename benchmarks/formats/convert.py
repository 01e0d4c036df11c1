"""Checkpoint conversion: rate and peak memory against model size, and bytes of whole models in each format.

A random BF16 checkpoint in Qwen3-MoE's layout is written in files of a quarter of its size; every conversion is a process
of its own, whose peak memory the system counts. Whole models are counted from their shapes, nothing is allocated. The
last line is one JSON object; ``--save`` also writes it to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Shape = tuple[int, int]
#: Prints the peak memory (KiB) of the process since it was started. Not ru_maxrss, which a process inherits from the one
#: that started it.
PEAK = "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0], file=sys.stderr)"

#: name -> layers, hidden, heads, key/value heads, head dimension, dense width, dense layers, experts, expert width,
#: shared experts' width, vocabulary, tied embeddings; "mla" replaces the attention by DeepSeek-V3's.
MODELS: dict[str, dict[str, Any]] = {
    "70B dense (Llama-3.3-70B)": {
        "layers": 80, "hidden": 8192, "heads": 64, "kv": 8, "dim": 128, "width": 28672, "vocab": 128256,
    },
    "235B MoE (Qwen3-235B-A22B)": {
        "layers": 94, "hidden": 4096, "heads": 64, "kv": 4, "dim": 128, "width": 0, "dense": 0, "experts": 128,
        "expert": 1536, "vocab": 151936,
    },
    "671B MoE (DeepSeek-V3)": {
        "layers": 61, "hidden": 7168, "heads": 128, "mla": True, "width": 18432, "dense": 3, "experts": 256,
        "expert": 2048, "shared": 2048, "vocab": 129280,
    },
    "0.6B dense (Qwen3-0.6B)": {
        "layers": 28, "hidden": 1024, "heads": 16, "kv": 8, "dim": 128, "width": 3072, "vocab": 151936, "tied": True,
    },
    "4B dense (Qwen3-4B)": {
        "layers": 36, "hidden": 2560, "heads": 32, "kv": 8, "dim": 128, "width": 9728, "vocab": 151936, "tied": True,
    },
    "30B MoE (Qwen3-30B-A3B)": {
        "layers": 48, "hidden": 2048, "heads": 32, "kv": 4, "dim": 128, "width": 0, "dense": 0, "experts": 128,
        "expert": 768, "vocab": 151936,
    },
}  # fmt: skip


def shapes(model: dict[str, Any]) -> Iterator[tuple[str, Shape, int]]:
    """(name, [N, K], how many such tensors) of every matrix; norms and biases are left out, they are below 0.01 %."""
    h, layers = model["hidden"], model["layers"]
    yield "model.embed_tokens.weight", (model["vocab"], h), 1
    if not model.get("tied"):
        yield "lm_head.weight", (model["vocab"], h), 1
    for name, shape in attention(model):
        yield f"model.layers.0.self_attn.{name}.weight", shape, layers
    dense = model.get("dense", layers)
    moe = layers - dense
    for prefix, width, count in (
        ("mlp", model["width"], dense),
        ("mlp.experts.0", model.get("expert", 0), moe * model.get("experts", 0)),
        ("mlp.shared_experts", model.get("shared", 0), moe),
    ):
        if width and count:
            for part, shape in (("gate_proj", (width, h)), ("up_proj", (width, h)), ("down_proj", (h, width))):
                yield f"model.layers.0.{prefix}.{part}.weight", shape, count
    if moe:
        yield "model.layers.0.mlp.gate.weight", (model["experts"], h), moe


def attention(model: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    """The matrices of one attention."""
    h, heads = model["hidden"], model["heads"]
    if model.get("mla"):  # DeepSeek-V3: low-rank queries and keys/values, 128 + 64 dimensions a head
        yield from (
            ("q_a_proj", (1536, h)), ("q_b_proj", (heads * 192, 1536)), ("kv_a_proj_with_mqa", (576, h)),
            ("kv_b_proj", (heads * 256, 512)), ("o_proj", (h, heads * 128)),
        )  # fmt: skip
        return
    q, kv = heads * model["dim"], model["kv"] * model["dim"]
    yield from (("q_proj", (q, h)), ("k_proj", (kv, h)), ("v_proj", (kv, h)), ("o_proj", (h, q)))


def whole_models(formats: dict[str, Any]) -> dict[str, dict[str, float]]:
    """model -> BF16 bytes (1e9) and BF16 bytes over the format's, for each label of ``formats`` (a codec)."""
    found: dict[str, dict[str, float]] = {}
    for name, model in MODELS.items():
        every = list(shapes(model))
        plain = sum(2 * n * k * count for _, (n, k), count in every)
        row = {"bf16_gb": round(plain / 1e9, 1)}
        for label, codec in formats.items():
            size = 0
            for tensor, shape, count in every:
                chosen = codec.selector(tensor, shape) and codec.format.refuse(shape) is None
                size += count * (codec.format.nbytes(shape) if chosen else 2 * shape[0] * shape[1])
            row[label] = round(plain / size, 2)
        found[name] = row
    return found


def write_checkpoint(directory: Path, size: float) -> int:
    """A random checkpoint of about ``size`` bytes in four files; returns its bytes."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    layer = {"self_attn.q_proj": (2048, 2048), "self_attn.o_proj": (2048, 2048)}
    for expert in range(8):
        layer |= {f"mlp.experts.{expert}.{p}_proj": (768, 2048) for p in ("gate", "up")}
        layer[f"mlp.experts.{expert}.down_proj"] = (2048, 768)
    each = sum(2 * n * k for n, k in layer.values())
    layers = max(4, round(size / each))
    home, total = {}, 0
    for part in range(4):
        tensors = {
            f"model.layers.{i}.{name}.weight": torch.randn(shape, dtype=torch.bfloat16)
            for i in range(part, layers, 4)
            for name, shape in layer.items()
        }
        file = f"model-{part + 1:05d}-of-00004.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        home |= dict.fromkeys(tensors, file)
        total += sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": home}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "dtype": "bfloat16"}))
    return total


def convert(source: Path, target: Path, to: str, workers: int) -> dict[str, float]:
    """One conversion in a process of its own."""
    code = f"import sys; from miles_core.cli.main import main; code = main(sys.argv[1:]); {PEAK}; sys.exit(code)"
    words = ["convert", "--to", to, "--model-dir", source, "--save-dir", target, "--json", "--workers", workers]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        sys.exit(f"conversion to {to} failed:\n{done.stderr}")
    said = json.loads(done.stdout.splitlines()[-1])
    return {
        "bf16_mb_per_s": round(max(said["bytes_before"], said["bytes_after"]) / said["seconds"] / 1e6, 1),
        "seconds": round(said["seconds"], 2),
        "process_seconds": round(time.perf_counter() - start, 2),
        "peak_memory_mb": round(int(done.stderr.split()[-1]) / 1024, 1),
        "bytes_ratio": round(said["bytes_before"] / said["bytes_after"], 3),
    }


def base_memory() -> float:
    """Peak memory (MB) of a process that only imports what a conversion needs."""
    code = f"import sys, miles_formats.convert.encode, miles_formats.options; {PEAK}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return round(int(out.stderr.split()[-1]) / 1024, 1)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--sizes", default="0.4,1.2", help="checkpoint sizes in GB (default: 0.4,1.2)")
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--formats", default="", help="names (default: every installed one)")
    arguments.add_argument("--directory", help="where checkpoints are written (default: the temporary directory)")
    arguments.add_argument("--save", action="store_true")
    given = arguments.parse_args()
    sys.path.insert(0, str(ROOT))
    from benchmarks.measure import hardware
    from miles_core.config.load import load
    from miles_formats.convert.installed import format_class, providers
    from miles_formats.options import codec_for

    names = [n for n in given.formats.split(",") if n] or sorted(providers())
    codecs = {n: codec_for(format_class(n), load(["--rollout-precision", n])) for n in names}
    measured: dict[str, Any] = {}
    for size in map(float, given.sizes.split(",")):
        with tempfile.TemporaryDirectory(dir=given.directory, prefix="miles-convert-") as temporary:
            work = Path(temporary)
            total = write_checkpoint(work / "bf16", size * 1e9)
            for name in names:
                for to, source in ((name, work / "bf16"), ("bf16", work / name)):
                    target = work / (to if to != "bf16" else f"{name}-back")
                    label = name if to != "bf16" else f"{name} to bf16"
                    row = {"gb": round(total / 1e9, 2), **convert(source, target, to, given.workers)}
                    measured.setdefault(label, []).append(row)
                    print(f"{label:<16} {row}", flush=True)
                shutil.rmtree(work / name)
                shutil.rmtree(work / f"{name}-back")
    result = {
        "benchmark": "convert",
        "date": date.today().isoformat(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
        ).stdout.strip(),
        "python": platform.python_version(),
        "hardware": hardware(),
        "load_average": round(os.getloadavg()[0], 1),
        "command": " ".join(["python", "benchmarks/formats/convert.py", *sys.argv[1:]]),
        "workers": given.workers,
        "import_memory_mb": base_memory(),
        "conversions": measured,
        "whole_models_bf16_over_format": whole_models(codecs),
    }
    if given.save:
        path = ROOT / "benchmarks" / "results" / f"convert-{result['date']}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
