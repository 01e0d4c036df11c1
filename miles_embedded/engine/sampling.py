"""Sample tokens from logits, independently of the composition of the batch.

The random number of a token is a function of (seed, key, position, stream) only, computed by a counter-based integer hash
(SplitMix64's finaliser, Steele, Lea and Flood 2014) in wrapping int64 arithmetic, so CPU and CUDA produce the same bits. The token
is chosen by inverting the cumulative distribution in vocabulary order. Cumulative sums are float64: in float32 the tail of a large
vocabulary is lost to rounding, and another order of summation on another device would change tokens.

Top-k and top-p both apply to the temperature-scaled full distribution. Tokens are ranked by probability (ties by id). Top-k keeps
the first k ranks, top-p the shortest prefix of the ranks whose mass reaches p; the support is the intersection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from miles_core.contracts.engine import Sampling
from miles_core.errors import NonFiniteError
from miles_embedded.model.operations import LogSoftmax, divide_by_temperature, log_softmax

#: Largest support of a truncated distribution. Limiting the distribution itself keeps every recorded support exact.
SUPPORT_CAP = 4096
#: Number of top ranks to try before sorting the whole vocabulary.
_FIRST_RANKS = 1024


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


#: int64 arithmetic that wraps: a tensor or an array.
Integers = TypeVar("Integers", Tensor, np.ndarray)

_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_A = _signed(0xBF58476D1CE4E5B9)
_MIX_B = _signed(0x94D049BB133111EB)


def _mix(x: Integers) -> Integers:
    # >> is arithmetic on int64; the masks make it logical.
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_A
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_B
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@cache
def stream_start(seed: int, stream: int = 0) -> int:
    """Return the start value of the hash for a stream's random numbers, int64."""
    state = torch.full((), _signed(seed & (1 << 64) - 1), dtype=torch.int64)
    return int(_mix(state + _GOLDEN + stream * 0x632BE59B))


def uniform(seed: int, keys: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """Return one number in (0, 1) per (key, position).

    Args:
        seed: the run's seed.
        keys: [n] int64 request keys.
        positions: [n] int64 index of the token in its sequence, prompt included.
        stream: selects an independent draw for the same token; 0 is the draw of the token itself.

    Returns:
        [n] float64, multiples of 2**-49: at least 2**-49 and at most 1 - 2**-49.
    """
    return uniform_from(stream_start(seed, stream), keys, positions)


def uniform_from(start: int | Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Return ``uniform`` for the streams that start from ``start`` (see ``stream_start``); the arguments are broadcast."""
    if keys.is_cpu and isinstance(start, int):  # numpy needs a third of the time for few numbers
        return torch.from_numpy((_top(keys.numpy(), positions.numpy(), start).astype(np.float64) + 0.5) * 2.0**-48)
    return (_top(keys, positions, start).double() + 0.5) * 2.0**-48


def _top(keys: Integers, positions: Integers, start: int | Integers) -> Integers:
    """The upper 48 bits of the hash, int64."""
    state = _mix(keys * _GOLDEN + start)
    state = _mix(state + positions * _GOLDEN)
    return (state >> 16) & ((1 << 48) - 1)


def pick(probs: Tensor, u: Tensor) -> Tensor:
    """Invert the cumulative distribution of probs [n, vocab] (not necessarily normalised) at u [n] in (0, 1); returns [n] int64.

    The result is the first index whose cumulative sum exceeds u * total. The sum increases there, so its probability is not zero. As
    u <= 1 - 2**-49, the product stays below the total in float64.
    """
    cumulative = probs.double().cumsum(-1)
    target = (u * cumulative[:, -1]).unsqueeze(1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


@dataclass
class Params:
    """Sampling parameters of n logits rows. A number applies to every row; a tensor [n, 1] holds a value per row."""

    temperature: float | Tensor
    top_k: int | Tensor = -1
    top_p: float | Tensor = 1.0
    greedy: bool | Tensor = False

    @property
    def truncated(self) -> bool:
        """Whether the support of some row is smaller than the vocabulary."""
        return not (isinstance(self.top_k, int) and self.top_k <= 0 and self.top_p == 1.0)

    def repeat(self, counts: Tensor | None) -> Params:
        """Repeat the parameters of each row ``counts`` [n] times; None repeats them once."""
        if counts is None:
            return self
        each = {n: x.repeat_interleave(counts, 0) for n, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **each)


def params_of(samplings: Sequence[Sampling], device: torch.device | str = "cpu") -> Params:
    """Make the parameters of n logits rows; plain numbers where all rows agree, which is the fast case."""
    first = samplings[0]
    if all(s is first or s == first for s in samplings):
        greedy = first.temperature == 0
        if greedy or not first.truncated:
            return Params(first.temperature, greedy=greedy)
        return Params(first.temperature, first.top_k, first.top_p)
    cold = [s.temperature == 0 for s in samplings]
    temperature = [1.0 if c else s.temperature for s, c in zip(samplings, cold, strict=True)]
    top_k = [s.top_k if s.truncated else -1 for s in samplings]
    top_p = [s.top_p if s.truncated else 1.0 for s in samplings]
    same = max(top_k) <= 0 and min(top_p) >= 1.0

    def column(values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

    return Params(
        column(temperature, torch.float32),
        -1 if same else column(top_k, torch.int64),
        1.0 if same else column(top_p, torch.float64),
        column(cold, torch.bool) if any(cold) else False,
    )


@dataclass
class Distribution:
    """The distribution that n tokens are sampled from.

    Attributes:
        log_probs: [n, vocab] float32 of the sampled distribution; -inf outside the support, a point mass for greedy rows.
        full: [n, vocab] float32 over the whole vocabulary at the row's temperature (1 for greedy rows); the same tensor as
            ``log_probs`` where nothing is truncated.
        support: [n, vocab] bool; None where nothing is truncated.
        capped: [n] bool, whether SUPPORT_CAP reduced the support of the row; None where nothing is truncated.
    """

    log_probs: Tensor
    full: Tensor
    support: Tensor | None = None
    capped: Tensor | None = None


def distribution(logits: Tensor, params: Params, normalize: LogSoftmax = log_softmax) -> Distribution:
    """Compute the sampled distribution from logits [n, vocab]. Greedy rows choose the first maximum. ``normalize``: the model's
    ``Operations.log_softmax``."""
    logits = logits.float()
    if params.greedy is True:
        return Distribution(_point(logits), normalize(logits))
    full = normalize(divide_by_temperature(logits, params.temperature))
    out = Distribution(full, full)
    if params.truncated:
        support, capped = _support(full, params.top_k, params.top_p)
        kept = normalize(torch.where(support, full, float("-inf")))
        out = Distribution(kept, full, support, capped)
    if isinstance(params.greedy, Tensor):
        out.log_probs = torch.where(params.greedy, _point(logits), out.log_probs)
    return out


def _point(logits: Tensor) -> Tensor:
    return torch.full_like(logits, float("-inf")).scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)


def _support(log_probs: Tensor, top_k: int | Tensor, top_p: float | Tensor) -> tuple[Tensor, Tensor]:
    """Truncate the distributions of n rows.

    Args:
        log_probs: [n, vocab].
        top_k, top_p: one value for all rows, or [n, 1]; a row with top_k <= 0 and top_p = 1 is not truncated.

    Returns:
        the support, [n, vocab] bool, and the rows whose support SUPPORT_CAP reduced, [n] bool. The cap does not apply to rows that
        are not truncated.
    """
    index, keep = _rank(log_probs.double().exp(), top_k, top_p)
    keep[:, 0] = True  # top_p = 0 still keeps the most likely token
    capped = torch.zeros(len(keep), dtype=torch.bool, device=keep.device)
    if keep.shape[1] > SUPPORT_CAP:
        truncated = torch.ones_like(keep[:, :1])
        if isinstance(top_k, Tensor) or isinstance(top_p, Tensor):
            truncated &= ~((top_k <= 0) & (torch.as_tensor(top_p, device=keep.device) >= 1.0))
        capped = (keep[:, SUPPORT_CAP:].any(-1, keepdim=True) & truncated).squeeze(1)
        keep[:, SUPPORT_CAP:] &= ~truncated
    support = torch.zeros(log_probs.shape, dtype=torch.bool, device=keep.device).scatter_(-1, index, keep)
    return support, capped


def _rank(probs: Tensor, top_k: int | Tensor, top_p: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids of the most likely tokens, [n, ranks] in descending order, and which of them top-k and top-p keep. Sorts the whole
    vocabulary only if the first ranks do not determine the support."""
    vocab = probs.shape[-1]
    for ranks in (min(_FIRST_RANKS, vocab), vocab):
        # A stable full sort ranks equal probabilities by id; topk leaves the order of ties to the device.
        if ranks < vocab:
            values, index = probs.topk(ranks, dim=-1)
        else:
            values, index = probs.sort(dim=-1, descending=True, stable=True)
        before = values.cumsum(-1) - values
        # With top_p = 1 keep every rank: rounded sums may reach 1 before the last rank.
        keep = (before < top_p) | torch.as_tensor(top_p >= 1, device=before.device)
        if isinstance(top_k, Tensor):
            keep &= (torch.arange(ranks, device=keep.device) < top_k) | (top_k <= 0)
        elif top_k > 0:
            keep[:, top_k:] = False
        if ranks == vocab or _is_settled(values, keep):
            break
    return index, keep


def _is_settled(values: Tensor, keep: Tensor) -> bool:
    """Whether the cut is inside the sorted ranks and not between equal probabilities."""
    if bool(keep[:, -1].any()):
        return False
    cut = keep.sum(-1, keepdim=True).clamp(min=1)
    return not bool((values.gather(-1, cut - 1) == values.gather(-1, cut)).any())


@dataclass
class Sampled:
    """n chosen tokens.

    Attributes:
        tokens: [n] ids; -1 for a row that joined while the step was in flight.
        log_probs: [n], over the support for rows that record it, otherwise over the full vocabulary.
        supports: support of each recording row, an empty array for other rows; None when no row records.
        capped: whether SUPPORT_CAP reduced each row's support; None when no row records.
    """

    tokens: Sequence[int] | np.ndarray
    log_probs: Sequence[float] | np.ndarray
    supports: list[np.ndarray] | None = None
    capped: list[bool] | None = None


def sample(
    logits: Tensor, params: Params, u: Tensor, recording: Tensor | None = None, normalize: LogSoftmax = log_softmax
) -> Sampled:
    """Sample one token per row.

    Args:
        logits: [n, vocab].
        params: sampling parameters of the rows.
        u: [n] from ``uniform``.
        recording: [n] bool, rows that record their support; None for no row.
        normalize: see ``distribution``.
    """
    dist = distribution(logits, params, normalize)
    index = logits.argmax(-1) if params.greedy is True else pick(dist.log_probs.exp(), u)
    return record(dist, index, recording)


def sample_on_device(
    logits: Tensor, params: Params, u: Tensor, normalize: LogSoftmax = log_softmax
) -> tuple[Tensor, Tensor]:
    """Sample one token per row from logits [n, vocab] without truncation, and without synchronising with the device.

    Returns:
        tokens [n] int64 and their log-probabilities [n] float32 over the vocabulary. Pass both to ``check_finite`` once they are
        on the host: where logits are not finite, the token exceeds the vocabulary or its log-probability is NaN.
    """
    dist = distribution(logits, params, normalize)
    tokens = pick(dist.log_probs.exp(), u)
    index = tokens.clamp(max=logits.shape[-1] - 1).unsqueeze(1)
    return tokens, dist.full.gather(-1, index).squeeze(1)


def check_finite(tokens: Sequence[int] | np.ndarray, log_probs: Sequence[float] | np.ndarray, vocabulary: int) -> None:
    """Raise NonFiniteError if tokens or log-probabilities show that their logits contained NaN or infinity."""
    if np.asarray(tokens).max() >= vocabulary or np.isnan(log_probs).any():
        raise NonFiniteError("the model's logits are not finite; its weights or the last update hold NaN or infinity")


def record(dist: Distribution, tokens: Tensor, recording: Tensor | None = None) -> Sampled:
    """Return log-probabilities and supports of chosen ``tokens`` [n]. Raises NonFiniteError when logits are not finite."""
    last = dist.full.shape[-1] - 1
    index = tokens.clamp(max=last).unsqueeze(1)
    log_probs = dist.full.gather(-1, index)
    if recording is None or dist.support is None:
        out = Sampled(tokens.tolist(), log_probs.squeeze(1).tolist())
    else:
        wanted = recording.unsqueeze(1)
        log_probs = torch.where(wanted, dist.log_probs.gather(-1, index), log_probs)
        capped = dist.capped.tolist() if dist.capped is not None else None
        out = Sampled(tokens.tolist(), log_probs.squeeze(1).tolist(), _ids(dist.support & wanted), capped)
    check_finite(out.tokens, out.log_probs, last + 1)
    return out


def _ids(mask: Tensor) -> list[np.ndarray]:
    """Return the ascending int32 ids that are set in each row of mask [n, vocab]."""
    ids = mask.nonzero()[:, 1].to(torch.int32).cpu().numpy()
    return np.split(ids, mask.sum(-1).cumsum(0).tolist()[:-1])
