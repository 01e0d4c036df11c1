"""The environments of a run, and the results of their rollouts since the last step. Prompt source, rollout function, reward and hooks share
it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_core.data import Sample
from miles_core.plugin import ConfigError, DataError, Run, StateKey
from miles_environments.config import EnvironmentsConfig
from miles_environments.curriculum import Curriculum
from miles_environments.entry import Entry, read_entries
from miles_environments.environment import Environment
from miles_environments.libraries import make_environment
from miles_environments.threads import Calls

log = logging.getLogger(__name__)

#: Added to the run's seed for held-out tasks.
HELD_OUT = 7_368_787
#: Metadata entry that identifies a sample's task.
KEY = "environment"


@dataclass(frozen=True)
class Member:
    """One environment of a mixture, with its entry."""

    entry: Entry
    environment: Environment

    @property
    def answer(self) -> str:
        """Where the answer is in a response."""
        return self.entry.answer or self.environment.answer


@dataclass(frozen=True)
class Outcome:
    """The reward of one rollout: its group and number, the label of its environment, its level, and the reward."""

    group: int
    index: int
    label: str
    level: int
    reward: float


class Registry:
    """The environments of a run.

    Attributes:
        train, held_out: members by label.
        curricula: difficulty of each training environment, by label.
        outcomes: rollouts for training since the last step.
        masked: samples that were masked since the last step because they could not be scored.
        calls: calls of code that may block.

    Raises:
        ConfigError: an entry cannot be read, or its library refuses it.
    """

    def __init__(self, options: EnvironmentsConfig, seed: int) -> None:
        self.options = options
        self.calls = Calls(options.concurrency, options.seconds)
        self.train = self._make(read_entries(options.mix, "--environments"), seed)
        self.curricula = {label: Curriculum(m.entry, m.environment.levels) for label, m in self.train.items()}
        self._held_out_entries = read_entries(options.held_out or options.mix, "--eval-environments")
        self._held_out: dict[str, Member] | None = None
        self._seed = seed
        self.outcomes: list[Outcome] = []
        self.masked = 0

    @staticmethod
    def _make(entries: list[Entry], seed: int) -> dict[str, Member]:
        return {entry.label: Member(entry, make_environment(entry, seed)) for entry in entries}

    @property
    def held_out(self) -> dict[str, Member]:
        """The members of evaluation, made when they are first used."""
        if self._held_out is None:
            self._held_out = self._make(self._held_out_entries, self._seed + HELD_OUT)
        return self._held_out

    def find(self, sample: Sample) -> tuple[Member, Mapping[str, Any]]:
        """Return the environment of a sample, and its entry in the metadata.

        Raises:
            DataError: the sample comes from another prompt source.
        """
        info = sample.metadata.get(KEY)
        members = self.held_out if isinstance(info, Mapping) and info.get("held_out") else self.train
        if not isinstance(info, Mapping) or info.get("label") not in members:
            raise DataError(
                f"sample {sample.index} is not a task of --environments ({KEY} = {info!r:.80} in its metadata); its prompts must come from "
                "--prompts environments"
            )
        return members[info["label"]], info

    def record(self, sample: Sample, reward: float) -> None:
        """Record the reward of a rollout; held-out ones do not count."""
        info = sample.metadata[KEY]
        if not info.get("held_out"):
            self.outcomes.append(Outcome(sample.group_index, sample.index, info["label"], info["level"], reward))

    def close(self) -> None:
        """Close all environments; one that raises is reported."""
        for label, member in {**self.train, **(self._held_out or {})}.items():
            try:
                member.environment.close()
            except Exception as error:
                log.warning("closing the environment %s raised %r", label, error)


_REGISTRY = StateKey[Registry]()


def registry_of(run: Run) -> Registry:
    """Return the environments of a run; they are made at the first call.

    Raises:
        ConfigError: see ``Registry``, or an environment with episodes is in a run with another rollout function.
    """
    if _REGISTRY not in run.state:
        made = Registry(run.config.environments, run.config.train.seed)
        several = [label for label, member in made.train.items() if member.environment.several_turns]
        free = run.config.rollout.generate_key or run.config.rollout.custom_generate_function_path
        if several and run.config.rollout.generate != "environments" and not free:
            raise ConfigError(
                f"--environments: {', '.join(several)} has episodes of several turns; give --generate environments"
            )
        run.state[_REGISTRY] = made
    return run.state[_REGISTRY]


def has_registry(run: Run) -> bool:
    """Whether the run has environments."""
    return _REGISTRY in run.state
