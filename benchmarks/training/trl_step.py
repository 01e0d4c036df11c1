"""The side of TRL in ``grpo_step.py``: ``GRPOTrainer`` with its fastest settings for the step, held between two steps."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Reporter, Steps, installed
from benchmarks.training.workload import LR, SAMPLES, device_of, letters, odd, release_memory, wait_for_device


def trl_config(directory: str, given: argparse.Namespace, **changes: Any) -> Any:
    """TRL's fastest settings for the step; ``changes`` replace some of them."""
    from trl import GRPOConfig

    settings: dict[str, Any] = {
        "output_dir": directory,
        "per_device_train_batch_size": given.trl_batch,
        "gradient_accumulation_steps": given.prompts_a_step * SAMPLES // given.trl_batch,
        "num_generations": SAMPLES,
        "max_completion_length": given.tokens,
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
        | (
            {} if given.model or given.gpu not in ("", "moe", "tiny") else {"experts_implementation": given.trl_experts}
        ),
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

    lengths: list[float] = []
    phases: dict[str, float] = {}
    turn = Steps(reporter, given.steps_a_turn, given.uncounted)

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
            release_memory(given, turn)
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
