"""All that a run stored about its steps, in one form for recorded steps (``--record-steps``) and saved samples (``--save-rollouts``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from miles_core.checkpoint.directory import Checkpoints
from miles_core.data.sample import Sample
from miles_core.errors import MilesError
from miles_core.observe.metrics import RESERVED, read
from miles_tools.replay import OWN
from miles_tools.replay.open_run import open_run
from miles_tools.replay.steps import read_samples, read_trained, recorded_steps, step_directory
from miles_tools.report.reading import PLACES, options_of, read_json, read_yaml
from miles_tools.samples.files import read_file, rollout_files


@dataclass(frozen=True)
class StoredSample:
    """One sample of a step.

    Attributes:
        index, group: its number in the run, and that of its group.
        prompt: name -> value, of what the prompt file determines: text, tokens, label and digests of media.
        tokens: response tokens.
        engine: name -> value per response token, or of the whole sample, of what the rollout determined; None where it is absent.
        reward: a number, or a dict of numbers.
        advantages, log_probs: values of training per response token; None if there are none.
        fields: fields that plugins and the engine recorded, name -> value.
    """

    index: int
    group: int
    prompt: Mapping[str, Any]
    tokens: Sequence[int]
    engine: Mapping[str, Any]
    reward: Any
    advantages: Any
    log_probs: Any
    fields: Mapping[str, Any] = field(default_factory=dict)


class StoredRun:
    """A run directory whose steps can be compared.

    Args:
        directory: the run directory.

    Attributes:
        path: its absolute path.
        metrics: step -> metrics.

    Raises:
        MilesError: see ``open_run``.
    """

    def __init__(self, directory: Path | str) -> None:
        self.path = open_run(directory)
        records = read(self.path / "metrics.jsonl")
        self.metrics = {r["step"]: {k: v for k, v in r.items() if k not in RESERVED} for r in records}
        self.recorded = frozenset(recorded_steps(self.path))
        self._saved = rollout_files(self.path)
        self.checkpoints = Checkpoints(self.path / "checkpoints")

    @property
    def steps(self) -> list[int]:
        """The completed steps, in ascending order."""
        return [step for step in self.metrics if step > 0]

    def samples(self, step: int, exact: bool) -> list[StoredSample] | None:
        """Return the samples of a step; None if none are stored. exact: those of ``--record-steps``, else those of ``--save-rollouts``,
        whose numbers are rounded."""
        if exact:
            trained = read_trained(self.path, step)
            samples = read_samples(self.path, step)
            columns = zip(samples, trained["log_probs"], trained["advantages"], strict=True)
            return [_of_sample(*each) for each in columns]
        rows = read_file(self._saved[step]) if step in self._saved else None
        return None if rows is None else [_of_row(row) for row in rows]

    def sums(self, step: int) -> dict[str, list[dict[str, dict[str, int]]]]:
        """Return the checksums of a step's optimizer steps: ``POLICY.RANK`` -> one mapping per optimizer step."""
        return {name: data["steps"] for name, data in self._sum_files(step, "sums").items()}

    def threads(self, step: int) -> int | None:
        """Return the number of PyTorch's threads with which a step was trained; None if its checksums are not recorded."""
        return next((data.get("threads") for data in self._sum_files(step, "sums").values()), None)

    def engine(self, step: int) -> dict[str, dict[str, int]]:
        """Return the checksums of the weights in the engines after a step: policy, with the worker if it has a name -> tensors."""
        return {
            f"{policy} ({worker})" if worker else policy: sums
            for policy, data in self._sum_files(step, "engine").items()
            for worker, sums in data["workers"].items()
        }

    def _sum_files(self, step: int, start: str) -> dict[str, Any]:
        files = sorted(step_directory(self.path, step).glob(f"{start}.*.json"))
        return {file.name[len(start) + 1 : -len(".json")]: read_json(file) for file in files}

    @cached_property
    def options(self) -> dict[str, Any]:
        """Option -> value, defaults included, without ``PLACES`` and the list of plugins (``plugins``)."""
        return self._options(defaults=True)

    @cached_property
    def chosen(self) -> dict[str, Any]:
        """Option -> value, of those that are not defaults."""
        return self._options(defaults=False)

    def _options(self, defaults: bool) -> dict[str, Any]:
        left_out = PLACES | {"run.plugins"}
        return {name: value for name, value in options_of(self._config, defaults).items() if name not in left_out}

    @cached_property
    def _config(self) -> dict[str, Any]:
        return read_yaml(self.path / "config.yaml")

    @cached_property
    def plugins(self) -> dict[str, str]:
        """Plugin -> its version and source, which holds the digest of a single file; without the one that records, which changes no step."""
        listed = read_json(self.path / "plan.json").get("plugins", ())
        return {str(p["name"]): f"{p.get('version')} ({p.get('source')})" for p in listed if p["name"] != OWN}

    @cached_property
    def versions(self) -> dict[str, str]:
        """Package, Python, platform and GPUs -> what the run recorded of it."""
        known = read_json(self.path / "environment.json")
        packages = {f"package {name}": str(version) for name, version in (known.get("packages") or {}).items()}
        others = {
            name: json.dumps(known[name]) for name in ("python", "platform", "processor", "gpus") if name in known
        }
        return {"miles-core": str(read_json(self.path / "plan.json").get("core"))} | packages | others


def _of_sample(sample: Sample, log_probs: Any, advantages: Any) -> StoredSample:
    end = sample.prompt_length
    return StoredSample(
        sample.index,
        sample.group_index,
        {
            "prompt": sample.prompt,
            "prompt tokens": [*sample.tokens[:end]],
            "label": sample.label,
            "media": [media.digest for media in sample.media],
        },
        [*sample.tokens[end:]],
        {
            "rollout_log_probs": sample.rollout_log_probs,
            "loss_mask": sample.loss_mask,
            "status": str(sample.status),
            "weight_versions": [[*pair] for pair in sample.weight_versions],
            "removed": sample.remove_sample,
        },
        sample.reward,
        advantages,
        log_probs,
        sample.fields,
    )


def _of_row(row: Mapping[str, Any]) -> StoredSample:
    try:
        tokens = row["tokens"]
        end = len(tokens) - row["response_length"]
        engine = ("rollout_log_probs", "loss_mask", "status", "weight_versions", "removed")
        return StoredSample(
            row["index"],
            row["group"],
            {"prompt": row["prompt"], "prompt tokens": tokens[:end], "label": row["label"]},
            tokens[end:],
            {name: row[name] for name in engine},
            row["reward"],
            row["advantages"],
            row["train_log_probs"],
        )
    except (KeyError, TypeError) as error:
        raise MilesError(
            f"a saved sample lacks {error}: its file was not written by this version of miles-core"
        ) from error
