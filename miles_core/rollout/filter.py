"""Group filters: which groups of rollouts are worth a gradient.

A filter is ``keep(args, samples) -> bool``, where ``samples`` are all samples of one group with their rewards. DAPO's
dynamic sampling (arXiv 2503.14476, section 3.2) is ``nonzero_std``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from miles_core.data.reward_value import reward_value
from miles_core.errors import ConfigError, DataError
from miles_core.reward.custom import load_function

FLAG = "--dynamic-sampling-filter-path"
GroupFilter = Callable[[Any, Sequence[Any]], bool]


def nonzero_std(args: Any, samples: Sequence[Any]) -> bool:
    """Keep a group whose rewards are not all equal; the others have advantage 0 with every group estimator.

    Uses ``args.reward_key`` where rewards are dicts.
    """
    rewards = [reward_value(sample, getattr(args, "reward_key", None)) for sample in samples]
    return max(rewards) != min(rewards)


FILTERS: dict[str, GroupFilter] = {"nonzero_std": nonzero_std}


def load_filter(spec: str) -> GroupFilter:
    """The filter named by ``--dynamic-sampling-filter-path``: a name of ``FILTERS``, ``f.py[:keep]`` or a module path.

    Raises:
        ConfigError: it cannot be loaded.
        DataError: (when called) the user's filter raised, or returned something that is not a bool.
    """
    if spec in FILTERS:
        return FILTERS[spec]
    if not spec.endswith(".py") and ":" not in spec and "." not in spec:
        raise ConfigError(f"{FLAG} {spec}: not one of {', '.join(FILTERS)}, and not path/to/file.py[:function]")
    function = load_function(spec, flag=FLAG, default="keep", parameters=("args", "samples"))
    if function.is_async:
        raise ConfigError(
            f"{FLAG} {spec}: {function.name} is async; a filter is called between requests, make it plain"
        )

    def keep(args: Any, samples: Sequence[Any]) -> bool:
        group = f"group {getattr(samples[0], 'group_index', None)}" if samples else "an empty group"
        try:
            answer = function(args, samples)
        except Exception as error:
            raise DataError(
                f"the filter {function.name} ({function.origin}) raised {type(error).__name__} on {group}: {error}"
            ) from error
        # numpy's bool is not a bool, but has the method that makes it one.
        answer = answer.item() if hasattr(answer, "item") else answer
        if not isinstance(answer, bool):
            raise DataError(
                f"the filter {function.name} ({function.origin}) returned {answer!r} for {group}; "
                f"return True to keep the group or False to drop it"
            )
        return answer

    return keep
