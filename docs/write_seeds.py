"""Plan every command line, flag, variable and YAML snippet of miles' documentation, and write docs/seeds.md: python docs/write_seeds.py

Each entry is planned in this process, with a tiny ``config.json`` of the model that the documentation names and the GPUs that it
assumes. Nothing is built, so the page says what a plan accepts and not how fast or how well a run trains.
"""

# ruff: noqa: E501 - the options as printed
from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from miles_core.config.load import load
from miles_core.errors import MilesError, PlanError
from miles_core.run.prepare import prepare
from miles_testing.tiny import tiny_tokenizer

PAGE = Path(__file__).with_name("seeds.md")
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "num_experts_per_tok": 2,
}
_QWEN = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "head_dim": 128,
    **_SIZES,
}
_LATENT = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
_GROUPS = {"n_routed_experts": 16, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_DEEPSEEK = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], **_LATENT, **_GROUPS, **_SIZES}
_DEEPSEEK |= {"num_nextn_predict_layers": 1}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
_DRAFT = {
    **_QWEN,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_experts": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
#: Path in the documentation -> config.json of the model that it stands for.
MODELS: dict[str, Mapping[str, object]] = {
    "/path/to/qwen3-30b-a3b-hf": _QWEN,
    "/path/to/deepseek-v3": _DEEPSEEK,
    "/path/to/target-model": _DEEPSEEK,
    "/path/to/draft-model": _DRAFT,
    "/your/draft/model/path": _DRAFT,
    "/root/Qwen3-30B-A3B-FP8": {**_QWEN, "quantization_config": _FP8},
    "/root/Qwen3-30B-A3B_torch_dist": _QWEN,
}
QWEN, DEEPSEEK = "--hf-checkpoint /path/to/qwen3-30b-a3b-hf", "--hf-checkpoint /path/to/deepseek-v3"
INT4 = f"{QWEN} --rollout-precision int4 --train-precision int4"
EAGLE = f"{DEEPSEEK} --sglang-speculative-algorithm EAGLE"


@dataclass(frozen=True)
class Entry:
    """One snippet of the documentation.

    Attributes:
        source: document and line.
        typed: the options as printed.
        context: options of the run that the document assumes around them.
        hardware: GPUs that the document assumes.
        variables: environment variables as printed.
        yaml: configuration file as printed.
        refused: words of the reason for which the plan has to refuse it; empty if it has to be accepted.
    """

    source: str
    typed: str = ""
    context: str = QWEN
    hardware: str = "8xH200"
    variables: Mapping[str, str] = field(default_factory=dict)
    yaml: str = ""
    refused: str = ""


ENTRIES = (
    Entry("troubleshooting: 13", "--fp8-recipe blockwise", variables={"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}),
    Entry("troubleshooting: 19", "--use-r3"),
    Entry("troubleshooting: 24", "--lr 5e-7"),
    Entry(
        "troubleshooting: 29", "--warmup-steps 100 --warmup-precision bf16", context=f"{QWEN} --fp8-recipe blockwise"
    ),
    Entry("troubleshooting: 41", "--fp8-format e4m3", context=f"{QWEN} --fp8-recipe blockwise"),
    Entry("troubleshooting: 46", "--fp8-dynamic-scaling", context=f"{QWEN} --fp8-recipe blockwise"),
    Entry("troubleshooting: 51", '--fp8-skip-layers "lm_head,embed"', context=f"{QWEN} --fp8-recipe blockwise"),
    Entry("troubleshooting: 69", "--use-tis --tis-threshold 0.9"),
    Entry(
        "troubleshooting: 29",
        "--warmup-steps 100 --warmup-precision bf16",
        context=f"{QWEN} --fp8-recipe blockwise --engine sglang --trainer megatron",
    ),
    Entry("troubleshooting: 74", "--verify-logprobs"),
    Entry("troubleshooting: 86", "--use-r3 --r3-buffer-size 1000"),
    Entry("troubleshooting: 91", "--deterministic-expert-routing"),
    Entry(
        "troubleshooting: 104",
        "--int4-group-size 256",
        context=INT4,
    ),
    Entry(
        "troubleshooting: 109",
        '--int4-skip-layers "lm_head,embed,layer_norm"',
        context=INT4,
    ),
    Entry("troubleshooting: 114", "--warmup-steps 100 --warmup-precision bf16", context=INT4),
    Entry("troubleshooting: 120", "--lr 2e-6", context=INT4),
    Entry("troubleshooting: 131", variables={"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}),
    Entry(
        "troubleshooting: 137",
        "--int4-group-size 128",
        context=INT4,
    ),
    Entry("troubleshooting: 150", "--spec-lookahead 3", context=DEEPSEEK),
    Entry("troubleshooting: 155", "--online-sft-interval 5", context=DEEPSEEK),
    Entry("troubleshooting: 160", "--draft-lr 1e-5", context=f"{DEEPSEEK} --online-sft-interval 5"),
    Entry("troubleshooting: 176", "--draft-ema-decay 0.99", context=f"{DEEPSEEK} --online-sft-interval 5"),
    Entry("troubleshooting: 181", "--reinit-draft-interval 1000", context=f"{DEEPSEEK} --online-sft-interval 5"),
    Entry("troubleshooting: 197", "--spec-lookahead 5", context=DEEPSEEK),
    Entry("troubleshooting: 202", "--profile-speculative", context=DEEPSEEK),
    Entry("troubleshooting: 220", "--use-zero-copy-sync"),
    Entry("troubleshooting: 225", "--sync-bucket-size 2147483648"),
    Entry("troubleshooting: 236", "--colocate"),
    Entry("troubleshooting: 241", "--async-weight-sync", refused="the engine does not generate while weights are sent"),
    Entry("troubleshooting: 254", "--aux-loss-coef 0.01"),
    Entry("troubleshooting: 259", "--moe-capacity-factor 1.25"),
    Entry("troubleshooting: 275", "--micro-batch-size 1"),
    Entry("troubleshooting: 280", "--offload-experts"),
    Entry(
        "troubleshooting: 270",
        "--expert-model-parallel-size 8",
        context=f"{QWEN} --runtime ray --actor-num-gpus-per-node 8 --rollout-num-gpus 8",
        hardware="2x8xH200",
    ),
    Entry("troubleshooting: 294", yaml="co_evolution:\n  strategy: alternating\n"),
    Entry("troubleshooting: 299", "--co-evolution-interval 20"),
    Entry("troubleshooting: 305", yaml="co_evolution:\n  population_size: 4\n"),
    Entry("troubleshooting: 313", "--log-level DEBUG", variables={"MILES_DEBUG": "1"}),
    Entry("troubleshooting: 329", "--profile --profile-dir /path/to/profile"),
    Entry(
        "reference: 16",
        "--advantage-estimator grpo --model-name qwen3-30b-a3b --hf-checkpoint /path/to/qwen3-30b-a3b-hf --rollout-batch-size 512 --n-samples-per-prompt 8",
        context="",
    ),
    Entry(
        "reference: 31",
        "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 2 --colocate",
    ),
    Entry(
        "reference: 36",
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --expert-model-parallel-size 4 # MoE expert parallelism",
        context=f"{QWEN} --actor-num-nodes 8 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --sequence-parallel",
        hardware="9x8xH200",
    ),
    Entry(
        "reference: 36",
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --expert-model-parallel-size 4 # MoE expert parallelism",
        context=f"{QWEN} --actor-num-nodes 8 --actor-num-gpus-per-node 8 --rollout-num-gpus 8",
        hardware="9x8xH200",
        refused="--sequence-parallel",
    ),
    Entry(
        "reference: 43",
        "--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3 --sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 4 --sglang-enable-draft-weights-cpu-backup",
        context=DEEPSEEK,
    ),
    Entry(
        "reference: 49",
        "--sglang-speculative-draft-model-path /your/draft/model/path",
        context=EAGLE,
    ),
    Entry("reference: 51", "--mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.2", context=DEEPSEEK),
    Entry("reference: 51", "--mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.2", context=EAGLE),
    Entry(
        "reference: 51",
        "--mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.2",
        context=f"{EAGLE} --sglang-speculative-draft-model-path /your/draft/model/path",
        refused="draft",
    ),
    Entry("reference: 83", "--custom-generate-function-path generate.py --custom-rm-path reward.py"),
    Entry("skill: 88", variables={"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    Entry(
        "skill: 93",
        "--actor-num-gpus-per-node 8 --rollout-num-gpus 8 --hf-checkpoint /path/to/deepseek-v3 --advantage-estimator grpo --tensor-model-parallel-size 8 --expert-model-parallel-size 4 --prompt-data /path/to/data.jsonl --num-rollout 3000",
        context="",
        refused="every expert has the same number of replicas",
        hardware="2x8xH200",
    ),
    Entry(
        "skill: 113",
        "--actor-num-gpus-per-node 8 --hf-checkpoint /path/to/target-model --sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3 --sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 4 --sglang-speculative-draft-model-path /path/to/draft-model --advantage-estimator grpo --prompt-data /path/to/data.jsonl",
        context="",
        hardware="2x8xH200",
    ),
    Entry("skill: 205", "--sglang-speculative-num-steps 2", context=EAGLE),
    Entry("skill: 206", "--sglang-enable-draft-weights-cpu-backup", context=EAGLE),
    Entry(
        "low precision: 48",
        "--hf-checkpoint /root/Qwen3-30B-A3B-FP8 --ref-load /root/Qwen3-30B-A3B_torch_dist",
        context="",
    ),
    Entry(
        "low precision: 58",
        "--transformer-impl transformer_engine --bf16 --fp8-format e4m3 --fp8-recipe blockwise --use-tis",
        refused="only the Megatron trainer",
    ),
    Entry(
        "low precision: 58",
        "--transformer-impl transformer_engine --bf16 --fp8-format e4m3 --fp8-recipe blockwise --use-tis",
        context=f"{QWEN} --trainer megatron",
    ),
    Entry(
        "low precision: 75",
        "--transformer-impl transformer_engine --bf16 --fp8-format e4m3 --fp8-recipe mxfp8",
        refused="only the Megatron trainer",
        hardware="8xB200",
    ),
    Entry(
        "low precision: 75",
        "--transformer-impl transformer_engine --bf16 --fp8-format e4m3 --fp8-recipe mxfp8",
        context=f"{QWEN} --trainer megatron",
        hardware="8xB200",
    ),
    Entry(
        "low precision: 77",
        "--sglang-fp8-gemm-backend triton --sglang-moe-runner-backend cutlass",
        context=f"{QWEN} --rollout-mxfp8 --train-mxfp8 --trainer megatron",
        hardware="8xB200",
    ),
    Entry(
        "low precision: 80",
        "--sglang-moe-a2a-backend deepep",
        context=f"{QWEN} --rollout-mxfp8 --train-mxfp8",
        hardware="8xB200",
        refused="no MXFP8",
    ),
    Entry("low precision: 67", "--use-rollout-routing-replay"),
    Entry("low precision: 28", "--rollout-mxfp8 --rollout-fp8", hardware="8xB200", refused="is given twice"),
    Entry("low precision: 29", "--train-mxfp8 --rollout-fp8", hardware="8xB200", refused="mxfp8"),
    Entry("low precision: 96", "--rollout-mxfp8 --train-mxfp8", hardware="B200"),
    Entry("low precision: 96", "--rollout-mxfp8 --train-mxfp8", hardware="H200", refused="gpu.sm"),
    Entry("low precision: 113", "--rollout-fp8", hardware="A100", refused="gpu.sm"),
    Entry("low precision: 14", hardware="MI300X"),
    Entry("low precision: 114", "--rollout-fp8", hardware="MI300X", refused="gpu.sm"),
    Entry("low precision: 14", hardware="MI325"),
    Entry("low precision: 114", "--rollout-fp8", hardware="MI325", refused="gpu.sm"),
    Entry("low precision: 14", hardware="MI350"),
    Entry("low precision: 114", "--rollout-fp8", hardware="MI350", refused="gpu.sm"),
    Entry("low precision: 14", hardware="MI355X"),
    Entry("low precision: 114", "--rollout-fp8", hardware="MI355X", refused="gpu.sm"),
)


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def write_models(directory: Path) -> None:
    """Write the models below a directory, at the paths of the documentation."""
    tokenizer = tiny_tokenizer()
    for path, config in MODELS.items():
        folder = directory / path.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        # a draft is compared with its policy by the size of the files
        embedding = np.zeros((512, int(str(config["hidden_size"]))), np.float16)
        tokenizer.save_pretrained(folder)
        save_file({"model.embed_tokens.weight": embedding}, folder / "model.safetensors")


def outcome(entry: Entry, directory: Path) -> tuple[str, str]:
    """Plan an entry; with the models of ``write_models`` below ``directory``; return ``works``, ``refused`` or ``fails``, and the reason or what the plan enabled."""
    words = shlex.split(f"{entry.context} {entry.typed}", comments=True)
    for path in MODELS:
        words = [str(directory / path.strip("/")) if word == path else word for word in words]
    if entry.yaml:
        file = directory / "run.yaml"
        file.write_text(entry.yaml, encoding="utf-8")
        words += ["--config", str(file)]
    try:
        with _variables(entry.variables):
            plan, _ = prepare(load(words), [f"hardware={entry.hardware}"])
    except MilesError as error:
        problems = error.problems if isinstance(error, PlanError) else ()
        reason = "; ".join(f"{p.who} {p.verb} {p.needs}: {p.because}" for p in problems) or str(error).split("\n\n")[0]
        reason = reason.replace(str(directory), "")
        return ("refused" if entry.refused and entry.refused in reason else "fails"), reason
    if entry.refused:
        return "fails", f"accepted, and it should have been refused: {entry.refused}"
    enabled = [p.name for p in plan.plugins if p.name != "embedded"]
    notes = [note for note in plan.advice if note.startswith("no effect")]
    return "works", "; ".join([", ".join(enabled), *notes] if enabled else notes)


def results() -> list[tuple[Entry, str, str]]:
    """Plan all entries: (entry, outcome, reason)."""
    with tempfile.TemporaryDirectory() as name:
        write_models(Path(name))
        return [(entry, *outcome(entry, Path(name))) for entry in ENTRIES]


def render(found: list[tuple[Entry, str, str]]) -> str:
    """Return the page."""
    counts = {word: sum(result == word for _, result, _ in found) for word in ("works", "refused", "fails")}
    rows = [f"| {e.source} | {_show(e)} | {_context(e)} | {result} | {_cell(reason)} |" for e, result, reason in found]
    return "\n".join(
        [
            "# Coming from the miles documentation",
            "",
            "Command lines, flags, variables and YAML snippets of the documents that this project re-imagines, as they print them, and what",
            "`miles plan` says to them here. Written by `python docs/write_seeds.py`. A refusal gives the plan's own reason. A plan does not",
            "measure: numbers are in [performance](performance.md).",
            "",
            "What the documents do not print is in the third column: the options of the run around a snippet, as far as its text implies them. A",
            "snippet is listed twice if the backend makes a difference: without `--engine` and `--trainer` the embedded ones are planned, unless",
            "an option selects others. `--sglang-...` selects SGLang (`--engine embedded --sglang-speculative-...` drafts on the embedded engine).",
            "Models are small stand-ins of the named family, with 16 heads and 16 experts, which divide by the printed parallel sizes. Therefore",
            "the plans say nothing about the memory of the real models.",
            "",
            f"{counts['works']} work, {counts['refused']} are refused with a reason, {counts['fails']} fail.",
            "",
            "| document: line | typed | in a run with | plan | plugins that take part, or the reason |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _show(entry: Entry) -> str:
    exports = [f"export {name}={value}" for name, value in entry.variables.items()]
    parts = [*exports, entry.typed.partition(" #")[0], " ".join(entry.yaml.split())]
    return " ".join(f"`{part}`" for part in parts if part)


def _context(entry: Entry) -> str:
    return ", ".join(filter(None, (f"`{entry.context}`" if entry.context else "", entry.hardware)))


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


if __name__ == "__main__":
    table = results()
    PAGE.write_text(render(table), encoding="utf-8")
    sys.exit(any(result == "fails" for _, result, _ in table))
