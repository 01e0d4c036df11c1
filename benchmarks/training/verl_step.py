"""The side of verl in ``grpo_step.py``: its settings for the same model, prompts, reward and optimiser, with SGLang on one GPU.

verl runs its own ``verl.trainer.main_ppo`` with its FSDP2 trainer and its SGLang server; ``verl_turns.py`` holds it between two steps. It gets
what is fast on one GPU that holds both: no sleeping engine, no activation checkpointing, packed micro-batches, a fused AdamW, one update on all
samples, no KL term and no reference model; SGLang's attention and sampling kernels are those of the other sides. Where flash-attn is not
installed, ``verl_kernels.py`` provides the two kernels that verl takes from it. verl computes old log-probabilities in a phase of its own
(``old_log_prob``), which a run with ``algorithm.rollout_correction.bypass_mode`` leaves out; ``seconds_without_old_log_prob`` is the step
without it. verl 0.9.1 needs SGLang, Ray, hydra-core, tensordict, torchdata, TransferQueue, datasets and codetiming, and
that TRL cannot be imported: it asks new releases of TRL for a class that they no longer have.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import Reporter

#: Environment variable with the pipes of the worker's ``Reporter`` and the steps of a turn, as JSON.
TURNS = "MILES_VERL_TURNS"
#: Computes ``workload.odd`` from the text of a response. The end token is not counted, because it has no text.
REWARD = """
def odd(data_source, solution_str, ground_truth, extra_info=None):
    words = [word for word in solution_str.split() if word[1:].isdigit()]
    return sum(int(word[1:]) % 2 for word in words) / max(len(words), 1)
"""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
#: Most tokens of a prompt, in verl's words: 64 and some space.
PROMPT_TOKENS = 72


def work_with_verl(given: Any, reporter: Reporter, samples: int) -> None:
    """Run ``verl.trainer.main_ppo``, held between two steps. samples: of a prompt."""
    os.environ[TURNS] = json.dumps([reporter.pipes, given.steps_a_turn, given.uncounted])
    os.environ |= {"VERL_USE_EXTERNAL_MODULES": "benchmarks.training.verl_turns", "HYDRA_FULL_ERROR": "1"}
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        checkpoint = copy_checkpoint(Path(given.checkpoint), work / "model")
        os.chdir(work)
        sys.argv[1:] = [*settings(given, checkpoint, work, samples), *given.verl_settings]
        runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)


def copy_checkpoint(source: Path, target: Path) -> Path:
    """Link a checkpoint's weights and copy the rest, with the chat template and the tokens (a line break and the end of a turn) without
    which verl refuses every prompt of a Qwen model; return the copy."""
    from transformers import AutoTokenizer

    target.mkdir()
    for path in source.iterdir():
        (os.symlink if path.suffix == ".safetensors" else shutil.copyfile)(path, target / path.name)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens(["\n", "<|im_end|>"])
    tokenizer.save_pretrained(target)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return target


def settings(given: Any, checkpoint: Path, work: Path, samples: int) -> list[str]:
    """verl's settings for the step, as Hydra overrides."""
    import torch

    data, reward, rows = data_of(Path(given.prompts), work), work / "verl_reward.py", given.prompts_a_step * samples
    reward.write_text(REWARD)
    cuda = torch.cuda.is_available()
    words = f"""
        data.train_files={data} data.val_files={data} data.train_batch_size={given.prompts_a_step} data.max_prompt_length={PROMPT_TOKENS}
        data.max_response_length={given.tokens} data.dataloader_num_workers=0 data.shuffle=False data.seed=0
        actor_rollout_ref.model.path={checkpoint} actor_rollout_ref.model.enable_gradient_checkpointing=False
        actor_rollout_ref.model.external_lib=benchmarks.training.verl_kernels
        +actor_rollout_ref.model.override_config.attn_implementation=packed_rows
        actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.strategy=fsdp2
        actor_rollout_ref.actor.fsdp_config.reshard_after_forward=False
        actor_rollout_ref.actor.ppo_mini_batch_size={given.prompts_a_step} actor_rollout_ref.actor.use_dynamic_bsz=True
        actor_rollout_ref.actor.ppo_max_token_len_per_gpu={given.verl_batch} actor_rollout_ref.actor.optim.lr=1e-6
        actor_rollout_ref.actor.optim.weight_decay=0.0 actor_rollout_ref.actor.use_kl_loss=False
        actor_rollout_ref.actor.optim.override_optimizer_config={{fused:{cuda}}}
        actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n={samples} actor_rollout_ref.rollout.tensor_model_parallel_size=1
        actor_rollout_ref.rollout.gpu_memory_utilization=0.3 actor_rollout_ref.rollout.free_cache_engine=False
        actor_rollout_ref.rollout.max_num_seqs={rows} actor_rollout_ref.rollout.calculate_log_probs=True
        actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={2 * given.verl_batch}
        +actor_rollout_ref.rollout.engine_kwargs.sglang.enable_memory_saver=False
        +actor_rollout_ref.rollout.engine_kwargs.sglang.grammar_backend=none
        +actor_rollout_ref.rollout.engine_kwargs.sglang.sleep_on_idle=True
        algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
        reward.custom_reward_function.path={reward} reward.custom_reward_function.name=odd
        trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger=[file] trainer.val_before_train=False trainer.resume_mode=disable
        trainer.total_epochs=1000 trainer.total_training_steps={given.steps} trainer.default_local_dir={work / "checkpoints"}
        transfer_queue.backend.SimpleStorage.num_data_storage_units=2
        ray_kwargs.ray_init.num_cpus={max(os.cpu_count() or 1, 24)} +ray_kwargs.ray_init.include_dashboard=False
        """.split()
    sglang = {"attention_backend": "triton", "sampling_backend": "pytorch", "moe_runner_backend": "triton"}
    sglang |= {"cuda_graph_bs_decode": f"[{rows // 4},{rows}]", "disable_prefill_cuda_graph": "True"}
    sglang["max_total_tokens"] = str(rows * (given.tokens + PROMPT_TOKENS))
    if not cuda:
        sglang = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "max_total_tokens": "8192"}
        words += ["trainer.device=cpu", "+ray_kwargs.ray_init.num_gpus=1"]
    words += [f"+actor_rollout_ref.rollout.engine_kwargs.sglang.{name}={value}" for name, value in sglang.items()]
    return words


def data_of(prompts: Path, work: Path) -> Path:
    """Write the prompts as verl reads them."""
    rows = [
        {
            "data_source": "words",
            "prompt": [{"role": "user", "content": json.loads(line)["prompt"]}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number, line in enumerate(prompts.read_text().splitlines())
    ]
    path = work / "prompts-verl.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
