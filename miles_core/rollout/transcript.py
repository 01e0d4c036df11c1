"""What was sent to engines for one sample and what came back: a tree of turns.

A turn is one answer of an engine and the token ids that were added before it. Turns that continue another one are its
children; two children of one turn, or two beginnings, are branches (a retry, a sub-agent, an edited history). A sample is a
path through the tree: its tokens are those that were sent and generated, never text that was tokenized again. Tokens that an
engine generated are trained on (``loss_mask`` 1), everything else is not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_core.contracts.engine import Response
from miles_core.data.field import Field
from miles_core.data.sample import Sample, Status, rows
from miles_core.errors import DataError
from miles_core.rollout.continuation import first_tokens

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass(eq=False)
class Turn:
    """One answer of an engine.

    Attributes:
        parent: the turn that it continues; None at the beginning of a conversation.
        prompt: the token ids between the end of ``parent`` and the answer; never trained on.
        response: what the engine returned: tokens, log-probs, versions, recorded fields.
        policy: name of the policy that answered.
        start: number of tokens before the answer.
        children: the turns that continue this one.
        discarded: no sample ends with it (a retry that was superseded).
    """

    parent: Turn | None
    prompt: tuple[int, ...]
    response: Response
    policy: str
    start: int
    children: list[Turn] = field(default_factory=list, repr=False)
    discarded: bool = False

    @property
    def end(self) -> int:
        """Number of tokens up to the end of the answer."""
        return self.start + len(self.response.tokens)

    @property
    def path(self) -> list[Turn]:
        """The turns from the beginning of the conversation to this one."""
        found: list[Turn] = [self]
        while found[-1].parent is not None:
            found.append(found[-1].parent)
        return found[::-1]

    @property
    def tokens(self) -> list[int]:
        """All token ids up to the end of the answer."""
        return [token for turn in self.path for token in (*turn.prompt, *turn.response.tokens)]

    def follows(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens``, which continue the parent, begin with this turn's prompt."""
        first = self.start - len(self.prompt)
        return tuple(tokens[first : self.start]) == self.prompt

    def lies_in(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens``, which continue the parent, begin with this turn."""
        return self.follows(tokens) and list(tokens[self.start : self.end]) == self.response.tokens


class Transcript:
    """All turns of one sample, in the order in which they were answered.

    Args:
        sample: number of the sample, for messages.
        decode: token ids -> text without special tokens.
        learns: whether a policy learns from samples; others (a frozen opponent) get none.
    """

    def __init__(
        self, sample: int, decode: Callable[[list[int]], str], learns: Callable[[str], bool] = lambda policy: True
    ) -> None:
        self.sample, self.decode, self.learns = sample, decode, learns
        self.turns: list[Turn] = []
        self.roots: list[Turn] = []

    @property
    def branches(self) -> int:
        """How many turns begin another branch: further beginnings, and further children of a turn."""
        siblings = [self.roots, *(turn.children for turn in self.turns)]
        return sum(max(0, len(each) - 1) for each in siblings)

    @property
    def leaves(self) -> list[Turn]:
        """The last turns of all conversations, without discarded ones."""
        live = [turn for turn in self.turns if not turn.discarded]
        return [turn for turn in live if all(child.discarded for child in turn.children)]

    def find(self, tokens: Sequence[int]) -> Turn | None:
        """The deepest turn that ``tokens`` continue; the latest where several do."""
        found, level = None, self.roots
        while inside := [turn for turn in level if turn.lies_in(tokens)]:
            found = inside[-1]
            level = [child for turn in inside for child in turn.children]
        return found

    def add(self, parent: Turn | None, prompt: Sequence[int], response: Response, policy: str) -> Turn:
        """Record an answer to ``parent``'s tokens followed by ``prompt``.

        Raises:
            DataError: the engine returned another number of log-probs than tokens.
        """
        if len(response.log_probs) != len(response.tokens):
            raise DataError(
                f"sample {self.sample}: the engine returned {len(response.log_probs)} log-probabilities for "
                f"{len(response.tokens)} tokens; the log-probability of a token is unknown, so the sample cannot be used"
            )
        turn = Turn(parent, tuple(prompt), response, policy, (parent.end if parent else 0) + len(prompt))
        self.turns.append(turn)
        (parent.children if parent else self.roots).append(turn)
        return turn

    def cut(self, turn: Turn, count: int, declared: Sequence[Field] = ()) -> Turn:
        """Keep only the first ``count`` tokens of an answer: a turn of its own, which can be continued. The other is discarded.

        Raises:
            DataError: there are not so many tokens, or none is kept.
        """
        if not 0 < count <= len(turn.response.tokens):
            raise DataError(
                f"sample {self.sample}: an answer of {len(turn.response.tokens)} tokens cannot be cut to {count}"
            )
        turn.discarded = True
        kept = first_tokens(turn.response, count, declared)
        kept.text = self.decode(kept.tokens)
        return self.add(turn.parent, turn.prompt, kept, turn.policy)

    def samples(self, sample: Sample, leaves: Iterable[Turn] | None = None) -> list[Sample]:
        """Samples of the paths to ``leaves`` (by default ``self.leaves``), made like ``sample``: one for each policy that
        answered in the path and learns. A turn that several paths share is trained in the first of them only."""
        made: list[Sample] = []
        trained: set[int] = set()
        for leaf in self.leaves if leaves is None else leaves:
            path = leaf.path
            for policy in dict.fromkeys(turn.policy for turn in path):
                own = [turn for turn in path if turn.policy == policy and id(turn) not in trained]
                if own and self.learns(policy):
                    made.append(self._sample(sample, path, policy, own))
                trained |= {id(turn) for turn in own}
        return made

    def _sample(self, like: Sample, path: list[Turn], policy: str, own: list[Turn]) -> Sample:
        one = copy.deepcopy(like)
        one.tokens, one.policy = path[-1].tokens, policy
        first = len(path[0].prompt)
        one.response_length = len(one.tokens) - first
        one.response = self.decode(one.tokens[first:])
        mask = np.zeros(one.response_length, np.int64)
        for turn in own:
            mask[turn.start - first : turn.end - first] = 1
        one.loss_mask = None if mask.all() else mask.tolist()
        return one

    def unused(self, samples: Iterable[Sample]) -> int:
        """How many turns are part of none of ``samples``."""
        used = {id(turn) for sample in samples for turn in self._turns_of(sample.tokens)}
        return sum(id(turn) not in used for turn in self.turns)

    def fill(self, sample: Sample, declared: tuple[Field, ...]) -> None:
        """Set what the engine reported about the tokens of ``sample``: mask, log-probs, versions, fields, status. Values that are
        set already are kept.

        Raises:
            DataError: the sample holds a part of an answer without the rest, or trains tokens that no engine generated.
        """
        found = self._turns_of(sample.tokens)
        mine = [turn for turn in found if turn.policy == (sample.policy or turn.policy)]
        if sample.status not in (Status.ABORTED, Status.FAILED):
            self._check_whole(sample, found)
            if not mine and sample.rollout_log_probs is None:
                raise DataError(
                    f"sample {sample.index}: its tokens do not continue any call of the engine, so they have no "
                    "log-probabilities; set sample.tokens to prompt + generated tokens (never re-tokenise text)"
                )
        if not mine:
            return
        first = sample.prompt_length
        mask = np.zeros(sample.response_length, np.int64)
        logs = np.zeros(sample.response_length, np.float64)
        for turn in mine:
            if turn.start < first:
                raise DataError(
                    f"sample {sample.index}: the engine generated token {turn.start} of its prompt of {first} tokens"
                )
            mask[turn.start - first : turn.end - first] = 1
            logs[turn.start - first : turn.end - first] = turn.response.log_probs
        self._set_mask(sample, mask)
        if sample.rollout_log_probs is None:
            sample.rollout_log_probs = (logs if sample.loss_mask is None else logs * sample.loss_mask).tolist()
        sample.weight_versions = sample.weight_versions or [
            (turn.start + i, version) for turn in mine for i, version in turn.response.weight_versions
        ]
        if sample.status is Status.PENDING:
            sample.status = _STATUS[found[-1].response.finish]
        for spec in declared:
            known = [turn for turn in mine if turn.response.extras.get(spec.name) is not None]
            if spec.name not in sample.fields and known:
                sample.fields[spec.name] = _assemble(spec, sample, known)

    def _set_mask(self, sample: Sample, generated: np.ndarray) -> None:
        if sample.loss_mask is None:
            sample.loss_mask = None if generated.all() else generated.tolist()
        elif sample.rollout_log_probs is None and len(sample.loss_mask) == len(generated):
            strange = np.flatnonzero((np.asarray(sample.loss_mask) == 1) & (generated == 0))
            if len(strange):
                raise DataError(
                    f"sample {sample.index}: loss_mask trains token {int(strange[0])} of its response, which the engine of the policy "
                    f"{sample.policy or 'of the run'} did not generate, so it has no log-probability; set 0 there"
                )

    def _turns_of(self, tokens: Sequence[int]) -> list[Turn]:
        """All turns that ``tokens`` hold whole."""
        found: list[Turn] = []
        level = self.roots
        while inside := [turn for turn in level if turn.lies_in(tokens)]:
            found += inside
            level = [child for turn in inside for child in turn.children]
        return found

    def _check_whole(self, sample: Sample, found: list[Turn]) -> None:
        """Every answer that begins in the sample is whole in it, or is masked on purpose."""
        covered = np.zeros(len(sample.tokens), bool)
        for turn in found:
            covered[turn.start : turn.end] = True
        if sample.loss_mask is not None and len(sample.loss_mask) == sample.response_length:
            covered[sample.prompt_length :] |= np.asarray(sample.loss_mask) == 0
        inside = {id(turn) for turn in found}
        for turn in self.turns:
            begins = turn.parent is None or id(turn.parent) in inside
            if id(turn) in inside or not begins or not turn.follows(sample.tokens):
                continue
            rest = sample.tokens[turn.start :]
            count = _common(turn.response.tokens, rest)
            after = turn.response.tokens[1:]
            shifted = (
                len(after) if not count and after and after == rest[: len(after)] else 0
            )  # the first one is dropped
            if not covered[turn.start : turn.start + (count or shifted)].all():
                raise DataError(_broken(sample, turn, count))


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _broken(sample: Sample, turn: Turn, count: int) -> str:
    lost, at = turn.response.tokens[count], turn.start + count
    instead = f"the token {sample.tokens[at]} follows" if at < len(sample.tokens) else "it ends there"
    return (
        f"sample {sample.index} holds {count} of the {len(turn.response.tokens)} tokens that the engine generated after its first "
        f"{turn.start} tokens: the token {lost} is dropped or replaced ({instead}); keep response.tokens whole (a stop token belongs to "
        "it), cut the answer with transcript.cut, or set loss_mask to 0 on that part"
    )


def _assemble(spec: Field, sample: Sample, turns: list[Turn]) -> Any:
    total = rows(spec, len(sample.tokens), sample.response_length)
    offset = sample.prompt_length
    found = [(t.start - offset if spec.align == "response" else 0, t.response.extras[spec.name]) for t in turns]
    if spec.ragged:
        pieces: list[Any] = [np.zeros(0, spec.dtype)] * total
        for start, values in reversed(found):  # the earliest turn that knows a row has the last word
            pieces[start : start + len(values)] = [np.asarray(row, spec.dtype) for row in values]
        return pieces
    arrays = [(start, np.asarray(values, spec.dtype)) for start, values in found]
    if len(arrays) == 1 and arrays[0][0] == 0 and len(arrays[0][1]) == total:
        return arrays[0][1]  # one turn that knows every row: the usual case
    shape = next((a.shape[1:] for _, a in arrays if len(a)), arrays[0][1].shape[1:])
    out = np.full((total, *shape), spec.pad, spec.dtype)
    for start, array in reversed(arrays):
        if len(array):
            out[start : start + len(array)] = array
    return out
