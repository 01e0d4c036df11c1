"""Adapters over a frozen INT4 base of which engine and trainer hold one copy, at the size of a GPU: memory per parameter, and time of a step.

A random mixture of experts with ``--billions`` billion parameters is written as INT4 codes (the random numbers of one layer, again for each
layer), and ``miles train`` takes ``--steps`` GRPO steps in this process. Its memory is compared with the plan's. A small model first takes two steps
with a shared INT4 base and with separate plain models of the same values: losses, gradient norms and merged exports must have equal bits.

    python benchmarks/scale/shared_base.py --billions 60 --steps 20 --directory DIR --save      # one GPU with 80 GB; 34 GB of disk
    python benchmarks/scale/shared_base.py --billions 100 --gpus 2 --directory DIR --save       # experts on two GPUs
    python benchmarks/scale/shared_base.py --tiny                                               # a rehearsal on a CPU, under a minute

The checkpoint takes .52 bytes per parameter on the disk, and is deleted at the end unless ``--keep`` is given. The last line of the output is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.measure import finish, installed, options

GROUP, VOCABULARY = 128, 32768
#: Hidden size, experts, their inner size, experts per token, heads, key/value heads and size of a head.
LARGE = {"hidden": 2048, "experts": 32, "inner": 3072, "chosen": 4, "heads": 32, "kv": 4, "head": 128}
TINY = {"hidden": 256, "experts": 8, "inner": 256, "chosen": 2, "heads": 4, "kv": 2, "head": 64}
PRECISION = {"train_precision": "int4", "rollout_precision": "int4"}
COMPARED = ("train/loss", "train/grad_norm", "train/lora_delta_norm")


def matrices(sizes: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Name in a layer -> shape of its quantised matrices."""
    hidden, inner, head = sizes["hidden"], sizes["inner"], sizes["head"]
    found = {
        "self_attn.q_proj": (sizes["heads"] * head, hidden),
        "self_attn.k_proj": (sizes["kv"] * head, hidden),
        "self_attn.v_proj": (sizes["kv"] * head, hidden),
        "self_attn.o_proj": (hidden, sizes["heads"] * head),
    }
    for expert in range(sizes["experts"]):
        found |= {f"mlp.experts.{expert}.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        found[f"mlp.experts.{expert}.down_proj"] = (hidden, inner)
    return found


def layer_tensors(sizes: dict[str, int], generator: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of one layer: random codes from -7 to 7, scales that give a row the norm 1, plain norms and a router."""
    import torch

    for name, (rows, columns) in matrices(sizes).items():
        low, high = (
            torch.randint(1, 16, (rows, columns // 2), dtype=torch.uint8, generator=generator) for _ in range(2)
        )
        yield f"{name}.weight_packed", (low | high << 4).view(torch.int32)
        # the standard deviation of these codes is 4.32
        scale = (0.5 + torch.rand(rows, columns // GROUP, generator=generator)) / (4.32 * math.sqrt(columns))
        yield f"{name}.weight_scale", scale.bfloat16()
        yield f"{name}.weight_shape", torch.tensor([rows, columns], dtype=torch.int32)
    hidden = sizes["hidden"]
    for name, width in (
        ("input_layernorm", hidden),
        ("post_attention_layernorm", hidden),
        ("self_attn.q_norm", sizes["head"]),
        ("self_attn.k_norm", sizes["head"]),
    ):
        yield f"{name}.weight", torch.ones(width, dtype=torch.bfloat16)
    router = torch.randn(sizes["experts"], hidden, generator=generator) / math.sqrt(hidden)
    yield "mlp.gate.weight", router.bfloat16()


def write_layers(directory: Path, tensors: Sequence[tuple[str, Any]], layers: int) -> dict[str, str]:
    """Write a safetensors file per layer, each with ``tensors``, whose bytes are converted once. Returns tensor name -> file."""
    import torch

    body = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy() for _, tensor in tensors]
    names: dict[str, str] = {}
    for layer in range(layers):
        file = f"layer-{layer}.safetensors"
        head, offset = {}, 0
        for (name, tensor), data in zip(tensors, body, strict=True):
            kind = {torch.int32: "I32", torch.bfloat16: "BF16"}[tensor.dtype]
            place = [offset, offset + data.nbytes]
            head[f"model.layers.{layer}.{name}"] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": place}
            offset += data.nbytes
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        with (directory / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.writelines(data.data for data in body)
        names |= dict.fromkeys(head, file)
    return names


def write_checkpoint(directory: Path, sizes: dict[str, int], layers: int) -> int:
    """Write the checkpoint: a file per layer, with the same numbers, and one for the rest. Returns the number of parameters."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    from miles_int4.format import Int4
    from miles_tools.demo.model import make_tokenizer

    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    names = write_layers(directory, list(layer_tensors(sizes, generator)), layers)
    hidden, tokenizer = sizes["hidden"], make_tokenizer()
    rest = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, hidden, generator=generator).bfloat16(),
        "lm_head.weight": (torch.randn(VOCABULARY, hidden, generator=generator) * 2 / math.sqrt(hidden)).bfloat16(),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    save_file(rest, directory / "rest.safetensors", metadata={"format": "pt"})
    names |= dict.fromkeys(rest, "rest.safetensors")
    index = {"metadata": {}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=sizes["inner"],
        moe_intermediate_size=sizes["inner"],
        num_hidden_layers=layers,
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv"],
        head_dim=sizes["head"],
        num_experts=sizes["experts"],
        num_experts_per_tok=sizes["chosen"],
        decoder_sparse_step=1,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
        quantization_config=Int4(GROUP).config(["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(layers))]),
    )
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return layers * layer_parameters(sizes) + sum(tensor.numel() for tensor in rest.values())


def layer_parameters(sizes: dict[str, int]) -> int:
    """Parameters of one layer."""
    plain = 2 * sizes["hidden"] + 2 * sizes["head"] + sizes["experts"] * sizes["hidden"]
    return plain + sum(rows * columns for rows, columns in matrices(sizes).values())


def flags(given: argparse.Namespace, checkpoint: Path, steps: int) -> dict[str, Any]:
    """The options of a run that both cases have in common."""
    return {
        "hf_checkpoint": checkpoint,
        "device": given.device,
        "dtype": "bfloat16",
        "num_rollout": steps,
        "rollout_batch_size": given.samples // 4,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": given.answer,
        "rollout_max_context_len": given.answer + 16,
        "max_tokens_per_gpu": 4096,
        "recompute_activations": True,
        "lora_rank": given.rank,
        "lora_base_gpus": given.gpus if "small" not in checkpoint.name else None,
        "lora_target_modules": given.targets,
        "lr": 1e-4,
        "save_rollouts": False,
        "log_level": "info",
    }


def compare(given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Two steps of a small model over a shared INT4 base, and over separate plain models of the same values."""
    import torch
    from safetensors.torch import load_file

    from miles_lora import base
    from miles_testing import toy_run

    write_checkpoint(directory / "small", TINY, 2)
    results = []
    for plugins, more in ((["lora", "int4"], PRECISION), (["lora"], {"lora_sync": "adapter"})):
        out = directory / plugins[-1]
        options = {**flags(given, directory / "small", 2), **more, "export_hf": out, "lr": 1e-2}
        with patch.object(base, "shares", base.shares if len(plugins) == 2 else lambda run: False):
            done = toy_run(plugins, **options)
        results.append(([[m[n] for n in COMPARED] for m in done.metrics], load_file(out / "model.safetensors")))
    (ours, mine), (theirs, its) = results
    return {
        "numbers": ours,
        "numbers_equal": ours == theirs,
        "export_equal": mine.keys() == its.keys() and all(torch.equal(t, its[n]) for n, t in mine.items()),
    }


def train(given: argparse.Namespace, checkpoint: Path, parameters: int) -> dict[str, Any]:
    """``--steps`` steps over the large base; memory per parameter next to the plan's."""
    import torch

    from miles_testing import toy_run

    if given.device == "cuda":
        torch.cuda.init()
        for gpu in range(given.gpus):
            torch.cuda.reset_peak_memory_stats(gpu)
    started = time.perf_counter()
    options = {**flags(given, checkpoint, given.steps), **PRECISION}
    done = toy_run(["lora", "int4"], **options)
    found: dict[str, Any] = {
        "seconds_in_all": round(time.perf_counter() - started, 1),
        "step_seconds": [round(m["time/step"], 2) for m in done.metrics],
        "step_seconds_median": round(statistics.median(m["time/step"] for m in done.metrics), 2),
        "grad_norm": [float(f"{m['train/grad_norm']:.4g}") for m in done.metrics],
        "gap_nats": max(m["mismatch/abs_log_prob"] for m in done.metrics),
        "sync_bytes": done.metrics[-1]["sync/bytes"],
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    models = [done.trainer.model, done.engine.model]
    own, planned = weight_bytes(models), planned_bytes(done.run, checkpoint, given.gpus)
    whole = planned_bytes(done.run, checkpoint, 1)["weights"]
    found |= {
        "weight_bytes": own,
        "bytes_per_parameter": round(own / parameters, 4),
        "planned_bytes_per_parameter": round(whole / parameters, 4),
        "weights_over_plan": round(own / whole - 1, 4),
        "planned": {name: round(value / 1e9, 3) for name, value in planned.items()},
    }
    if given.device == "cuda":
        peak = torch.cuda.max_memory_allocated()
        found |= {
            "gpu_peak_allocated_gb": round(peak / 1e9, 2),
            "gpu_peak_reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2),
            "gpu_held_allocated_gb": round(torch.cuda.memory_allocated() / 1e9, 2),
            "each_gpu_peak_allocated_gb": [
                round(torch.cuda.max_memory_allocated(gpu) / 1e9, 2) for gpu in range(given.gpus)
            ],
            "gpu_peak_per_parameter": round(peak / parameters, 4),
            "peak_over_plan": round((peak + planned["other"]) / planned["total"] - 1, 4),
            "reserved_over_plan": round(
                (torch.cuda.max_memory_reserved() + planned["other"]) / planned["total"] - 1, 4
            ),
        }
    return found


def weight_bytes(models: Sequence[Any]) -> int:
    """Bytes of all weights that these models hold, each memory once."""
    from miles_embedded import codes_of

    stored: dict[int, int] = {}
    for model in models:
        for parameter in model.parameters():
            codes = codes_of(parameter)
            for tensor in (parameter,) if codes is None else codes.tensors():
                stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(stored.values())


def planned_bytes(run: Any, checkpoint: Path, gpus: int) -> dict[str, float]:
    """The plan's bytes of the first of ``gpus`` GPUs: weights of trainer and engine, everything else by kind, and the total. The plan of a CPU run
    has no table of memory, so a GPU is assumed."""
    from miles_core.plugin import Fact, Facts
    from miles_lora.memory import usage

    config = json.loads((checkpoint / "config.json").read_text())
    facts = Facts(run.plan.facts).with_facts(
        [
            Fact(name="model.device", value="cuda", origin="assumed"),
            Fact(name="lora.base_gpus", value=gpus, origin="assumed"),
        ]
    )
    parts = [each.parts for each in usage(facts, config)]
    names = ("weights", "gradients", "optimizer", "activations", "cache", "other")
    return {name: sum(getattr(part, name) for part in parts) for name in names} | {"total": sum(p.total for p in parts)}


def main() -> None:
    """Parse the options, run both parts, print one JSON object."""
    import torch

    parser = options(__doc__)
    parser.add_argument("--billions", type=float, default=20.0, help="parameters of the base")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=32, help="samples per step, in groups of 4")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", default="all-linear", help="as --lora-target-modules")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpus", type=int, default=1, help="divide the experts among this many GPUs of one process")
    parser.add_argument("--directory", help="where the checkpoints are written; a temporary directory by default")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints")
    parser.add_argument("--no-compare", action="store_true", help="leave out the small model")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal with small sizes on a CPU")
    given = parser.parse_args()
    sizes = LARGE
    if given.tiny:
        given.device, given.billions, given.steps, given.samples, given.answer = "cpu", 0.03, 2, 8, 8
        sizes = TINY
    layers = max(1, round((given.billions * 1e9 - 2 * VOCABULARY * sizes["hidden"]) / layer_parameters(sizes)))
    torch.set_num_threads(given.threads)
    home = Path(given.directory or tempfile.mkdtemp(prefix="miles-shared-base-"))
    result: dict[str, Any] = {}
    try:
        started = time.perf_counter()
        parameters = write_checkpoint(home / "large", sizes, layers)
        result = {"parameters": parameters, "layers": layers, "write_seconds": round(time.perf_counter() - started, 1)}
        print(result, file=sys.stderr, flush=True)
        if not given.no_compare:
            result["small"] = compare(given, home)
            print(result["small"], file=sys.stderr, flush=True)
        result |= train(given, home / "large", parameters)
    finally:
        if not given.keep:
            for name in ("large", "small", "int4", "lora"):
                shutil.rmtree(home / name, ignore_errors=True)
    variant = f"{given.billions:g}b-{given.gpus}-gpus" if given.device == "cuda" else "cpu"
    finish("shared_base", result, given.save, lambda: installed("torch", "transformers", "miles-core"), variant)


if __name__ == "__main__":
    main()
