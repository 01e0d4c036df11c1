"""The game: the first policy writes, the guesser continues, and each is rewarded for what the other does not want.

It is matching pennies: a coin is whether the token ids of an answer add up to an even number. The guesser wins where both
coins agree, the writer where they do not. Both answers are in one transcript: each policy is trained on its own tokens and
sees the other's as context.
"""

from miles_core.data import Sample
from miles_core.plugin import Ask, Run, group_reward


def make_generate(run: Run):
    """The provider of ``--generate game``."""
    separator = run.tokenizer.encode(" | ", add_special_tokens=False)

    async def play(sample: Sample, ask: Ask) -> list[Sample]:
        written = await ask()
        guessed = await ask(separator, after=written, policy="guesser")
        sample.metadata["alike"] = sum(written.response.tokens + guessed.response.tokens) % 2 == 0
        return ask.transcript.samples(sample)

    return play


def make_reward():
    """The provider of ``--rm-type game``: the samples of both players are in one group."""

    @group_reward
    async def reward(args, samples: list[Sample]) -> list[float]:
        return [float(sample.metadata["alike"] == (sample.policy == "guesser")) for sample in samples]

    return reward
