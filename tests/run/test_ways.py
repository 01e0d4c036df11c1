"""The ways of a sample, a weight and an error through the packages are short, and docs/how-it-works.md shows them."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from torch.optim import optimizer

from miles_core import loop
from miles_core.cli import main as cli
from miles_core.errors import DataError
from miles_core.train import rank
from miles_embedded.model.load_units import RepeatedUpdate
from miles_embedded.trainer.trainer import EmbeddedTrainer
from miles_testing.doubles import remote
from miles_testing.toy import toy_arguments, toy_run
from miles_workers import local_process
from tests.ways import ROOT, ErrorTrace, Trace, name_of

#: From ``learn()`` to the loss: samples become a batch, which gets advantages and the weights of its tokens.
LEARN = (
    "local_learner.LocalLearner.learn",
    "data_shard.optimiser_steps",
    "batch.collate",
    "grpo.advantage",
    "choices.loss_weights",
    "packing.split",
    "trainer.EmbeddedTrainer.forward",
    "grpo.policy_loss",
)
#: From the prompt file to the loss: a row becomes a prompt, pending samples, responses, finished and rewarded samples of a step.
SAMPLE = (
    "prompt_file.JsonlFile.read",
    "queue.Prompt.samples",
    "generate.LocalProducer.produce",
    "engine.EmbeddedEngine.generate",
    "collect.Scorer.start",
    "collect.Collector.pop",
    "local_learner.LocalLearner.learn",
    "batch.collate",
    "grpo.advantage",
    "grpo.policy_loss",
)
#: From the optimizer to the engine: weights are exported and encoded while the engine's loader reads them.
WEIGHT = ("optimizer.Optimizer.step", "views.export", "codec.Codec.encode_unit")
#: Files of our packages in which one step calls a function, at most.
FILES = 87


@pytest.fixture(scope="module")
def step() -> Trace:
    """The third step of a toy run in one process."""
    trace, plain = Trace({*LEARN, *SAMPLE, *WEIGHT}), loop.step

    async def traced(run, *rest):
        if run.step < 2:
            return await plain(run, *rest)
        with trace.recording():
            return await plain(run, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "step", traced)
        patch.setattr(EmbeddedTrainer, "find_memory", lambda self: None)  # every sync is like the first one
        patch.setattr(RepeatedUpdate, "is_current", lambda self: False)
        patch.setattr(
            optimizer, "_global_optimizer_post_hooks", OrderedDict()
        )  # other tests of this process register some
        toy_run(steps=3)
    return trace


def check(title: str, stops: list[str], bound: int) -> None:
    """Print a way, and check its length and that the documentation shows it."""
    shown = "\n".join([f"{title}: {len(stops)} stops", *(f"  {stop}" for stop in stops)])
    print(shown)
    assert len(stops) <= bound
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    assert shown in page, f"docs/how-it-works.md does not show this way:\n{shown}"


def test_from_learn_to_the_loss(step):
    check("from learn() to the loss", step.way(LEARN), 20)


def test_from_the_prompt_file_to_the_loss(step):
    check("from the prompt file to the loss", step.way(SAMPLE), 23)


def test_from_the_optimizer_to_the_engine(step):
    check("from the optimizer to the engine", step.way(WEIGHT), 16)


def test_a_step_visits_few_files(step):
    print("\n".join(sorted(step.files)))
    assert len(step.files) <= FILES


def test_from_a_workers_error_to_the_screen(monkeypatch, capsys, tmp_path):
    """The worker is an object of this process. Two more functions receive an error that comes from another process."""
    trace = ErrorTrace()

    def learn(self, share, step):
        error = DataError("a bad sample")
        trace.begin(error)
        raise error

    monkeypatch.setattr(rank.Rank, "learn", learn)
    try:
        words = toy_arguments([remote.__file__], tmp_path / "run", runtime="remote")
        assert cli.main(["train", *words]) == 2
    finally:
        trace.end()
    assert capsys.readouterr().err.splitlines()[-3].startswith("error: worker trainer-0: a bad sample")
    ends = (local_process._Server._answer, local_process.LocalProcess._settle)
    check("from a worker's error to the screen", [*(name_of(end.__code__) for end in ends), *trace.stops], 8)
