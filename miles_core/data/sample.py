"""A sample: a prompt, the engine's response, and the data recorded with it.

The response is always a suffix of ``tokens``: ``tokens[:-response_length]`` is the prompt. Tokens are exactly the engine's input and
output; they are never re-tokenised from text.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from typing import Any

import numpy as np

from miles_core.data.column import FLOATS, MASK, TOKENS, Column, ColumnField, as_column
from miles_core.data.field import Field
from miles_core.data.media import Media
from miles_core.errors import DataError, describe

#: Largest absolute reward: rewards are squared and summed (standard deviations, returns) in float64 and stored in float32.
LARGEST = 1e30
_new, _set = object.__new__, object.__setattr__


def number(reward: Any, reward_key: str | None) -> float:
    """Convert ``reward`` to a finite float. It may be a number (including bool, numpy and 0-d tensors), or a dict with the entry
    ``reward_key``.

    Raises:
        DataError: not a number, NaN or infinite, or a dict without ``reward_key``. The message is a predicate ("is nan; ..."); the
            caller prepends the subject.
    """
    if type(reward) is float and -LARGEST <= reward <= LARGEST:
        return reward
    value = reward
    if isinstance(reward, Mapping):
        if reward_key is None:
            raise DataError(f"is a dict with keys {_keys(reward)}; name the one to train on with --reward-key")
        if reward_key not in reward:
            raise DataError(f"is a dict without --reward-key {reward_key!r}; it has {_keys(reward)}")
        value = reward[reward_key]
    if type(value) is not float and not isinstance(value, Real) and hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError) as error:
            raise DataError(f"is {reward!r}, which is more than one number") from error
    if type(value) is not float and not isinstance(value, Real):
        raise DataError(f"is {reward!r} ({type(value).__name__}); a reward must be a number")
    try:
        found = float(value)
    except OverflowError as error:
        raise DataError("is an integer with hundreds of digits; a reward must be a finite number") from error
    if not math.isfinite(found):
        raise DataError(f"is {reward!r}; a reward must be finite")
    if abs(found) > LARGEST:
        raise DataError(
            f"is {reward!r}; a reward must be between -{LARGEST:g} and {LARGEST:g}, or its square is infinite"
        )
    return found


def find_reward_fault(reward: Any) -> str:
    """Describe a reward that is neither a finite number nor a dict of them; "" if it is one."""
    entries = reward if isinstance(reward, Mapping) else {"": reward}
    if not entries:
        return f"it returned {describe(reward)}; expected a number, or a dict of numbers"
    for name, entry in entries.items():
        try:
            number(entry, None)
        except DataError as error:
            return f"the reward{f' {name!r}' if name else ''} {error}"
    return ""


def reward_value(sample: Any, reward_key: str | None = None) -> float:
    """Return the scalar reward of ``sample``: its ``reward``, or ``reward[reward_key]`` if that is a dict.

    Raises:
        DataError: the sample has no usable reward; names the sample.
    """
    try:
        return number(sample.reward, reward_key)
    except DataError as error:
        raise DataError(f"the reward of sample {getattr(sample, 'index', None)} {error}") from error


def reward_values(samples: Sequence[Any], reward_key: str | None = None) -> list[float]:
    """Return ``reward_value`` of each sample; rewards that are all floats are checked at once."""
    rewards = [sample.reward for sample in samples]
    if {*map(type, rewards)} == {float} and bool((np.abs(rewards) <= LARGEST).all()):  # NaN is not
        return rewards
    return [reward_value(sample, reward_key) for sample in samples]


def _keys(reward: Mapping[str, Any]) -> str:
    return ", ".join(repr(key) for key in reward) or "none"


class Status(StrEnum):
    """State of a sample."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"  # the response reached its length limit
    ABORTED = "aborted"  # aborted by the run; the tokens generated so far are kept
    FAILED = "failed"  # a tool or environment failed; not trained on


#: Attribute of a sample -> type code of its column.
COLUMNS = {"tokens": TOKENS, "loss_mask": MASK, "rollout_log_probs": FLOATS}


@dataclass
class Sample:
    """One rollout of one prompt.

    ``tokens``, ``loss_mask`` and ``rollout_log_probs`` are columns: a list that is assigned to one of them is copied to an array, which
    behaves like a list.

    Attributes:
        prompt: text or chat messages.
        tokens: prompt and response token ids.
        response: decoded response.
        response_length: number of response tokens, tool text included.
        label: ground truth for the reward, any type the prompt file had.
        reward: a number, or a dict of numbers (``--reward-key`` picks one).
        loss_mask: [response_length] of 0/1; None means all ones. Tool text is 0.
        rollout_log_probs: [response_length] log-probability of each response token under the distribution it was
            sampled from (temperature and sampling support included); 0.0 where ``loss_mask`` is 0.
        weight_versions: (index of the first token of the version, weight version), in order.
        group_index: number of the group; all samples of one prompt in one rollout share it.
        index: number of the sample in the run; random numbers depend on it and on the index of the engine call.
        rollout_id: siblings from one custom generation share it and count as one rollout in the loss.
        remove_sample: include the sample in every normaliser but give it no gradient.
        policy: name of the policy that generates it and is trained on it; "" for the first trained policy.
        media: what belongs to the placeholders in the prompt's tokens, in order; the samples of a prompt share the objects.
        fields: declared extra fields, name -> numpy array (or list of arrays when ragged).
    """

    prompt: str | list[dict[str, Any]] = ""
    tokens: ColumnField = field(default_factory=lambda: Column(TOKENS))
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, float] | None = None
    loss_mask: ColumnField = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    rollout_log_probs: ColumnField = None
    weight_versions: list[tuple[int, int]] = field(default_factory=list)
    group_index: int = 0
    index: int = 0
    rollout_id: int | None = None
    remove_sample: bool = False
    policy: str = ""
    media: tuple[Media, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in COLUMNS:
            value = as_column(value, COLUMNS[name])
        _set(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # Declared fields read like attributes: ``sample.rollout_routed_experts``.
        fields = self.__dict__.get("fields")
        if fields is not None and name in fields:
            return fields[name]
        raise AttributeError(f"sample has no attribute or field {name!r}")

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens) - self.response_length

    @property
    def mask(self) -> Column:
        """The loss mask over the response, all zeros for a removed sample."""
        if self.loss_mask is not None and not self.remove_sample:
            own: Column = self.loss_mask
            return own
        return Column(MASK, bytes([not self.remove_sample]) * self.response_length)

    @property
    def versions(self) -> np.ndarray:
        """Weight version of each response token, int64 [response_length]; -1 before the first recorded one."""
        starts = np.array([index for index, _ in self.weight_versions], np.int64)
        versions = np.array([-1, *(version for _, version in self.weight_versions)], np.int64)
        return versions[np.searchsorted(starts, self.prompt_length + np.arange(self.response_length), side="right")]

    def reward_value(self, key: str | None = None) -> float:
        """Return the scalar reward; ``key`` selects an entry of a dict reward. Raises DataError if there is none."""
        return reward_value(self, key)

    def find_reward_fault(self) -> str:
        """Describe an invalid reward; "" if there is none or it is valid. A dict may hold entries that are no reward."""
        if self.reward is None or isinstance(self.reward, Mapping):
            return ""
        return f"sample {self.index}: {fault}" if (fault := find_reward_fault(self.reward)) else ""

    def validate(self, declared: tuple[Field, ...] = ()) -> None:
        """Check the length invariants; raises DataError naming the sample and the numbers."""
        n, total = self.response_length, len(self.tokens)
        if not 0 <= n <= total:
            raise DataError(f"sample {self.index}: response_length {n} with only {total} tokens")
        for name in ("loss_mask", "rollout_log_probs"):
            value = getattr(self, name)
            if value is not None and len(value) != n:
                raise DataError(f"sample {self.index}: {name} has {len(value)} entries for {n} response tokens")
        for spec in declared:
            value = self.fields.get(spec.name)
            if value is None:
                if spec.required:
                    raise DataError(f"sample {self.index}: required field {spec.name!r} was not recorded")
                continue
            expected = rows(spec, total, n)
            if spec.align != "sample" and len(value) != expected:
                raise DataError(
                    f"sample {self.index}: field {spec.name!r} ({spec.align}) has {len(value)} rows, expected {expected}"
                )

    @classmethod
    def make_pending(cls, indexes: Iterable[int], **known: Any) -> list[Sample]:
        """Make one sample without a response for each number in ``indexes``, all with the attributes ``known``. They share label, media and the
        prompt's tokens, a column: ``tokens`` is replaced, not extended, by a response."""
        made, blank = list[Sample](), {**vars(_BLANK), **known}
        chat, metadata = type(blank["prompt"]) is not str, bool(blank["metadata"])
        for index in indexes:
            own = blank.copy()
            own["index"], own["weight_versions"], own["fields"] = index, [], {}
            own["metadata"] = copy.deepcopy(own["metadata"]) if metadata else {}
            if chat:
                own["prompt"] = copy.deepcopy(own["prompt"])
            one = _new(cls)
            _set(one, "__dict__", own)
            made.append(one)
        return made

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """Make a sample from plain values by attribute; unknown keys are an error."""
        data = dict(data)
        data["status"] = Status(data.get("status", Status.PENDING))
        data["weight_versions"] = [tuple(v) for v in data.get("weight_versions", [])]
        return cls(**data)


_BLANK = Sample()


def rows(spec: Field, total: int, response_length: int) -> int:
    """Return the number of rows of a field for a sample of ``total`` tokens."""
    return {"response": response_length, "token": total, "token-1": max(total - 1, 0), "sample": 1}[spec.align]
