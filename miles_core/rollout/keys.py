"""Keys of requests.

The key of a request seeds its random numbers and identifies it when it is aborted. A key is a 63-bit integer with two parts: the low 42
bits hold the sample's number, the high bits hold the index of the call within the sample. The key of the first call therefore equals the
sample's number. Samples of training, evaluation and verification are numbered from different offsets, so no two requests in flight share
a key.
"""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.errors import MilesError

_SAMPLE_BITS = 42
#: Limits on the number of samples in a run and of engine calls per sample (keys are signed 64-bit integers).
MAX_SAMPLES, MAX_CALLS = 1 << _SAMPLE_BITS, 1 << (63 - _SAMPLE_BITS)
#: First number of evaluation samples: they share no random number with training samples.
FIRST_EVALUATION = 1 << 40
#: First number of samples that verify the weights.
FIRST_PROBE = 1 << 41


def request_key(sample: int, call: int) -> int:
    """Return the key of an engine call.

    Args:
        sample: the sample's number, from 0.
        call: index of the call within the sample, from 0. A request that continues an aborted one reuses its index.

    Raises:
        MilesError: an argument is out of range.
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
        """Return the key of this sample's next call."""
        call = self._calls.get(sample, 0)
        key = request_key(sample, call)
        self._calls[sample] = call + 1
        return key

    def keys_of(self, samples: Iterable[int]) -> list[int]:
        """Return every key issued to these samples; the caller aborts these requests when it drops the samples."""
        return [request_key(sample, call) for sample in samples for call in range(self._calls.get(sample, 0))]

    def forget(self, samples: Iterable[int]) -> None:
        """Reset the call count of these samples. A sample that is generated again starts from its first key."""
        for sample in samples:
            self._calls.pop(sample, None)
