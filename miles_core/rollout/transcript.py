"""Transcript of the requests and responses of one sample: a tree of turns.

A turn consists of one response and the token ids added before it. Its children are the turns that continue it. Two children
of a turn, or two roots, are branches (a retry, a sub-agent, an edited history). A sample is a path through the tree: its
tokens are exactly those sent and generated, never re-tokenized text. Generated tokens are trained on (``loss_mask`` 1); all
other tokens are not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_core.contracts.engine import Response
from miles_core.data.column import MASK, TOKENS, Column, as_column, join_columns
from miles_core.data.field import Field
from miles_core.data.media import Media
from miles_core.data.sample import Sample, Status, rows
from miles_core.errors import DataError
from miles_core.rollout.continuation import first_tokens

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass(eq=False)
class Turn:
    """One response of an engine, with the tokens added before it.

    Attributes:
        parent: the turn that this one continues; None for the first turn of a conversation.
        prompt: the token ids between the end of ``parent`` and the response; never trained on.
        response: the engine's response: tokens, log-probs, versions, recorded fields.
        policy: name of the policy that generated the response.
        start: number of tokens before the response.
        media: the media of all tokens before the response, those of ``parent`` included.
        children: the turns that continue this one.
        discarded: no sample ends with this turn (a superseded retry).
    """

    parent: Turn | None
    prompt: Column
    response: Response
    policy: str
    start: int
    media: tuple[Media, ...] = ()
    children: list[Turn] = field(default_factory=list, repr=False)
    discarded: bool = False

    @property
    def end(self) -> int:
        """Number of tokens up to the end of the response."""
        return self.start + len(self.response.tokens)

    @property
    def path(self) -> list[Turn]:
        """The turns from the root to this turn."""
        turns: list[Turn] = [self]
        while turns[-1].parent is not None:
            turns.append(turns[-1].parent)
        return turns[::-1]

    @property
    def tokens(self) -> Column:
        """All token ids up to the end of the response."""
        return join_columns(part for turn in self.path for part in (turn.prompt, turn.response.tokens))

    def follows(self, tokens: Sequence[int]) -> bool:
        """Return whether this turn's prompt follows the parent in ``tokens``. The caller ensures that ``tokens`` contain the parent."""
        return self.prompt == tokens[self.start - len(self.prompt) : self.start]

    def is_prefix_of(self, tokens: Sequence[int]) -> bool:
        """Return whether the path to this turn is a prefix of ``tokens``. The caller ensures that ``tokens`` contain the parent."""
        return self.follows(tokens) and self.response.tokens == tokens[self.start : self.end]


class Transcript:
    """All turns of one sample, in the order of their responses.

    Args:
        sample: number of the sample, for messages.
        decode: token ids -> text without special tokens.
        learns: policy name -> whether the policy is trained. ``samples`` makes no sample for others (a frozen opponent).
    """

    def __init__(
        self, sample: int, decode: Callable[[Sequence[int]], str], learns: Callable[[str], bool] = lambda policy: True
    ) -> None:
        self.sample, self.decode, self.learns = sample, decode, learns
        self.turns: list[Turn] = []
        self.roots: list[Turn] = []

    @property
    def branches(self) -> int:
        """Number of additional branches: roots after the first, and children of a turn after its first."""
        return sum(max(0, len(turns) - 1) for turns in [self.roots, *(turn.children for turn in self.turns)])

    @property
    def leaves(self) -> list[Turn]:
        """The last turns of all branches, without discarded turns."""
        return [turn for turn in self.turns if not turn.discarded and all(child.discarded for child in turn.children)]

    def find(self, tokens: Sequence[int]) -> Turn | None:
        """Return the deepest turn that is a prefix of ``tokens``; the latest one if there are several, None if there is none."""
        deepest, level = None, self.roots
        while inside := [turn for turn in level if turn.is_prefix_of(tokens)]:
            deepest = inside[-1]
            level = [child for turn in inside for child in turn.children]
        return deepest

    def add(
        self,
        parent: Turn | None,
        prompt: Sequence[int],
        response: Response,
        policy: str,
        media: tuple[Media, ...] = (),
    ) -> Turn:
        """Record the response to ``parent``'s tokens followed by ``prompt``.

        Raises:
            DataError: the numbers of log-probs and of tokens differ.
        """
        if len(response.log_probs) != len(response.tokens):
            raise DataError(
                f"sample {self.sample}: the engine returned {len(response.log_probs)} log-probabilities for "
                f"{len(response.tokens)} tokens; the log-probability of a token is unknown, so the sample cannot be used"
            )
        start = (parent.end if parent else 0) + len(prompt)
        turn = Turn(parent, as_column(prompt, TOKENS), response, policy, start, media)
        self.turns.append(turn)
        (parent.children if parent else self.roots).append(turn)
        return turn

    def cut(self, turn: Turn, count: int, declared: Sequence[Field] = ()) -> Turn:
        """Add a turn with only the first ``count`` tokens of the response, which can be continued, and discard ``turn``.

        Raises:
            DataError: ``count`` is not between 1 and the number of tokens.
        """
        if not 0 < count <= len(turn.response.tokens):
            raise DataError(
                f"sample {self.sample}: an answer of {len(turn.response.tokens)} tokens cannot be cut to {count}"
            )
        turn.discarded = True
        kept = first_tokens(turn.response, count, declared)
        kept.text = self.decode(kept.tokens)
        return self.add(turn.parent, turn.prompt, kept, turn.policy, turn.media)

    def samples(self, sample: Sample, leaves: Iterable[Turn] | None = None) -> list[Sample]:
        """Make samples of the paths to ``leaves`` (default ``self.leaves``), as copies of ``sample`` with the path's tokens.

        Each path yields one sample per trained policy that generated in it. A turn shared by several paths is trained in the first
        of them only.
        """
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
        one.tokens, one.policy, one.media = path[-1].tokens, policy, path[-1].media
        first = len(path[0].prompt)
        one.response_length = len(one.tokens) - first
        one.response = self.decode(one.tokens[first:])
        mask = np.zeros(one.response_length, np.int8)
        for turn in own:
            mask[turn.start - first : turn.end - first] = 1
        one.loss_mask = None if mask.all() else Column.of(mask, MASK)
        return one

    def unused(self, samples: Iterable[Sample]) -> int:
        """Return the number of turns that no sample of ``samples`` contains."""
        used = {id(turn) for sample in samples for turn in self._turns_of(sample.tokens)}
        return sum(id(turn) not in used for turn in self.turns)

    def fill(self, sample: Sample, declared: tuple[Field, ...]) -> None:
        """Set the loss mask, log-probs, versions, fields and status of ``sample`` from the recorded responses. Values that are
        already set are kept.

        Raises:
            DataError: the sample contains only a part of a response, or trains tokens that no engine generated.
        """
        turns = self._turns_of(sample.tokens)
        mine = [turn for turn in turns if turn.policy == (sample.policy or turn.policy)]
        if sample.status not in (Status.ABORTED, Status.FAILED):
            if len(turns) < len(self.turns):
                self._check_whole(sample, turns)
            if not mine and sample.rollout_log_probs is None:
                raise DataError(_describe_unknown(sample, turns))
        if not mine:
            return
        whole = len(mine) == 1 and (mine[0].start, mine[0].end) == (sample.prompt_length, len(sample.tokens))
        if whole and sample.loss_mask is None:  # usual case: a turn is the whole response
            logs = mine[0].response.log_probs[:]
        else:
            logs = self._mask_others(sample, mine)
        if sample.rollout_log_probs is None:
            sample.rollout_log_probs = logs if sample.loss_mask is None else logs * np.asarray(sample.loss_mask)
        sample.weight_versions = sample.weight_versions or [
            (turn.start + i, version) for turn in mine for i, version in turn.response.weight_versions
        ]
        if sample.status is Status.PENDING:
            sample.status = _STATUS[turns[-1].response.finish]
        for spec in declared:
            reporting = [turn for turn in mine if turn.response.extras.get(spec.name) is not None]
            if spec.name not in sample.fields and reporting:
                sample.fields[spec.name] = _assemble(spec, sample, reporting)

    def _mask_others(self, sample: Sample, mine: list[Turn]) -> np.ndarray:
        """Set the loss mask of ``sample`` to 0 where no turn of ``mine`` generated the token. Returns the log-probs, 0.0 there."""
        first = sample.prompt_length
        generated = np.zeros(sample.response_length, np.int8)
        logs = np.zeros(sample.response_length, np.float64)
        for turn in mine:
            if turn.start < first:
                raise DataError(
                    f"sample {sample.index}: the engine generated token {turn.start} of its prompt of {first} tokens"
                )
            generated[turn.start - first : turn.end - first] = 1
            logs[turn.start - first : turn.end - first] = turn.response.log_probs
        if sample.loss_mask is None:
            sample.loss_mask = None if generated.all() else Column.of(generated, MASK)
        elif sample.rollout_log_probs is None and len(sample.loss_mask) == len(generated):
            foreign = np.flatnonzero((np.asarray(sample.loss_mask) == 1) & (generated == 0))
            if len(foreign):
                raise DataError(
                    f"sample {sample.index}: loss_mask trains token {int(foreign[0])} of its response, which the engine of the policy "
                    f"{sample.policy or 'of the run'} did not generate, so it has no log-probability; set 0 there"
                )
        return logs

    def _turns_of(self, tokens: Sequence[int]) -> list[Turn]:
        """Return all turns that ``tokens`` contain completely."""
        turns: list[Turn] = []
        level = self.roots
        while inside := [turn for turn in level if turn.is_prefix_of(tokens)]:
            turns += inside
            level = [child for turn in inside for child in turn.children]
        return turns

    def _check_whole(self, sample: Sample, complete: list[Turn]) -> None:
        """Raise DataError if the sample contains only a part of a response, unless the loss mask of that part is 0."""
        covered = np.zeros(len(sample.tokens), bool)
        for turn in complete:
            covered[turn.start : turn.end] = True
        covered[: sample.prompt_length] = True  # a history that was rendered again may begin like an answer
        if sample.loss_mask is not None and len(sample.loss_mask) == sample.response_length:
            covered[sample.prompt_length :] |= np.asarray(sample.loss_mask) == 0
        inside = {id(turn) for turn in complete}
        for turn in self.turns:
            begins = turn.parent is None or id(turn.parent) in inside
            if id(turn) in inside or not begins or not turn.follows(sample.tokens):
                continue
            rest = sample.tokens[turn.start :]
            count = _common_prefix(turn.response.tokens, rest)
            after = turn.response.tokens[1:]
            shifted = (
                len(after) if not count and after and after == rest[: len(after)] else 0
            )  # the sample dropped the first token
            if not covered[turn.start : turn.start + (count or shifted)].all():
                raise DataError(_describe_cut(sample, turn, count))


def add_response(sample: Sample, response: Response, declared: Sequence[Field]) -> Sample:
    """Complete a pending sample, which is its prompt, with a whole response: the result of ``fill`` for a sample of one turn."""
    prompt, start, own = sample.tokens, len(sample.tokens), sample.__dict__  # all values are columns already
    own["tokens"] = tokens = Column(TOKENS, prompt)
    tokens.extend(response.tokens)
    own["response"], own["response_length"] = response.text, len(response.tokens)
    own["rollout_log_probs"], own["status"] = response.log_probs, _STATUS[response.finish]
    own["weight_versions"] = [(start + i, version) for i, version in response.weight_versions]
    for spec in declared if response.extras else ():
        if response.extras.get(spec.name) is not None:
            turn = Turn(None, prompt, response, sample.policy, len(prompt))
            sample.fields[spec.name] = _assemble(spec, sample, [turn])
    return sample


def _common_prefix(one: Sequence[int], two: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _describe_unknown(sample: Sample, turns: Sequence[Turn]) -> str:
    """Describe a sample that no turn of its policy generated; ``turns`` are those of other policies that its tokens contain."""
    if turns:
        others = ", ".join(dict.fromkeys(turn.policy for turn in turns))
        return (
            f"sample {sample.index}: its policy is {sample.policy}, but the policy {others} generated its tokens, so they have no "
            f"log-probabilities; pass policy={sample.policy!r} to the call that generates them"
        )
    return (
        f"sample {sample.index}: its tokens do not continue any call of the engine, so they have no log-probabilities; set "
        "sample.tokens to prompt + generated tokens (never re-tokenise text)"
    )


def _describe_cut(sample: Sample, turn: Turn, count: int) -> str:
    """Describe how ``sample`` departs from the response of ``turn`` after ``count`` tokens."""
    lost, at = turn.response.tokens[count], turn.start + count
    instead = f"the token {sample.tokens[at]} follows" if at < len(sample.tokens) else "it ends there"
    return (
        f"sample {sample.index} holds {count} of the {len(turn.response.tokens)} tokens that the engine generated after its first "
        f"{turn.start} tokens: the token {lost} is dropped or replaced ({instead}); keep response.tokens whole (a stop token belongs to "
        "it), cut the answer with transcript.cut, or set loss_mask to 0 on that part"
    )


def _assemble(spec: Field, sample: Sample, turns: list[Turn]) -> Any:
    """Align the rows of a field that ``turns`` report with the sample; rows that no turn reports hold the pad value. If several turns report a
    row, the earliest one wins, or the last one if the field is declared ``newest``."""
    total = rows(spec, len(sample.tokens), sample.response_length)
    shift = {"response": -sample.prompt_length, "token-1": -1}.get(spec.align, 0)  # rows end with their turn
    extras = [(turn.end + shift, turn.response.extras[spec.name]) for turn in turns]
    reported = [(0 if spec.align == "sample" else end - len(values), values) for end, values in extras]
    written = reported if spec.newest else reported[::-1]
    if spec.ragged:
        pieces: list[Any] = [np.zeros(0, spec.dtype)] * total
        for start, values in written:
            pieces[start : start + len(values)] = [np.asarray(row, spec.dtype) for row in values]
        return pieces
    arrays = [(start, np.asarray(values, spec.dtype)) for start, values in written]
    if len(arrays) == 1 and arrays[0][0] == 0 and len(arrays[0][1]) == total:
        return arrays[0][1]  # usual case: a single turn reports every row

    shape = next((a.shape[1:] for _, a in arrays if len(a)), arrays[0][1].shape[1:])
    out = np.full((total, *shape), spec.pad, spec.dtype)
    for start, array in arrays:
        if len(array):
            out[start : start + len(array)] = array
    return out
