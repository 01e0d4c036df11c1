"""``--rm-type environments``: the rewards of episodes, and the scores of single answers.

An answer that the environment cannot score (it raises, blocks, or returns NaN) is masked: it stays in the group with the mean reward of
the other answers and gives no gradient. The run goes on, and ``environments/masked`` counts it.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.chat import strip_reasoning
from miles_core.data import Sample, number
from miles_core.plugin import DataError, Run, group_reward
from miles_environments.environment import EnvironmentFault, find_answer
from miles_environments.registry import Member, Registry, registry_of

log = logging.getLogger(__name__)


def make_reward(run: Run) -> Any:
    """Provider of ``--rm-type environments``."""
    registry = registry_of(run)
    key = run.config.reward.reward_key

    @group_reward
    async def environments(args: Any, samples: list[Sample]) -> list[Any]:
        member, info = registry.find(samples[0])
        if member.environment.several_turns:
            values: list[Any] = [_episode_reward(sample) for sample in samples]
        else:
            values = await _score(registry, member, info, samples)
        return _fill(registry, samples, values, key)

    return environments


def _episode_reward(sample: Sample) -> float:
    episode = sample.metadata.get("episode")
    if not isinstance(episode, Mapping):
        raise DataError(f"sample {sample.index} has no episode; its rollout function must be --generate environments")
    return float(episode["reward"])


async def _score(registry: Registry, member: Member, info: Mapping[str, Any], samples: list[Sample]) -> list[Any]:
    """Score the answers of a group; None where it failed."""
    texts = [strip_reasoning(str(sample.metadata.get("answer", sample.response))) for sample in samples]
    answers = [find_answer(text, member.answer) for text in texts]
    environment, number, level = member.environment, info["number"], info["level"]
    what = f"the environment {member.entry.label}: scoring task {number}"
    batches = [answers] if environment.scores_groups else [[answer] for answer in answers]
    values: list[Any] = []
    for batch in batches:
        try:
            found = await registry.calls(what, lambda batch=batch: list(environment.score(number, level, batch)))  # type: ignore[misc]
            if len(found) != len(batch):
                raise EnvironmentFault(f"{what} returned {len(found)} rewards for {len(batch)} answers")
            values += found
        except EnvironmentFault as error:
            values += [error] * len(batch)
    return values


def _fill(registry: Registry, samples: list[Sample], values: Sequence[Any], key: str | None) -> list[Any]:
    """Mask samples without a finite reward, and record the others."""
    numbers = [_number(value, key) for value in values]
    known = [one for one in numbers if one is not None]
    usual = statistics.fmean(known) if known else 0.0
    filled: list[Any] = []
    for sample, value, found in zip(samples, values, numbers, strict=True):
        if isinstance(value, Mapping) and key not in value:
            filled.append(value)  # core says which --reward-key is missing
        elif found is not None:
            registry.record(sample, found)
            filled.append(value)
        else:
            _mask(registry, sample, value)
            filled.append({key: usual} if key else usual)
    return filled


def _mask(registry: Registry, sample: Sample, value: Any) -> None:
    reason = (
        value
        if isinstance(value, EnvironmentFault)
        else f"its environment returned the reward {value!r:.60}; a reward is a finite number"
    )
    log.warning("sample %s is masked: %s", sample.index, reason)
    sample.remove_sample = True
    registry.masked += 1


def _number(value: Any, key: str | None) -> float | None:
    """Return the number of a reward; None if it has no finite one."""
    if isinstance(value, EnvironmentFault):
        return None
    try:
        return number(value.get(key) if isinstance(value, Mapping) else value, None)
    except DataError:
        return None
