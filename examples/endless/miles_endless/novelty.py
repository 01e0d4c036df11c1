"""A group reward: the fewer identical answers in its group, the higher the reward of an answer."""

from collections import Counter

from miles_core.data import Sample
from miles_core.plugin import group_reward


def make_reward():
    """Provider of ``--rm-type novelty``."""

    @group_reward
    async def reward(args, samples: list[Sample]) -> list[float]:
        counts = Counter(sample.response for sample in samples)
        return [1.0 / counts[sample.response] for sample in samples]

    return reward
