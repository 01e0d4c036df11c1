r"""One GRPO step of miles against TRL's GRPOTrainer: same checkpoint, prompts, reward and machine, taking turns.

64 prompts x 8 samples, at most 16 new tokens, FP32, one optimiser step on all 512 samples, no KL term. Each side runs its
own real training loop in its own process and is held between two steps. A turn is some complete steps, the first of them not counted:
prompts, generation, reward, loss, backward, optimiser, and (miles) weight sync and metrics. The last line is one JSON object.

TRL is given its fastest settings here: FP32 without autocast, one micro-batch of 512, no gradient checkpointing, no
load-balancing loss (miles has none on either), the grouped expert kernel, no logging, no saving, data loading in process.

``--model DIR`` takes a real checkpoint instead of the random one: a chat model, asked for sums of two numbers through its own chat
template, ``--prompts-a-step 16`` of them on a small machine.

``--gpu dense`` (or ``moe``) is the same comparison on a GPU in BF16: a random model of ``sglang_engine.py``, 32 prompts of 64 tokens x 8
samples of 256 tokens. Both sides stay on the GPU while the other one works, and TRL generates with Transformers.

``--plugins`` and ``--also`` are further sides of miles, ``--flags`` go to all of them, and ``--no-trl`` leaves TRL out. ``times_bare`` is the median
over the turns of a side's seconds relative to those of miles without plugins, with its 95 % interval (order statistics; no distribution is
assumed). What routing replay costs, on a CPU, and with SGLang next to the embedded trainer:

    python benchmarks/training/grpo_step.py --no-trl --plugins r3 --turns 60 --steps-a-turn 1 --variant r3 --save
    python benchmarks/training/grpo_step.py --no-trl --gpu moe --plugins tis,r3 --turns 40 --steps-a-turn 1 --micro-batch 16384 --variant r3 --save \
        --flags "--plugins tis --engine sglang --rollout-max-context-len 328 --sglang-attention-backend triton --sglang-sampling-backend pytorch
            --sglang-moe-runner-backend triton --sglang-cuda-graph-bs-decode 64,256 --sglang-mem-fraction-static 0.2
            --sglang-max-total-tokens 100000 --sglang-sleep-on-idle"

and what emulated number formats cost:

    python benchmarks/training/grpo_step.py --no-trl --plugins --steps-a-turn 1 --variant formats --save \
        --also "--rollout-fp8 --emulate-precision" "--rollout-fp8 --train-fp8 --emulate-precision"
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    Reporter,
    Steps,
    Worker,
    alternate,
    finish,
    installed,
    median_interval,
    medians,
    options,
    spread,
)

PROMPTS, SAMPLES, TOKENS, LR = 64, 8, 16, 1e-6
#: The same on a GPU.
GPU_PROMPTS, GPU_TOKENS = 32, 256
#: Tokens in a micro-batch of miles, on a CPU and on a GPU.
MICRO_BATCH, GPU_MICRO_BATCH = 65536, 36000


def work_with_miles(given: argparse.Namespace, reporter: Reporter) -> None:
    """Run ``miles train``, with the worker's flags, held before each step. The device's queue is empty when a step's time is taken."""
    from benchmarks.training.workload import train_in_turns

    turn, count = Steps(reporter, given.steps_a_turn), given.prompts_a_step
    reporter.send(versions=installed("miles-core", "torch", "transformers"))

    def report(record: dict[str, Any], seconds: float, _: float) -> None:
        phases = {k.removeprefix("time/"): v for k, v in record.items() if k.startswith("time/") and k != "time/step"}
        gap = record["mismatch/abs_log_prob"]
        turn.report(seconds=seconds, length=record["rollout/length_mean"], gap=gap, **phases)

    flags = f"""--hf-checkpoint {given.checkpoint} --prompt-data {given.prompts} --input-key prompt --label-key label
        --custom-rm-path {Path(__file__).with_name("workload.py")}:{"rm_odd" if given.gpu else "rm"}
        --device {device_of(given)} --dtype {"bfloat16" if given.gpu else "float32"}
        --rollout-batch-size {count} --n-samples-per-prompt {SAMPLES} --num-rollout {given.steps}
        --rollout-max-response-len {GPU_TOKENS if given.gpu else TOKENS} --max-running-requests {count * SAMPLES} --lr {LR}
        --weight-decay 0 --adam-beta2 0.999 --clip-grad 1.0 --eps-clip 0.2 --loss-aggregation token_mean
        --use-dynamic-batch-size --max-tokens-per-gpu {given.micro_batch} --seed 0
        --log-level warning"""
    train_in_turns([*flags.split(), *given.worker_flags.split()], turn.wait, report, lambda: wait_for_device(given))


def trl_config(directory: str, given: argparse.Namespace, **changes: Any) -> Any:
    """TRL's fastest settings for the step; ``changes`` replace some of them."""
    from trl import GRPOConfig

    settings: dict[str, Any] = {
        "output_dir": directory,
        "per_device_train_batch_size": given.trl_batch,
        "gradient_accumulation_steps": given.prompts_a_step * SAMPLES // given.trl_batch,
        "num_generations": SAMPLES,
        "max_completion_length": GPU_TOKENS if given.gpu else TOKENS,
        "max_steps": given.steps,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "beta": 0.0,
        "num_iterations": 1,
        "epsilon": 0.2,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "router_aux_loss_coef": 0.0,
        "bf16": bool(given.gpu),
        "gradient_checkpointing": False,
        "use_cpu": device_of(given) == "cpu",
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
        "model_init_kwargs": {"dtype": "float32"}
        | ({} if given.model or given.gpu == "dense" else {"experts_implementation": given.trl_experts}),
    }
    return GRPOConfig(**settings | changes)


def time_method(owner: type, name: str, phase: str, phases: dict[str, float], given: argparse.Namespace) -> None:
    """Add the seconds of every call of a method to ``phases[phase]``."""
    inner = getattr(owner, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            wait_for_device(given)
            phases[phase] = phases.get(phase, 0.0) + time.perf_counter() - started

    setattr(owner, name, outer)


def work_with_trl(given: argparse.Namespace, reporter: Reporter) -> None:
    """Run ``GRPOTrainer.train``, held between two steps."""
    import pyarrow
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    from benchmarks.training.workload import letters, odd

    lengths: list[float] = []
    phases: dict[str, float] = {}
    turn = Steps(reporter, given.steps_a_turn)

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.append(statistics.fmean(map(len, completion_ids)))
        return [odd(ids) for ids in completion_ids] if given.gpu else [letters(text) for text in completions]

    class Held(TrainerCallback):
        started = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turn.wait()
            Held.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wait_for_device(given)
            seconds = time.perf_counter() - Held.started
            rest = {"other": seconds - sum(phases.values())}
            turn.report(seconds=seconds, length=lengths[-1], **phases, **rest)
            phases.clear()
            turn.wait()
            Held.started = time.perf_counter()

    time_method(GRPOTrainer, "_generate", "generate", phases, given)
    time_method(GRPOTrainer, "_compute_loss", "forward", phases, given)
    rows = [json.loads(line)["prompt"] for line in Path(given.prompts).read_text().splitlines()]
    with tempfile.TemporaryDirectory() as directory:
        config = trl_config(directory, given)
        trainer = GRPOTrainer(
            given.checkpoint,
            reward,
            args=config,
            train_dataset=Dataset(
                pyarrow.table({"prompt": rows}), fingerprint="prompts"
            ),  # else datasets pickles pyarrow
            processing_class=AutoTokenizer.from_pretrained(given.checkpoint, padding_side="left"),
            callbacks=[Held()],
        )
        reporter.send(versions=installed("trl", "torch", "transformers"))
        trainer.train()


def device_of(given: argparse.Namespace) -> str:
    """Return where both sides compute."""
    import torch

    return "cuda" if given.gpu and torch.cuda.is_available() else "cpu"


def wait_for_device(given: argparse.Namespace) -> None:
    """Wait until the GPU has computed everything, if there is one."""
    if device_of(given) == "cuda":
        import torch

        torch.cuda.synchronize()


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Take turns between TRL and miles, bare and with each set of plugins."""
    from benchmarks.training.workload import make_workload, questions_for, random_words

    with tempfile.TemporaryDirectory() as directory:
        if given.gpu:
            work = random_words(Path(directory), given.gpu)
        elif given.model:
            work = questions_for(Path(directory), Path(given.model))
        else:
            work = make_workload(Path(directory), given.shots)
        steps = (given.warm_up + given.turns) * (given.steps_a_turn + 1) + 1
        common = ["--checkpoint", str(work.checkpoint), "--prompts", str(work.prompt_file), "--steps", str(steps)]
        common += ["--steps-a-turn", str(given.steps_a_turn), "--prompts-a-step", str(given.prompts_a_step)]
        common += ["--model", given.model] if given.model else []
        common += ["--gpu", given.gpu] if given.gpu else []
        common += ["--micro-batch", str(given.micro_batch)]
        here = str(Path(__file__).resolve())
        flags = {"miles": "", **{f"miles {p}": f"--plugins {p}" for p in given.plugins}}
        flags |= {f"miles {more}": more for more in given.also}
        commands = {
            name: [sys.executable, here, "--worker", "miles", *common, f"--worker-flags={given.flags} {more}"]
            for name, more in flags.items()
        }
        if not given.no_trl:
            extra = ["--trl-experts", given.trl_experts, "--trl-batch", str(given.trl_batch)]
            commands["trl"] = [given.trl_python, here, "--worker", "trl", *common, *extra]
        workers = [Worker(name, command, given.threads) for name, command in commands.items()]
        try:
            reports = alternate(workers, given.turns, given.warm_up)
        finally:
            for worker in workers:
                worker.close()
        sides = {name: medians(r) | {"range": spread(r)} for name, r in reports.items()}
        found: dict[str, Any] = {
            "times_bare": {n: times(r, reports["miles"]) for n, r in reports.items() if n != "miles"}
        }
        if not given.no_trl:
            trl = sides["trl"]["seconds"]
            found["times_faster_than_trl"] = {n: round(trl / s["seconds"], 2) for n, s in sides.items() if n != "trl"}
        return {
            "workload": {
                "prompts": given.prompts_a_step,
                "model": Path(given.model).name if given.model else given.gpu or "random Qwen3-MoE",
                "samples": SAMPLES,
                "max_new_tokens": GPU_TOKENS if given.gpu else TOKENS,
                "prompt_tokens": 64 if given.gpu else round(statistics.fmean(len(p.encode()) for p in work.prompts), 1),
                "threads": given.threads,
                "turns": given.turns,
                "steps_a_turn": given.steps_a_turn,
                "flags": given.flags,
            },
            "sides": sides,
            **found,
            "worker_versions": {w.name: w.hello["versions"] for w in workers if w.name in ("miles", "trl")},
        }


def times(reports: Sequence[dict[str, float]], bare: Sequence[dict[str, float]]) -> list[float]:
    """Median of the ratios turn by turn, and its 95 % interval."""
    ratios = [own["seconds"] / other["seconds"] for own, other in zip(reports, bare, strict=True)]
    return [round(value, 4) for value in (statistics.median(ratios), *median_interval(ratios))]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=15, help="measured turns of each side")
    parser.add_argument("--warm-up", type=int, default=2, help="unmeasured turns of each side")
    parser.add_argument("--steps-a-turn", type=int, default=2, help="counted steps of a turn, after one that is not")
    plugins = ["r3,tis", "cpu_kernels", "cpu_kernels,r3,tis"]
    parser.add_argument("--plugins", nargs="*", default=plugins, help="plugin sets to measure beside the bare loop")
    parser.add_argument("--also", nargs="*", default=[], help="sets of further flags of miles train to measure")
    parser.add_argument("--flags", default="", help="flags of every side of miles")
    parser.add_argument("--no-trl", action="store_true", help="compare only sides of miles")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    parser.add_argument("--shots", type=int, default=0, help="worked examples before each prompt (about 9 tokens each)")
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has trl installed")
    parser.add_argument("--trl-experts", default="grouped_mm", help="Transformers' experts implementation for TRL")
    parser.add_argument("--trl-batch", type=int, default=0, help="TRL's micro-batch (default: all samples of a step)")
    parser.add_argument("--model", default="", help="a chat model's checkpoint instead of the random one")
    parser.add_argument("--gpu", choices=("dense", "moe", "tiny"), default="", help="a random BF16 model on a GPU")
    parser.add_argument("--prompts-a-step", type=int, default=0, help="prompts of a step (default: 64; on a GPU 32)")
    parser.add_argument(
        "--micro-batch", type=int, default=0, help="tokens in a micro-batch of miles (default: 65536; on a GPU 36000)"
    )
    for name in ("--worker", "--checkpoint", "--prompts", "--worker-flags"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.prompts_a_step = given.prompts_a_step or (GPU_PROMPTS if given.gpu else PROMPTS)
    given.micro_batch = given.micro_batch or (GPU_MICRO_BATCH if given.gpu else MICRO_BATCH)
    given.trl_batch = given.trl_batch or given.prompts_a_step * SAMPLES
    if given.worker == "miles":
        work_with_miles(given, Reporter())
    elif given.worker == "trl":
        work_with_trl(given, Reporter())
    else:
        result = compare(given)
        variant = "-".join(part for part in (given.variant, given.gpu) if part)
        finish("grpo_step", result, given.save, lambda: installed("miles-core"), variant)


if __name__ == "__main__":
    main()
