"""Twenty pairs of toy runs with one planted difference each, and ten of equal runs, for ``miles diff``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from miles_core.api import samples
from miles_core.contracts.transport import SyncReport
from miles_core.schedule.sync import SyncSchedule
from miles_core.sync.push import CopyTransport
from miles_testing import toy_run
from miles_testing.toy import toy_files
from miles_tools.replay.compare import Difference

STEPS = 3
#: Name of the tensor in which one bit is flipped.
FLIPPED = "model.layers.1.self_attn.q_proj.weight"
#: Index of the sample that is dropped in step 2, and version whose weights the engine does not receive.
DROPPED, MISSING = 9, 1

REWARD = "async def reward(args, sample):\n    return float(sample.tokens[-1] % 3)\n"
#: A plugin that rounds the log-probabilities of training to this many bits.
ROUNDING = """
import torch
from miles_core.plugin import hookimpl
from miles_core.plugin import Plugin

plugin = Plugin("rounding", "rounds log-probs", "0.1", "~=0.1", hooks={{"": "Hooks"}})


class Hooks:
    @hookimpl
    def wrap_forward(self, run, policy):
        def wrap(inner):
            def forward(chunk, micro_batch, ctx):
                output = inner(chunk, micro_batch, ctx)
                if ctx.kind == "train":
                    exact = output.log_probs
                    output.log_probs = exact + ((exact * {scale}).round() / {scale} - exact).detach()
                return output
            return forward
        return wrap
"""


@dataclass(frozen=True)
class Side:
    """One run of a pair.

    Attributes:
        plugins: ``--plugins``.
        options: options of ``toy_run``.
        during: context in which it runs.
        after: changes the finished run directory.
    """

    plugins: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    during: Callable[[], AbstractContextManager[Any]] = nullcontext
    after: Callable[[Path], None] = lambda directory: None

    def run(self, directory: Path) -> Path:
        """Make the run in ``directory`` and return it."""
        with self.during():
            toy_run(self.plugins, directory, **{"steps": STEPS, "record_steps": True, **self.options})
        self.after(directory)
        return directory


@dataclass(frozen=True)
class Planted:
    """A pair of runs with one difference.

    Attributes:
        sides: makes both runs' descriptions in a folder for their files.
        phase: the expected phase; "" if the data agree and only versions differ.
        steps: the possible steps.
        holds: further entries of the ``Difference``, name -> value.
    """

    sides: Callable[[Path], tuple[Side, Side]]
    phase: str
    steps: tuple[int, ...] = (1,)
    holds: Mapping[str, Any] = field(default_factory=dict)

    def is_named(self, found: Difference | None, listed: list[tuple[str, str, str]]) -> bool:
        """Whether the difference that ``miles diff`` found, with the options that it listed, is what was planted."""
        if not self.phase:
            return found is None and len(listed) == 1
        if found is None or found.phase != self.phase or found.step not in self.steps:
            return False
        seen = {"sample": found.sample, "token": found.token, "tensor": found.tensor, "tensors": found.tensors[0]}
        for name, expected in self.holds.items():
            if name == "plugins":
                if expected not in found.plugins:
                    return False
            elif not (
                isinstance(seen[name], expected) and seen[name] != ""
                if isinstance(expected, type)
                else seen[name] == expected
            ):
                return False
        return True


def options(one: Mapping[str, Any] | None = None, **other: Any) -> Callable[[Path], tuple[Side, Side]]:
    """A pair whose second run has other options than ``one``."""
    base = dict(one or {})
    return lambda folder: (Side(options=base), Side(options=base | other))


def _flip(folder: Path) -> tuple[Side, Side]:
    from safetensors.torch import load_file, save_file

    model = folder / "model"
    shutil.copytree(toy_files() / "model", model)
    tensors = load_file(model / "model.safetensors")
    tensors[FLIPPED] = tensors[FLIPPED].clone()
    tensors[FLIPPED].view(-1).view(torch.int8)[0] ^= 1
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return Side(), Side(options={"hf_checkpoint": model, "prompt_data": toy_files() / "prompts.jsonl"})


def _rounding(folder: Path) -> tuple[Side, Side]:
    files = []
    for name, scale in (("a", 4096.0), ("b", 2048.0)):
        (folder / name).mkdir()
        files.append(folder / name / "rounding.py")
        files[-1].write_text(ROUNDING.format(scale=scale))
    return Side([str(files[0])]), Side([str(files[1])])


def _reward(folder: Path) -> tuple[Side, Side]:
    (folder / "other.py").write_text(REWARD)
    return Side(), Side(options={"custom_rm_path": folder / "other.py"})


def _template(folder: Path) -> tuple[Side, Side]:
    model = folder / "model"
    shutil.copytree(toy_files() / "model", model)
    for file in model.iterdir():
        if file.suffix in (".jinja", ".json") and "messages" in (text := file.read_text(encoding="utf-8")):
            file.write_text(text.replace("add_generation_prompt", "not_add_generation_prompt"), encoding="utf-8")
    one = {"apply_chat_template": True}
    return Side(options=one), Side(
        options={**one, "hf_checkpoint": model, "prompt_data": toy_files() / "prompts.jsonl"}
    )


def _stop_token(folder: Path) -> tuple[Side, Side]:
    Side().run(folder / "first")
    first = next(iter(samples(folder / "first", step=1)))
    return Side(), Side(options={"rollout_stop_token_ids": first["tokens"][-first["response_length"]]})


def _library(folder: Path) -> tuple[Side, Side]:
    def record(directory: Path) -> None:
        file = directory / "environment.json"
        known = json.loads(file.read_text())
        known["packages"]["torch"] = "1.0"
        file.write_text(json.dumps(known))

    return Side(), Side(after=record)


@contextmanager
def _dropping() -> Iterator[None]:
    take = SyncSchedule.take

    async def take_fewer(self: SyncSchedule, step: int) -> Any:
        groups = await take(self, step)
        return [[sample for sample in group if sample.index != DROPPED] for group in groups]

    with patch.object(SyncSchedule, "take", take_fewer):
        yield


@contextmanager
def _not_syncing() -> Iterator[None]:
    send = CopyTransport.send

    async def send_some(self: CopyTransport, units: Any, version: int) -> SyncReport:
        if version != MISSING:
            return await send(self, units, version)
        self.engine._weights.version = version  # type: ignore[attr-defined]  # the engine reports it, and has the weights before
        return SyncReport(version, 0, 0, 0.0)

    with patch.object(CopyTransport, "send", send_some):
        yield


PLANTED: dict[str, Planted] = {
    "seed": Planted(options(seed=7), "rollout"),
    "one flipped weight": Planted(_flip, "weights", holds={"tensor": FLIPPED, "tensors": 1}),
    "another kernel": Planted(
        lambda folder: (Side(), Side(["true_on_policy"])), "rollout", holds={"plugins": "true_on_policy"}
    ),
    "a plugin's rounding": Planted(_rounding, "loss", holds={"plugins": "rounding", "token": int}),
    "prompt order": Planted(options(rollout_shuffle=True), "prompt data"),
    "a dropped sample": Planted(
        lambda folder: (Side(), Side(during=_dropping)), "rollout", (2,), holds={"sample": DROPPED}
    ),
    "another library version": Planted(_library, ""),
    "reward": Planted(_reward, "reward", holds={"sample": int}),
    "temperature": Planted(options(rollout_temperature=0.7), "rollout", holds={"token": 0}),
    "learning rate": Planted(options(lr=2e-3), "optimizer", holds={"tensor": str}),
    "optimizer betas": Planted(options(adam_beta2=0.9), "optimizer", (1, 2), holds={"tensor": str}),
    "clip range": Planted(options({"num_steps_per_rollout": 2, "lr": 1e-2}, eps_clip=1e-3), "loss"),
    "KL coefficient": Planted(options({"kl_loss_coef": 0.1}, kl_loss_coef=0.5), "loss", (2,)),
    "maximum length": Planted(options(rollout_max_response_len=3), "rollout", holds={"token": 3}),
    "chat template": Planted(_template, "prompt data", holds={"sample": int}),
    "samples per prompt": Planted(options(n_samples_per_prompt=2), "prompt data"),
    "stop token": Planted(_stop_token, "rollout", holds={"token": int}),
    "advantage estimator": Planted(options(advantage_estimator="rloo"), "advantage", holds={"token": int}),
    "router replay off": Planted(lambda folder: (Side(["r3"]), Side()), "rollout", holds={"plugins": "r3"}),
    "a missing sync": Planted(
        lambda folder: (Side(), Side(during=_not_syncing)), "sync", (MISSING,), holds={"tensor": str}
    ),
}

#: Equal pairs: plugins and options of both runs.
EQUAL: dict[str, Side] = {
    "defaults": Side(),
    "another seed, shuffled": Side(options={"seed": 5, "rollout_shuffle": True}),
    "two optimizer steps": Side(options={"num_steps_per_rollout": 2, "kl_loss_coef": 0.1}),
    "routing replay and importance sampling": Side(["r3", "tis"]),
    "adapters": Side(options={"lora_rank": 2}),
    "a dense model": Side(options={"family": "llama"}),
    "bfloat16": Side(options={"dtype": "bfloat16"}),
    "FP8": Side(options={"rollout_fp8": True, "emulate_precision": True, "sizes": {"hidden_size": 128}}),
    "rollouts ahead": Side(options={"schedule": "ahead", "advantage_estimator": "reinforce_plus_plus"}),
    "a critic": Side(["ppo"], {"advantage_estimator": "ppo"}),
}
