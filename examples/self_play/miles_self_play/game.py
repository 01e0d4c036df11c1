"""The game: the first policy writes, the guesser continues, and they have opposite rewards.

The game is matching pennies: a player's coin is the parity of the sum of the token ids in its answer. The guesser wins if both coins agree,
otherwise the writer wins. Both answers are in one transcript; each policy is trained on its own tokens with the other's as context.
"""

from miles_core.data import Sample
from miles_core.plugin import Ask, Run, group_reward


def make_generate(run: Run):
    """Provider of ``--generate game``."""
    separator = run.tokenizer.encode(" | ", add_special_tokens=False)

    async def play(sample: Sample, ask: Ask) -> list[Sample]:
        written = await ask()
        guessed = await ask(separator, after=written, policy="guesser")
        sample.metadata["alike"] = sum(written.response.tokens + guessed.response.tokens) % 2 == 0
        return ask.transcript.samples(sample)

    return play


def make_reward():
    """Provider of ``--rm-type game``; a group contains the samples of both players."""

    @group_reward
    async def reward(args, samples: list[Sample]) -> list[float]:
        return [float(sample.metadata["alike"] == (sample.policy == "guesser")) for sample in samples]

    return reward
