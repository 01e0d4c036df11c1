"""A toy run: the real loop with a tiny model, in well under a second.

The reward is the fraction of even token ids in the response. Rewards differ within a group, gradients are not zero, and every hook is
called.
"""

from __future__ import annotations

import atexit
import io
import json
import shutil
import string
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_core.contracts.run import Run
    from miles_core.contracts.runtime import PolicyParts
    from miles_core.plugin.plan import Plan

REWARD = """
async def reward(args, sample):
    response = sample.tokens[sample.prompt_length :]
    return sum(token % 2 == 0 for token in response) / len(response)
"""


@dataclass(frozen=True)
class ToyRun:
    """A finished toy run.

    Attributes:
        run: the run as plugins received it.
        parts: its components, one entry per policy (released).
        metrics: its logged metrics, one record per step.
    """

    run: Run
    parts: list[PolicyParts]
    metrics: list[dict[str, Any]]

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.run.directory

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The samples that it trained on, read from the run directory."""
        from miles_core.api import samples

        return list(samples(self.directory))

    @property
    def engine(self) -> Any:
        """The engine of the first policy."""
        return self.parts[0].engine

    @property
    def trainer(self) -> Any:
        """The trainer of the first policy, in this process."""
        return self.parts[0].learner.rank.trainer  # type: ignore[attr-defined]


def _temporary(prefix: str) -> Path:
    """Make a directory that is deleted at the end of the process."""
    directory = tempfile.mkdtemp(prefix=prefix)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


@lru_cache
def toy_files(family: str = "qwen3_moe", **sizes: Any) -> Path:
    """Make a directory with ``model/``, ``prompts.jsonl`` and ``reward.py``, once per process. ``sizes`` override entries of the model's
    configuration, as for ``tiny_checkpoint``."""
    from miles_testing.tiny import tiny_checkpoint
    from miles_tools.demo.model import make_tokenizer

    directory = _temporary("miles-toy-")
    tokenizer = make_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tiny_checkpoint(family, directory / "model", vocab_size=len(tokenizer), **ids, **sizes)
    tokenizer.save_pretrained(directory / "model")
    rows = [json.dumps({"input": letter, "label": "a"}) for letter in "abcdefgh"]
    (directory / "prompts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (directory / "reward.py").write_text(REWARD, encoding="utf-8")
    return directory


@lru_cache
def toy_classifier(family: str = "llama", **sizes: Any) -> Path:
    """Make a sequence classifier with one label and the tokenizer of toy models; returns its directory. ``sizes`` as for ``toy_files``."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    base, directory = toy_files(family, **sizes) / "model", _temporary("miles-toy-classifier-")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForSequenceClassification.from_pretrained(base, num_labels=1).save_pretrained(directory)
    AutoTokenizer.from_pretrained(base).save_pretrained(directory)
    return directory


def _prompts_for(checkpoint: str | Path, usual: Path) -> Path:
    """Return a prompt file for a checkpoint's tokenizer: ``usual``, or one with other characters if the tokenizer lacks them."""
    from tokenizers import Tokenizer

    path = Path(checkpoint) / "tokenizer.json"
    if not path.is_file():  # a plan needs no tokenizer, and a run refuses to start without one
        return usual
    tokenizer = Tokenizer.from_file(str(path))

    def known(text: str) -> bool:
        return bool(tokenizer.encode(text, add_special_tokens=False).ids)

    rows = [json.loads(line) for line in usual.read_text(encoding="utf-8").splitlines()]
    if all(known(row["input"]) for row in rows):
        return usual
    letters = [c for c in string.ascii_uppercase + string.digits if known(c)][: len(rows)]
    if not letters:
        return usual  # the run raises an error for prompts that the tokenizer cannot encode
    file = _temporary("miles-toy-prompts-") / "prompts.jsonl"
    lines = [json.dumps({"input": letter, "label": "a"}) for letter in letters]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def toy_arguments(
    plugins: Sequence[str] = (),
    directory: Path | str | None = None,
    steps: int = 2,
    family: str = "qwen3_moe",
    sizes: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[str]:
    """Return the command line of a toy run; ``options`` are flags with underscores (``rollout_top_k=3``, ``use_wandb=True``), or tables of a
    configuration file (``policies={"one": {}, "two": {}}``)."""
    files = toy_files(family, **(sizes or {}))
    given: dict[str, Any] = {
        "hf_checkpoint": files / "model",
        "prompt_data": files / "prompts.jsonl",
        "custom_rm_path": files / "reward.py",
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 4,
        "num_rollout": steps,
        "rollout_max_response_len": 4,
        "lr": 1e-3,
        "save": Path(directory) if directory else _temporary("miles-toy-run-") / "run",
        "log_level": "warning",
        "self_check": False,
        **options,
    }
    if "hf_checkpoint" in options and "prompt_data" not in options:
        given["prompt_data"] = _prompts_for(options["hf_checkpoint"], files / "prompts.jsonl")
    words = ["--plugins", ",".join(plugins)] if plugins else []
    tables = {name: value for name, value in given.items() if isinstance(value, Mapping)}
    if tables:  # JSON is YAML
        file = _temporary("miles-toy-config-") / "tables.yaml"
        file.write_text(json.dumps(tables, default=str), encoding="utf-8")
        words += ["--config", str(file)]
    for name, value in given.items():
        if name in tables:
            continue
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is False:
            words.append("--no-" + name.replace("_", "-"))
        elif value is not None:
            words += [flag, str(value)]
    return words


def toy_run(
    plugins: Sequence[str] = (),
    directory: Path | str | None = None,
    steps: int = 2,
    family: str = "qwen3_moe",
    sizes: Mapping[str, Any] | None = None,
    **options: Any,
) -> ToyRun:
    """Run the loop with ``plugins`` (names, or paths of single files) on a tiny mixture-of-experts model.

    Args:
        plugins: values of ``--plugins``.
        directory: the run directory; a temporary one by default.
        steps: number of rollout steps.
        family: a model family of ``miles_testing.tiny``.
        sizes: entries of the model's configuration to override, e.g. ``{"hidden_size": 64}``.
        options: further flags; None omits a default flag of the toy run.

    Raises:
        PlanError: the combination is refused.
    """
    from rich.console import Console

    from miles_core.config.load import load
    from miles_core.launch import launch
    from miles_core.observe.metrics import read
    from miles_core.run.prepare import apply_plan, prepare

    config = load(toy_arguments(plugins, directory, steps, family, sizes, **options))
    accepted, catalogue = prepare(config)
    done = launch(apply_plan(config, accepted), accepted, catalogue, Console(file=io.StringIO()))
    return ToyRun(done.run, done.parts, read(done.run.directory / "metrics.jsonl"))


def plan(plugins: Sequence[str] = (), facts: Sequence[str] = (), **options: Any) -> Plan:
    """Resolve a run without starting it; returns the accepted plan or raises PlanError. ``facts`` are overrides, e.g. ``gpu=B200``."""
    from miles_core.config.load import load
    from miles_core.run.prepare import prepare

    return prepare(load(toy_arguments(plugins, **options)), facts)[0]
