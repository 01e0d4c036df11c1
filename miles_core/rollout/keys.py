"""Keys of engine requests: what a request's random numbers depend on, and the name it is aborted by.

A key is a 63-bit integer with two parts: the number of the sample in the low 42 bits, and the number of the call within
the sample above them. The first call's key is the sample's number. Samples of training, evaluation and verification
are numbered from different starts, so no two requests in flight share a key.
"""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.errors import MilesError

_SAMPLE_BITS = 42
#: How many samples a run can number, and how many engine calls a sample can make (keys are signed 64-bit integers).
MAX_SAMPLES, MAX_CALLS = 1 << _SAMPLE_BITS, 1 << (63 - _SAMPLE_BITS)
#: Evaluation samples are numbered from here: they share no random number with training samples.
FIRST_EVALUATION = 1 << 40
#: Samples that verify the weights are numbered from here.
FIRST_PROBE = 1 << 41


def request_key(sample: int, call: int) -> int:
    """The key of a sample's engine call.

    Args:
        sample: the sample's number, from 0.
        call: the number of the call within the sample, from 0. A request that continues an aborted one belongs to its call.

    Raises:
        MilesError: a number is out of range.
    """
    if not 0 <= sample < MAX_SAMPLES:
        raise MilesError(
            f"sample {sample} has no key for its random numbers: samples are numbered 0 to {MAX_SAMPLES - 1}"
        )
    if not 0 <= call < MAX_CALLS:
        raise MilesError(
            f"sample {sample} calls the engine more than {MAX_CALLS} times; end its generate function earlier"
        )
    return call << _SAMPLE_BITS | sample


class RequestKeys:
    """Numbers the engine calls of each sample, from its first call until ``forget``."""

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}

    def next(self, sample: int) -> int:
        """The key of the next call of this sample."""
        call = self._calls.get(sample, 0)
        key = request_key(sample, call)
        self._calls[sample] = call + 1
        return key

    def issued(self, samples: Iterable[int]) -> list[int]:
        """Every key given to these samples: what to abort when they are dropped."""
        return [request_key(sample, call) for sample in samples for call in range(self._calls.get(sample, 0))]

    def forget(self, samples: Iterable[int]) -> None:
        """These samples make no further call; one that is generated again starts from its first key."""
        for sample in samples:
            self._calls.pop(sample, None)
