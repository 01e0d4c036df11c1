"""Whole runs of small random models that read images, and of hybrids: the gap between engine and trainer at every step.

A process for each side; engine and trainer are SGLang and the embedded one, which trains the tower too. SGLang may have other versions of
packages than the run (``--sglang-python-path``): version 0.5.17 pins Transformers 5.12.1, and these models need a newer one in the trainer.
A machine without torchvision, which SGLang imports and does not call here, gets the stand-in of the tests. ``--engine embedded`` shows what
the precision alone costs, and with ``--trainer megatron`` what Megatron-Core's hybrids add. The exit code is 1 if a run did not complete its
steps, or a mean gap is above ``--most``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.checkpoints import restore_interval, word_tokenizer
from benchmarks.measure import ROOT, finish, installed, options
from benchmarks.scale import checkout
from miles_embedded.testing.images import draw_image

VOCABULARY = 2048
SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = """{%- for message in messages -%}{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else %} {{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}{%- endfor -%}"""
REWARD = """
async def rm(args, sample):
    return sum(t % 2 for t in sample.tokens[-32:]) / 32
"""
_TEXT: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048},
    **{"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False},
}
_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_TOWER = {"depth": 4, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 512}
_DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_MAMBA = {"mamba_d_ssm": 1024, "mamba_d_head": 64, "mamba_n_heads": 16, "mamba_d_state": 64, "mamba_n_groups": 1}
_SSM = {"mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 4, "chunk_size": 64}
_EXPERTS = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
#: Side -> configuration class, its arguments; those of a vision model are of its language model and its tower.
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        {
            "text_config": {**_TEXT, "rope_parameters": _ROPE},
            "vision_config": {**_TOWER, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1, 3]},
        },
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {
            "text_config": {**_TEXT, "head_dim": 64, "rope_parameters": {**_ROPE, "mrope_interleaved": True}},
            "vision_config": {**_TOWER, "patch_size": 16, "deepstack_visual_indexes": [0, 1]},
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", {**_TEXT, **_DELTA, **_EXPERTS, "head_dim": 128}),
    "falcon_h1": ("FalconH1Config", {**_TEXT, **_MAMBA, "head_dim": 64}),
    "qwen3_5": ("Qwen3_5TextConfig", {**_TEXT, **_DELTA, "head_dim": 128}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **{name: value for name, value in {**_TEXT, **_SSM}.items() if name != "num_hidden_layers"},
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            **{"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
            "moe_shared_expert_intermediate_size": 256,
        },
    ),
    "lfm2": ("Lfm2Config", {**_TEXT, "layer_types": ["conv", "full_attention"] * 2}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **{**_TEXT, **_EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
            **{"use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        },
    ),
}
#: Sides with layers that keep a state between tokens.
HYBRIDS = ("qwen3_next", "qwen3_5", "nemotron_h", "falcon_h1", "lfm2", "lfm2_moe")


#: Metric of r3: share of tokens for which the trainer would choose other experts.
_DIFFER = "r3/tokens_differing"


def write_model(side: str, directory: Path, tiny: bool) -> None:
    """Save a random checkpoint with tokenizer, chat template and image processor."""
    import transformers

    kind, given = SIDES[side]
    words = VOCABULARY - len(SPECIAL)
    tokenizer = word_tokenizer(words)
    if "vision_config" in given:
        tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
        tokenizer.chat_template = TEMPLATE
        given = {**given, "tie_word_embeddings": False, **dict(zip(_IDS, range(words, VOCABULARY), strict=True))}
        patch = given["vision_config"]["patch_size"]
        side_pixels = 4 * patch if tiny else 16 * patch
        images = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "merge_size": 2}
        images["size"] = {"shortest_edge": side_pixels**2, "longest_edge": side_pixels**2}
        directory.mkdir(parents=True)
        (directory / "preprocessor_config.json").write_text(json.dumps(images), encoding="utf-8")
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**given)
    auto = transformers.AutoModelForImageTextToText if "vision_config" in given else transformers.AutoModelForCausalLM
    model: Any = auto.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # large enough for the images to matter
                parameter.normal_(std=1.0 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(directory)
    restore_interval(directory)
    tokenizer.save_pretrained(directory)


def write_prompts(side: str, place: Path) -> Path:
    """Write prompts of words; those of a vision model show one or two images."""
    draw = torch.Generator().manual_seed(2)
    rows: list[dict[str, Any]] = []
    for number, words in enumerate(torch.randint(2, VOCABULARY - len(SPECIAL), (64, 12), generator=draw).tolist()):
        text = " ".join(f"w{word}" for word in words)
        if "vision_config" not in SIDES[side][1]:
            rows.append({"prompt": text, "label": ""})
            continue
        parts: list[dict[str, Any]] = []
        for index in range(1 + number % 2):
            file = place / f"{number}-{index}.png"
            file.write_bytes(draw_image(2 * number + index, 120, 80 + 8 * (number % 5)))
            parts.append({"type": "image", "image": str(file)})
        parts.append({"type": "text", "text": text})
        rows.append({"prompt": [{"role": "user", "content": parts}], "label": ""})
    path = place / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def python_path(given: argparse.Namespace, scratch: Path) -> str:
    """Return ``--sglang-python-path``: the given one, and a stand-in where torchvision is missing."""
    paths = [given.sglang_python_path] if given.sglang_python_path else []
    if importlib.util.find_spec("torchvision") is None and not any((Path(p) / "torchvision").is_dir() for p in paths):
        stand_ins, made = ROOT / "tests" / "engines" / "stand_ins", scratch / "stand_ins"
        shutil.copytree(stand_ins / "torchvision", made / "torchvision", dirs_exist_ok=True)
        shutil.copy(stand_ins / "absent.py", made)
        paths.insert(0, str(made))
    return os.pathsep.join(paths) if given.sglang_python_path else ""


def flags_of(side: str, given: argparse.Namespace, place: Path, shadow: str) -> list[str]:
    """The command line of a run."""
    rows = 8 * given.prompts
    plugins = "tis,r3" if given.r3 and "moe_intermediate_size" in SIDES[side][1] else "tis"
    flags = f"""--hf-checkpoint {place / "model"} --save {place / "run"} --engine {given.engine} --trainer {given.trainer}
        --dtype {given.dtype} --device {given.device}
        --prompt-data {place / "prompts.jsonl"} --input-key prompt --label-key label --custom-rm-path {place / "reward.py"}:rm
        --rollout-batch-size {given.prompts} --n-samples-per-prompt 8 --rollout-max-response-len {given.tokens} --num-rollout {given.steps}
        --lr 1e-5 --max-running-requests {rows} --use-dynamic-batch-size --max-tokens-per-gpu 16384 --seed 0 --plugins {plugins}
        --rollout-max-context-len {given.tokens + 256} --verify-logprobs --verify-logprobs-tolerance 1 --save-interval {given.steps}"""
    if "vision_config" in SIDES[side][1]:
        flags += " --media --apply-chat-template --train-vision-tower"
    if given.engine == "sglang":
        flags += f" --sglang-max-total-tokens {max(4 * rows * (given.tokens + 256) // 8, 4096)}"
        if shadow:
            flags += f" --sglang-python-path {shadow}"
        if given.device == "cuda":
            attention = "torch_native" if side.startswith("lfm2") else "triton"  # SGLang refuses triton for LFM2
            flags += f""" --sglang-attention-backend {attention} --sglang-sampling-backend pytorch --sglang-moe-runner-backend triton
                --sglang-mem-fraction-static 0.6 --sglang-disable-prefill-cuda-graph"""
        if "vision_config" in SIDES[side][1] and given.device == "cuda":
            flags += " --sglang-mm-attention-backend sdpa"
        if side in HYBRIDS:
            flags += f" --sglang-max-mamba-cache-size {4 * rows}"
    return flags.split()


def measure(side: str, given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Run a side; what its steps said."""
    place = scratch / side
    command = [sys.executable, "-m", "miles_core", "train", *flags_of(side, given, place, python_path(given, scratch))]
    output = place / "output.txt"
    with output.open("w") as file:
        try:
            code = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=given.limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    path = place / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [row for row in rows if "mismatch/abs_log_prob" in row]
    late = steps[len(steps) // 2 :]
    found: dict[str, Any] = {
        **{"exit": code, "steps": len(steps)},
        "gap": [float(f"{row['mismatch/abs_log_prob']:.3g}") for row in steps],
        "largest gap": max((row["mismatch/abs_log_prob_max"] for row in steps), default=None),
        **({"tokens with other experts": max(each)} if (each := [r[_DIFFER] for r in steps if _DIFFER in r]) else {}),
        "rewards": [round(row["reward/mean"], 4) for row in steps],
        **{n: round(statistics.median(r[n] for r in late), 4) for n in ("time/step", "time/rollout") if late},
    }
    if code:
        log = place / "run" / "sglang" / "sglang.log"
        found["output"] = output.read_text(errors="replace")[-3000:]
        found["log"] = log.read_text(errors="replace")[-4000:] if log.exists() else ""
    print(f"{side}: {json.dumps(found)}", file=sys.stderr, flush=True)
    return found


def parse() -> argparse.Namespace:
    """The command line."""
    parser = options(__doc__)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--trainer", choices=("embedded", "megatron"), default="embedded")
    parser.add_argument("--sglang-python-path", default="", help="see miles train --help sglang-python-path")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    for name, default in (("steps", 20), ("tokens", 64), ("prompts", 8), ("jobs", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--limit", type=float, default=500, help="seconds of a run")
    parser.add_argument("--most", type=float, default=0.1, help="largest mean gap of a step, in nats")
    parser.add_argument("--r3", action="store_true", help="replay the routes of sides with experts")
    parser.add_argument("--tiny", action="store_true", help="images with four features")
    return parser.parse_args()


def main() -> int:
    given = parse()
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(given.jobs) as pool:
        scratch = Path(directory)
        (scratch / "metadata").mkdir()
        checkout.register(scratch / "metadata", ["sglang", "tis", "r3", "megatron"])
        for side in given.sides:  # one after the other: they draw from one generator
            (scratch / side).mkdir()
            write_model(side, scratch / side / "model", given.tiny)
            write_prompts(side, scratch / side)
            (scratch / side / "reward.py").write_text(REWARD)
        runs = {side: pool.submit(measure, side, given, scratch) for side in given.sides}
        found = {side: run.result() for side, run in runs.items()}
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    result = {
        "gpu": gpu,
        **{name: getattr(given, name) for name in ("engine", "trainer", "dtype", "steps", "r3")},
        "sides": found,
    }
    finish(
        "sglang_models",
        result,
        given.save,
        lambda: installed("torch", "transformers"),
        "-".join([given.engine, *([given.trainer] if given.trainer != "embedded" else [])]),
    )
    bad = [
        side for side, row in found.items() if row["exit"] or row["steps"] < given.steps or max(row["gap"]) > given.most
    ]
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
