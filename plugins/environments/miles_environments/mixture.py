"""``--prompts environments``: tasks of several environments, mixed by weight."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

from miles_core.data import PromptSource, Row, describe_error, valid_data
from miles_core.plugin import ConfigError, DataError, Run
from miles_environments.environment import Task, instructions_of
from miles_environments.registry import KEY, Member, Registry, registry_of

log = logging.getLogger(__name__)

#: The run stops after this many tasks in a row that an environment could not make.
GIVE_UP = 100


class Mixture(PromptSource):
    """Rows drawn from several environments, the same for the same seed.

    Args:
        registry: for the levels of difficulty.
        members: the environments by label.
        seed: of the draws.
        chat: prompts are chat messages, else texts.
        length: number of rows; None is endless.
        held_out: the rows are for evaluation, and their levels those of the entries.
    """

    def __init__(
        self,
        registry: Registry,
        members: Mapping[str, Member],
        seed: int,
        chat: bool,
        length: int | None,
        held_out: bool,
    ) -> None:
        self.registry, self.members, self.seed, self.chat = registry, members, seed, chat
        self.length, self.held_out = length, held_out
        self.at, self.counts = 0, dict.fromkeys(members, 0)
        self._failures = 0

    def next(self, n: int) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < n:
            if self.length is not None and self.at == self.length:
                self.at, self.counts = 0, dict.fromkeys(self.members, 0)
            row = self._draw()
            if row is not None:
                rows.append(row)
        return rows

    def _draw(self) -> Row | None:
        """Return the next row; None if the environment could not make it."""
        labels, weights = list(self.members), [member.entry.weight for member in self.members.values()]
        label = random.Random(f"{self.seed}:{self.at}").choices(labels, weights)[0]
        member = self.members[label]
        level = member.entry.level if self.held_out else self.registry.curricula[label].level
        number = self._number(member, self.counts[label])
        self.counts[label] += 1
        try:
            task = member.environment.task(number, level)
            prompt = self._prompt(member, task, number)
        except Exception as error:
            self._failures += 1
            message = f"the environment {label} cannot make its task {number}: {describe_error(error)}"
            if self._failures >= GIVE_UP:
                raise DataError(f"{message}; the last {GIVE_UP} tasks failed") from error
            log.warning("%s; it is left out", message)
            return None
        self._failures, index, self.at = 0, self.at, self.at + 1
        info = {"label": label, "number": number, "level": level} | ({"held_out": True} if self.held_out else {})
        # not examined: a task that cannot be tokenized is left out
        return Row(prompt, task.label, {KEY: info}, index, f"task {number} of {label}", examined=False)

    def _number(self, member: Member, count: int) -> int:
        length = member.environment.length
        room = None if length is None else length - member.entry.first
        size = min((one for one in (member.entry.count, room) if one is not None), default=None)
        return member.entry.first + (count if size is None else count % size)

    def _prompt(self, member: Member, task: Task, number: int) -> str | list[dict[str, Any]]:
        system = instructions_of(member.entry, member.environment)
        if member.environment.several_turns:  # its first observation replaces this text
            return self._render(system, f"{member.entry.label}, episode {number}")
        if not task.prompt:
            raise ValueError("it has no prompt")
        return self._render(system, valid_data(task.prompt))

    def _render(self, system: str, prompt: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        if self.chat:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            own = messages[0]["role"] == "system"
            return messages if own or not system else [{"role": "system", "content": system}, *messages]
        parts = [prompt] if isinstance(prompt, str) else [str(message["content"]) for message in prompt]
        return "\n".join([system, *parts] if system else parts)

    def state(self) -> dict[str, Any]:
        curricula = {} if self.held_out else {name: c.state() for name, c in self.registry.curricula.items()}
        return {"at": self.at, "counts": dict(self.counts), "curricula": curricula}

    def load_state(self, state: dict[str, Any]) -> None:
        if set(state["counts"]) != set(self.counts):
            raise DataError(
                f"cannot resume: the environments were {', '.join(state['counts'])} when the checkpoint was saved, and are "
                f"{', '.join(self.counts)} now; give the same --environments"
            )
        self.at, self.counts = state["at"], dict(state["counts"])
        for name, saved in state["curricula"].items():
            self.registry.curricula[name].load_state(saved)


def make_prompts(run: Run, data: str, purpose: str) -> Mixture:
    """Provider of ``--prompts environments`` and ``--eval-prompts environments``.

    For evaluation ``data`` is the label of one environment, or empty for all of them.

    Raises:
        ConfigError: ``data`` is not a label, or a first task is outside of a task set.
    """
    registry = registry_of(run)
    chat, seed = bool(run.config.data.apply_chat_template), run.config.train.seed
    if purpose == "train":
        if data:
            raise ConfigError(f"--prompt-data {data}: the tasks come from --environments; leave --prompt-data out")
        return _checked(Mixture(registry, registry.train, seed, chat, None, False))
    members = registry.held_out
    if data and data not in members:
        raise ConfigError(
            f"--eval-prompt-data NAME={data}: there is no environment {data!r}; there are {', '.join(members)}"
        )
    chosen = {data: members[data]} if data else members
    return _checked(Mixture(registry, chosen, seed, chat, run.config.environments.held_out_size, True))


def _checked(mixture: Mixture) -> Mixture:
    for label, member in mixture.members.items():
        length = member.environment.length
        if length is not None and member.entry.first >= length:
            raise ConfigError(
                f"--environments: {label} has {length} tasks, and its first is number {member.entry.first}"
            )
    return mixture
