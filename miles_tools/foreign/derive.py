"""Derives options from several options of another program: sizes in other units, the reward, and decisions that remain for the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miles_tools.foreign.translation import Translation

Values = Mapping[str, str]


def derive(found: Translation, values: Values, words: Sequence[str]) -> list[str]:
    """Complete a translated command line.

    Args:
        found: the translation; its notes are extended.
        values: options of the other program and their values as typed.
        words: the command line so far.
    """
    program = found.program
    complete = {
        "verl": _verl, "TRL": _trl, "prime-rl": _prime, "OpenRLHF": _openrlhf, "slime and miles": _slime
    }.get(program.name if program else "")  # fmt: skip
    return _pair_evaluation(found, complete(found, values, list(words))) if complete else list(words)


def _pair_evaluation(found: Translation, words: list[str]) -> list[str]:
    """Drop an evaluation without prompts or without an interval, which other programs allow."""
    prompts = {"--eval-prompt-data", "--eval-environments"} & set(words)
    if "--eval-interval" in words and not prompts:
        found.notes.append(
            "nothing names the held-out prompts: give --eval-prompt-data NAME=FILE with --eval-interval N"
        )
        return _without(words, "--eval-interval")
    if prompts and "--eval-interval" not in words:
        found.notes.append("nothing says when to evaluate: give --eval-interval N with the held-out prompts")
        return _without(words, *prompts)
    return words


def _place_kl(found: Translation, in_reward: bool, words: list[str]) -> list[str]:
    """Convert verl's coefficient of a KL in the reward to one of the loss, because group estimators support only the latter."""
    if "--kl-coef" not in words:
        return words
    coefficient = words[words.index("--kl-coef") + 1]
    words = _without(words, "--kl-coef")
    if not in_reward:
        return words
    estimator = words[words.index("--advantage-estimator") + 1] if "--advantage-estimator" in words else "grpo"
    if estimator.startswith(("reinforce", "ppo")):
        return [*words, "--kl-coef", coefficient]
    found.notes.append(f"{estimator} has the KL in the loss and not in the reward: --kl-loss-coef {coefficient}")
    return _with(words, "--kl-loss-coef", coefficient)


def _verl(found: Translation, values: Values, words: list[str]) -> list[str]:
    actor, rollout = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    mini = _number(values.get(f"{actor}ppo_mini_batch_size"))
    if mini:
        words = _with(words, "--global-batch-size", str(mini * (_number(values.get(f"{rollout}n")) or 1)))
    if values.get(f"{actor}use_kl_loss", "").lower() == "false":
        words = _without(words, "--kl-loss-coef", "--kl-loss-type")
    words = _place_kl(found, values.get("algorithm.use_kl_in_reward", "").lower() == "true", words)
    if values.get(f"{actor}use_dynamic_bsz", "").lower() == "true":
        words = _without(words, "--micro-batch-size")
    elif "--micro-batch-size" in words:
        words = _without(words, "--max-tokens-per-gpu")
    if any(name.startswith(f"{actor}megatron.") for name in values) or "megatron" in values.get(f"{actor}strategy", ""):
        words = _with(words, "--trainer", "megatron")
    for place in ("custom_reward_function", "reward.custom_reward_function"):
        if path := values.get(f"{place}.path"):
            name = values.get(f"{place}.name")
            words = _with(words, "--custom-rm-path", f"{path}:{name}" if name else path)
    if "trainer.nnodes" in values or "trainer.n_gpus_per_node" in values:
        words += ["--colocate"] if "--colocate" not in words else []
        found.notes.append("verl's engines share the trainer's GPUs: --colocate")
    words = _add(words, "--input-key", "prompt")
    if not {"--rm-type", "--custom-rm-path"} & set(words):
        words += ["--rm-type", "math"]
        found.notes.append("verl chooses the reward by the data set: --rm-type math is for answers of mathematics")
    if "--label-key" not in words:
        words += ["--label-key", "reward_model.ground_truth"]
        found.notes.append("verl's files have the answer in reward_model: --label-key reward_model.ground_truth")
    _note_epochs(found, "trainer.total_epochs", values, words)
    return words


def _trl(found: Translation, values: Values, words: list[str]) -> list[str]:
    group = _number(values.get("num_generations")) or 8
    device, accumulated = values.get("per_device_train_batch_size"), values.get("gradient_accumulation_steps")
    steps = values.get("steps_per_generation") or accumulated
    samples = _number(values.get("generation_batch_size"))
    if samples is None and (device or steps):
        samples = (_number(device) or 8) * (_number(steps) or 1) * (_number(values.get("num_processes")) or 1)
        processes = "" if values.get("num_processes") else " on one GPU; multiply it by the number of GPUs"
        found.notes.append(f"a step has {samples} samples{processes}: --rollout-batch-size counts prompts")
    if samples:
        words = _with(words, "--rollout-batch-size", str(max(samples // group, 1)))
        words = _with(words, "--n-samples-per-prompt", str(group))
    if size := _number(device):
        words = _with(words, "--micro-batch-size", str(size))
    updates = (_number(values.get("steps_per_generation")) or 1) // (_number(accumulated) or 1)
    words = (
        _with(words, "--num-steps-per-rollout", str(updates))
        if updates > 1
        else _without(words, "--num-steps-per-rollout")
    )
    if not {"--rm-type", "--custom-rm-path"} & set(words):
        words = _judge_by_math(found, words, "solution")
    if "lora_r" in values and values.get("use_peft", "true").lower() in ("false", "0"):
        words = _without(words, "--lora-rank", "--lora-alpha", "--lora-dropout", "--lora-target-modules")
    if "use_peft" in values and "--lora-rank" not in words and values["use_peft"].lower() not in ("false", "0"):
        words += ["--lora-rank", "16"]
    _note_epochs(found, "num_train_epochs", values, words)
    return words


def _prime(found: Translation, values: Values, words: list[str]) -> list[str]:
    group = _number(values.get("orchestrator.group_size") or values.get("orchestrator.rollouts_per_example")) or 1
    if samples := _number(values.get("orchestrator.batch_size")):
        words = _with(words, "--rollout-batch-size", str(max(samples // group, 1)))
    if "--max-weight-staleness" in words:
        words = _with(words, "--schedule", "async")
    if any(name.startswith(("deployment.num", "inference.")) for name in values):
        words = _with(_with(_add(words, "--runtime", "ray"), "--engine", "sglang"), "--trainer", "embedded")
    if "--prompt-data" not in words and "--environments" not in words:
        task = values.get("orchestrator.train.source[].env.taskset.id", "the task")
        words += ["--prompt-data", "prompts.jsonl", "--rm-type", "math", "--label-key", "answer"]
        found.notes.append(
            f"tasks come from {task}: give a file with its prompts in place of prompts.jsonl and their reward, or --environments NAME"
        )
    return words


def _openrlhf(found: Translation, values: Values, words: list[str]) -> list[str]:
    if {"algo.kl.use_loss", "use_kl_loss"} & values.keys():
        words = ["--kl-loss-coef" if word == "--kl-coef" else word for word in words]
    else:
        words = _without(words, "--kl-loss-type")
    words = _place_kl(found, True, _add(words, "--advantage-estimator", "ppo"))  # OpenRLHF's default
    if "--use-dynamic-batch-size" in words:
        words = _without(words, "--micro-batch-size")
    if "async" in words:  # only the models of the trainer share GPUs then
        words = _without(words, "--colocate")
    engines = _number(values.get("vllm.num_engines") or values.get("vllm_num_engines"))
    if engines and "--colocate" not in words:
        size = _number(values.get("vllm.tensor_parallel_size") or values.get("vllm_tensor_parallel_size")) or 1
        words = _with(words, "--rollout-num-gpus", str(engines * size))
    if engines:
        words = _add(words, "--engine", "vllm")
    if {"logger.wandb.key", "use_wandb"} & values.keys() and "--use-wandb" not in words:
        words = [*words, "--use-wandb"]
    if "--custom-rm-path" in words:
        found.notes.append("a reward function is called as f(args, sample) here")
    elif "--rm-type" not in words:
        words = _judge_by_math(found, words, "label")
    for name in ("train.num_episodes", "num_episodes"):
        _note_epochs(found, name, values, words)
    return words


def _slime(found: Translation, values: Values, words: list[str]) -> list[str]:
    if {"--global-batch-size", "--num-steps-per-rollout"} <= set(words):
        found.notes.append(
            "--global-batch-size says how a rollout is split into optimizer steps: --num-steps-per-rollout is left out"
        )
        words = _without(words, "--num-steps-per-rollout")
    return words


def _judge_by_math(found: Translation, words: list[str], label: str) -> list[str]:
    """Add a reward, and the column of the label if none is named."""
    found.notes.append(
        "no reward is named: --rm-type math compares answers of mathematics with the column of --label-key"
    )
    return _add([*words, "--rm-type", "math"], "--label-key", label)


def _note_epochs(found: Translation, name: str, values: Values, words: list[str]) -> None:
    if name in values and "--num-rollout" not in words:
        size = (
            words[words.index("--rollout-batch-size") + 1]
            if "--rollout-batch-size" in words
            else "--rollout-batch-size"
        )
        found.notes.append(
            f"{name} {values[name]}: add --num-rollout with {values[name]} times the number of prompts, divided by {size}"
        )


def _number(text: str | None) -> int | None:
    try:
        return int(float(text.split()[0])) if text else None  # the name of a script may follow
    except ValueError:
        return None


def _with(words: list[str], flag: str, value: str) -> list[str]:
    """Return the words with this value of a flag, at its place or at the end."""
    if flag not in words:
        return [*words, flag, value]
    at = words.index(flag)
    return [*words[: at + 1], value, *words[at + 2 :]]


def _add(words: list[str], flag: str, value: str) -> list[str]:
    return words if flag in words else [*words, flag, value]


def _without(words: list[str], *flags: str) -> list[str]:
    kept: list[str] = []
    for at, word in enumerate(words):
        if word not in flags and not (at and words[at - 1] in flags and not word.startswith("--")):
            kept.append(word)
    return kept
