"""What saving every sample costs: microseconds of the driver and of the writers per token, and bytes on disk; the last line is one JSON object.

Tokens are drawn from Zipf's law and log-probabilities from an exponential distribution, which do not compress well.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.measure import finish, installed, options
from miles_core.contracts.runtime import TrainedTokens
from miles_core.data.sample import Sample
from miles_tools.samples.files import read_file, rollout_file
from miles_tools.samples.saver import WRITERS, SampleSaver


class Words:
    """A tokenizer of made-up words."""

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"w{token}"

    def decode(self, tokens: list[int]) -> str:
        return "".join(f" w{token}" for token in tokens)


def step(samples: int, length: int) -> list[tuple[Sample, TrainedTokens]]:
    """Samples of ``length`` response tokens with what training saw of them."""
    random, words = np.random.default_rng(0), Words()
    made = []
    for index in range(samples):
        tokens = np.minimum(random.zipf(1.3, length + 64), 50_000).tolist()
        sample = Sample(
            prompt=words.decode(tokens[:64]), tokens=tokens, index=index, group_index=index // 8, reward=1.0
        )
        sample.response, sample.response_length = words.decode(tokens[64:]), length
        sample.rollout_log_probs = (-random.exponential(1.0, length)).tolist()
        advantage = np.full(length, random.normal(), np.float32)
        made.append((sample, TrainedTokens(-random.exponential(1.0, length).astype(np.float32), advantage)))
    return made


async def save(saver: SampleSaver, rollout: list[tuple[Sample, TrainedTokens]], repetitions: int) -> list[float]:
    """Save the step repeatedly; return the seconds of the driver's processor, those of its threads included."""
    seconds = []
    for number in range(repetitions + 1):
        started = time.process_time()
        await saver.write_samples("train", number, ((sample, trained, "") for sample, trained in rollout))
        await saver._complete()
        seconds.append(time.process_time() - started)
        print(f"{seconds[-1]:.3f} s", file=sys.stderr, flush=True)
    return seconds


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--length", type=int, default=512, help="tokens of a response")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--writers", type=int, default=WRITERS, help="maximum number of writer processes")
    given = parser.parse_args()
    rollout, tokens = step(given.samples, given.length), given.samples * given.length
    with tempfile.TemporaryDirectory() as directory:
        saver = SampleSaver(Path(directory), Words(), 1 << 40, given.writers)
        started = time.perf_counter()
        seconds = asyncio.run(save(saver, rollout, given.repetitions))
        wall = (time.perf_counter() - started) / (given.repetitions + 1)
        saver.close()
        path = rollout_file(directory, "train", 1)
        assert len(read_file(path) or ()) == given.samples
        size = path.stat().st_size
    result = {
        "samples": given.samples,
        "length": given.length,
        "driver_microseconds_a_token": round(1e6 * median(seconds[1:]) / tokens, 3),
        "writers_microseconds_a_token": round(1e6 * wall / tokens, 2),
        "bytes_a_token": round(size / tokens, 1),
    }
    finish("save_rollouts", result, given.save, lambda: installed("miles-core", "numpy"))


if __name__ == "__main__":
    main()
