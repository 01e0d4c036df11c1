"""Seconds of a whole GRPO step of verl with SGLang, by phase: the model, prompts, reward and optimiser of ``sglang_step.py`` on one GPU.

verl runs its own ``verl.trainer.main_ppo`` with its FSDP2 trainer and its SGLang server. It gets what is fast on one GPU that holds both:
no sleeping engine, no activation checkpointing, packed micro-batches, a fused AdamW, one update on all samples, no KL term and no reference
model; SGLang's attention and sampling kernels are those of ``sglang_step.py``. Where flash-attn is not installed, ``verl_kernels.py`` provides the
two kernels that verl takes from it. verl computes old log-probabilities in a phase of its own (``old_log_prob``), which a run with
``algorithm.rollout_correction.bypass_mode`` leaves out; ``seconds_without_old_log_prob`` is the step without it. The first steps
(``--warm-up``), which compile, do not count. ``--miles`` also runs the step of miles with these engines. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.engine.checkpoints import make_model
from benchmarks.measure import commit, finish, installed, options
from benchmarks.training.sglang_step import measure as measure_miles
from benchmarks.training.sglang_step import workload

REWARD = """
def odd(data_source, solution_str, ground_truth, extra_info=None):
    words = [word for word in solution_str.split() if word[1:].isdigit()][-64:]
    return sum(int(word[1:]) % 2 for word in words) / max(len(words), 1)
"""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", choices=("dense", "moe", "tiny"), default="dense")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5, help="that count")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--miles", nargs="*", choices=("sglang", "embedded"), default=[], help="engines of miles")
    parser.add_argument("--also", nargs="*", default=[], help="further settings of verl, as NAME=VALUE")
    parser.add_argument("--log", type=Path, help="save verl's output here")
    given = parser.parse_args()
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    with tempfile.TemporaryDirectory() as directory:
        found = measure(given, Path(directory))
        print(f"verl: {json.dumps(found)}", file=sys.stderr, flush=True)
        result = {"model": given.model, "gpu": gpu, "commit": commit(), **found, "miles": {}}
        for engine in given.miles:
            save(given, result, quiet=True)  # what is measured stays if the next part fails
            result["miles"][engine] = miles(given, engine, Path(directory) / "model")
    save(given, result)


def save(given: Any, result: dict[str, Any], quiet: bool = False) -> None:
    """Write the result; ``quiet`` while parts are missing."""
    packages = ("verl", "torch", "transformers", "sglang", "ray")
    finish("verl_step", result, given.save, lambda: installed(*packages), given.model, quiet)


def add_tokens(checkpoint: Path) -> None:
    """Add the tokens without which verl refuses every prompt of a Qwen model: a line break and the end of a turn."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_tokens(["\n", "<|im_end|>"])
    tokenizer.save_pretrained(checkpoint)


def measure(given: Any, work: Path) -> dict[str, Any]:
    """Run verl; medians of its steps."""
    checkpoint, metrics = make_model(given.model, work / "model"), work / "steps.jsonl"
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    add_tokens(checkpoint)
    log = given.log or work / "verl.log"
    environment = os.environ | {
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        "HYDRA_FULL_ERROR": "1",
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings(given, checkpoint, work), *given.also]
    started = time.time()
    with log.open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=output, env=environment, cwd=work, check=False)
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    steps = [record["data"] for record in map(json.loads, lines) if "timing_s/step" in record["data"]]
    if done.returncode or len(steps) <= given.warm_up:
        raise SystemExit(
            f"verl ended with exit code {done.returncode} after {len(steps)} steps:\n{log.read_text()[-6000:]}"
        )
    counted = steps[given.warm_up :]
    phases = sorted(
        name for name in counted[0] if name.startswith(("timing_s/", "perf/throughput", "response_length/mean"))
    )
    medians = {name: round(statistics.median(step[name] for step in counted if name in step), 4) for name in phases}
    without = statistics.median(step["timing_s/step"] - step.get("timing_s/old_log_prob", 0.0) for step in counted)
    first = round(time.time() - started - sum(step["timing_s/step"] for step in steps), 1)
    return {
        "seconds": medians["timing_s/step"],
        "seconds_without_old_log_prob": round(without, 4),
        "all_seconds": [round(step["timing_s/step"], 4) for step in steps],
        "start_and_end_seconds": first,
        "medians": medians,
    }


def miles(given: Any, engine: str, checkpoint: Path) -> dict[str, Any]:
    """Run the step of ``sglang_step.py`` with an engine."""
    same = {"prompts": given.prompts, "tokens": given.tokens, "steps": given.steps, "max_tokens": 32768, "lr": 1e-6}
    return measure_miles(argparse.Namespace(engine=engine, sglang_log=None, **same), "tis", checkpoint)


def settings(given: Any, checkpoint: Path, work: Path) -> list[str]:
    """verl's settings for the step, as Hydra overrides."""
    data, reward = data_of(given, work), work / "verl_reward.py"
    reward.write_text(REWARD)
    samples, cuda = given.prompts * 8, torch.cuda.is_available()
    words = f"""
        data.train_files={data} data.val_files={data} data.train_batch_size={given.prompts} data.max_prompt_length=72
        data.max_response_length={given.tokens} data.dataloader_num_workers=0 data.shuffle=False data.seed=0
        actor_rollout_ref.model.path={checkpoint} actor_rollout_ref.model.enable_gradient_checkpointing=False
        actor_rollout_ref.model.external_lib=verl_kernels +actor_rollout_ref.model.override_config.attn_implementation=packed_rows
        actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.strategy=fsdp2
        actor_rollout_ref.actor.fsdp_config.reshard_after_forward=False
        actor_rollout_ref.actor.ppo_mini_batch_size={given.prompts} actor_rollout_ref.actor.use_dynamic_bsz=True
        actor_rollout_ref.actor.ppo_max_token_len_per_gpu={given.max_tokens} actor_rollout_ref.actor.optim.lr=1e-6
        actor_rollout_ref.actor.optim.weight_decay=0.0 actor_rollout_ref.actor.use_kl_loss=False
        actor_rollout_ref.actor.optim.override_optimizer_config={{fused:{cuda}}}
        actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.tensor_model_parallel_size=1
        actor_rollout_ref.rollout.gpu_memory_utilization=0.3 actor_rollout_ref.rollout.free_cache_engine=False
        actor_rollout_ref.rollout.max_num_seqs={samples} actor_rollout_ref.rollout.calculate_log_probs=True
        actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={2 * given.max_tokens}
        +actor_rollout_ref.rollout.engine_kwargs.sglang.enable_memory_saver=False
        +actor_rollout_ref.rollout.engine_kwargs.sglang.grammar_backend=none
        algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
        reward.custom_reward_function.path={reward} reward.custom_reward_function.name=odd
        trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger=[file] trainer.val_before_train=False trainer.resume_mode=disable
        trainer.total_epochs=1 trainer.total_training_steps={given.warm_up + given.steps} trainer.default_local_dir={work / "checkpoints"}
        transfer_queue.backend.SimpleStorage.num_data_storage_units=2
        ray_kwargs.ray_init.num_cpus={max(os.cpu_count() or 1, 24)} +ray_kwargs.ray_init.include_dashboard=False
        """.split()
    sglang = {"attention_backend": "triton", "sampling_backend": "pytorch", "moe_runner_backend": "triton"}
    sglang |= {"cuda_graph_bs_decode": f"[{samples // 4},{samples}]", "disable_prefill_cuda_graph": "True"}
    sglang["max_total_tokens"] = str(2 * samples * (given.tokens + 72))
    if not cuda:
        sglang = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "max_total_tokens": "8192"}
        words += ["trainer.device=cpu", "+ray_kwargs.ray_init.num_gpus=1"]
    words += [f"+actor_rollout_ref.rollout.engine_kwargs.sglang.{name}={value}" for name, value in sglang.items()]
    return words


def data_of(given: Any, work: Path) -> Path:
    """Write the prompts of ``sglang_step.py`` as verl reads them."""
    workload(work, given.prompts)
    texts = [json.loads(line)["prompt"] for line in (work / "prompts.jsonl").read_text().splitlines()]
    rows = [
        {
            "data_source": "words",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number, text in enumerate(texts)
    ]
    path = work / "prompts-verl.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    main()
