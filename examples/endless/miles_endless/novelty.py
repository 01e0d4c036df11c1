"""A reward that looks at a whole group: an answer is worth the more, the fewer others in its group are the same."""

from collections import Counter

from miles_core.data import Sample
from miles_core.plugin import group_reward


def make_reward():
    """The provider of ``--rm-type novelty``."""

    @group_reward
    async def reward(args, samples: list[Sample]) -> list[float]:
        counts = Counter(sample.response for sample in samples)
        return [1.0 / counts[sample.response] for sample in samples]

    return reward
