"""``--rm-type model``: the reward of a response is the score of a classifier for the prompt with the response.

The samples of a prompt are scored together, so that a resumed run computes the same rewards. The classifier reads the token ids that the
policy read and wrote; its tokenizer and chat template are therefore those of the policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from miles_core.data import Sample, Status
from miles_core.plugin import ConfigError, DataError, Run, group_reward
from miles_reward_model.classifier import FLAG, Classifier, check_lengths

GroupReward = Callable[[object, Sequence[Sample]], Awaitable[list[float]]]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_reward(run: Run) -> GroupReward:
    """Make the reward; ``RewardModelConfig`` has its options."""
    options, model = run.config.plugin("reward_model"), run.config.model
    path = Path(options.checkpoint)
    device = find_device(model.device if options.device == "auto" else options.device)
    default = "float32" if device == "cpu" else "bfloat16"
    dtype = _DTYPES[default if model.dtype == "auto" else model.dtype]
    classifier = Classifier(path, device, dtype, options.max_tokens, model.trust_remote_code)
    tokenizer = read_tokenizer(path, model.trust_remote_code)
    check_tokenizer(run, path, tokenizer)
    template, closing, chat = bool(tokenizer.chat_template), find_closing(run), run.config.data.apply_chat_template
    executor = ThreadPoolExecutor(1, "reward-model")  # one forward pass at a time

    @group_reward
    async def score(args: object, samples: Sequence[Sample]) -> list[float]:
        if not template and (found := next((s for s in samples if not isinstance(s.prompt, str)), None)):
            raise DataError(
                f"the prompt {found.prompt!r:.80} is a list of messages, and {FLAG} {path} has no chat template, so it was trained on texts; "
                "use texts as prompts, or another reward model"
            )
        texts = [complete(s, closing if chat or not isinstance(s.prompt, str) else ()) for s in samples]
        check_lengths(texts, classifier.limit)
        return await asyncio.get_running_loop().run_in_executor(executor, classifier.score, texts)

    return score


def find_device(name: str) -> str:
    """Return the device of a name. ConfigError if this process has no such device."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--rm-device {name}: it is not a device; give auto, cpu, cuda or cuda:N") from error
    count = torch.cuda.device_count()
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= count):
        raise ConfigError(f"--rm-device {name}: this process has the CPU and {count} GPUs; give one of them")
    return name


def read_tokenizer(path: Path, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a reward model. ConfigError without one."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ConfigError(
            f"{FLAG} {path}: its tokenizer cannot be loaded ({error!s:.120}); copy the tokenizer's files to it"
        ) from error


def check_tokenizer(run: Run, path: Path, tokenizer: Any) -> None:
    """Check that the reward model reads token ids as the policy writes them.

    Raises:
        ConfigError: it has another vocabulary or chat template.
    """
    own, theirs = run.tokenizer.get_vocab(), tokenizer.get_vocab()
    if own != theirs:
        raise ConfigError(
            f"{FLAG} {path}: its tokenizer has another vocabulary than the policy's ({run.config.model.hf_checkpoint}): "
            f"{_describe_difference(own, theirs)}; the reward model reads the policy's token ids, so choose one with its tokenizer"
        )
    chat = run.config.data.apply_chat_template
    if chat and not tokenizer.chat_template:
        raise ConfigError(
            f"{FLAG} {path}: it has no chat template, so it was trained on texts, and the run applies one; leave --apply-chat-template out, or "
            "copy chat_template.jinja to the reward model if it was trained on conversations"
        )
    if tokenizer.chat_template and run.tokenizer.chat_template not in (None, tokenizer.chat_template):
        raise ConfigError(
            f"{FLAG} {path}: its chat template differs from the policy's ({run.config.model.hf_checkpoint}), so the policy's conversations "
            "would look unfamiliar to it; train it with the policy's template, or give both checkpoints the same chat_template.jinja"
        )


def find_closing(run: Run) -> list[int]:
    """Return the tokens that end an answer in a conversation: the policy's stop token, and what the chat template writes after it."""
    renderer = run.render.renderer
    if renderer is None:
        return []
    end = {*run.tokenizer.all_special_ids}
    answer = renderer.answer([{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}])[1]
    return answer[next((at for at, token in enumerate(answer) if token in end), len(answer)) :]


def complete(sample: Sample, closing: Sequence[int]) -> list[int]:
    """Return the tokens of a sample. A finished answer in a conversation ends as in training data, with all that the template writes
    (``find_closing``; empty for texts)."""
    if closing and sample.status is Status.COMPLETED and sample.tokens[-1] == closing[0]:
        return [*sample.tokens, *closing[1:]]
    return list(sample.tokens)


def _describe_difference(own: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    if len(own) != len(theirs):
        return f"{len(theirs)} tokens, and the policy's has {len(own)}"
    token = min((token for token in own if theirs.get(token) != own[token]), key=own.__getitem__)
    return f"the policy's token {own[token]} ({token!r}) is {theirs.get(token, 'unknown')} there"
