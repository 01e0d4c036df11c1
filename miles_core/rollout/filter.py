"""Group filters: decide which groups of samples are used for training.

A filter is ``keep(args, samples) -> bool``; ``samples`` holds all samples of one group with their rewards. ``nonzero_std``
implements DAPO's dynamic sampling (arXiv 2503.14476, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from miles_core.data.sample import reward_value
from miles_core.errors import ConfigError, DataError
from miles_core.reward.custom import load_function
from miles_core.text import describe_notes

FLAG = "--dynamic-sampling-filter-path"
GroupFilter = Callable[[Any, Sequence[Any]], bool]


def nonzero_std(args: Any, samples: Sequence[Any]) -> bool:
    """Keep a group unless all its rewards are equal, because every group estimator then gives advantage 0.

    If rewards are dicts, the filter compares the entry ``args.reward_key``.
    """
    rewards = [reward_value(sample, getattr(args, "reward_key", None)) for sample in samples]
    return max(rewards) != min(rewards)


FILTERS: dict[str, GroupFilter] = {"nonzero_std": nonzero_std}


def load_filter(spec: str) -> GroupFilter:
    """Load the filter of ``--dynamic-sampling-filter-path``: a name in ``FILTERS``, ``f.py[:keep]`` or a module path.

    The returned filter raises DataError if the user's function raises or does not return a bool.

    Raises:
        ConfigError: the filter cannot be loaded.
    """
    if spec in FILTERS:
        return FILTERS[spec]
    if not spec.endswith(".py") and ":" not in spec and "." not in spec:
        raise ConfigError(f"{FLAG} {spec}: not one of {', '.join(FILTERS)}, and not path/to/file.py[:function]")
    function = load_function(spec, flag=FLAG, default="keep", parameters=("args", "samples"))
    if function.is_async:
        raise ConfigError(
            f"{FLAG} {spec}: {function.name} is async; a filter is called synchronously, define it with def"
        )

    def keep(args: Any, samples: Sequence[Any]) -> bool:
        group = f"group {getattr(samples[0], 'group_index', None)}" if samples else "an empty group"
        try:
            answer = function(args, samples)
        except Exception as error:
            raise DataError(
                f"the filter {function.name} ({function.origin}) raised {type(error).__name__} on {group}: {error}"
                + describe_notes(error)
            ) from error
        # numpy.bool_ is not a bool; its method item() converts it.
        answer = answer.item() if hasattr(answer, "item") else answer
        if not isinstance(answer, bool):
            raise DataError(
                f"the filter {function.name} ({function.origin}) returned {answer!r} for {group}; "
                f"return True to keep the group or False to drop it"
            )
        return answer

    return keep
