"""The contracts of renderers, value heads, evaluations, ``wrap_learn`` and ``wrap_weights``: sound parts pass, and each test can fail."""

import pytest

from miles_core.data import Renderer
from miles_core.plugin import MilesError
from miles_testing import EvaluationContract, HeadContract, LearnContract, RendererContract, WeightsContract
from miles_tools.demo.model import make_tokenizer

#: A plugin whose hooks are named by an option, so that a test turns one on.
PLUGIN = """
import itertools
import random
from dataclasses import dataclass, replace

import torch
from torch import nn

from miles_core.data import WeightUnit
from miles_core.plugin import Plugin, hookimpl, option
from miles_core.trainer import Learned


@dataclass(frozen=True, kw_only=True)
class Options:
    '''Which mistake is made.'''

    mistake: str = option("none", flag="--mistake", help="its name")


calls = itertools.count()


class Odd:
    def __init__(self, options):
        self.mistake, self.evaluations = options.mistake, 0

    @hookimpl
    def wrap_loss(self):
        if self.mistake != "training":
            return None
        return lambda inner: lambda *args: replace(found := inner(*args), value=found.value * (1 + self.evaluations))

    @hookimpl
    def on_evaluation(self, run, name, metrics):
        if self.mistake == "one name":
            metrics["eval/odd"] = 1.0
        elif self.mistake == "one set":
            metrics["eval/one/odd"] = 1.0
        elif self.mistake == "state":
            metrics[f"eval/{name}/odd"] = float(next(calls))
        elif self.mistake == "training":
            metrics[f"eval/{name}/odd"] = 1.0
            self.evaluations += 1
        elif self.mistake == "sound":
            metrics[f"eval/{name}/odd"] = 1.0

    @hookimpl
    def wrap_learn(self, run, policy, handles):
        if self.mistake not in ("swallow", "tokens", "inside"):
            return None

        def wrap(inner):
            async def learn(samples, step):
                if self.mistake == "tokens":
                    for sample in samples:
                        sample.rollout_log_probs = [0.0] * sample.response_length
                if self.mistake == "inside":
                    trainer = getattr(getattr(handles[policy.name], "rank", None), "trainer", None)
                    if trainer is not None:
                        for parameter in trainer.model.parameters():
                            parameter.data *= 1.01
                try:
                    return await inner(samples, step)
                except Exception:
                    if self.mistake == "swallow":
                        return Learned({}, 0)
                    raise

            return learn

        return wrap

    @hookimpl
    def wrap_weights(self, policy, purpose):
        doubled = {"sync only": "sync", "export only": "export", "snapshot only": "snapshot"}.get(self.mistake) == purpose
        if not doubled and self.mistake not in ("order", "reads weights"):
            return None

        def wrap(inner):
            def weights():
                units = list(inner())
                if self.mistake == "order":
                    random.Random(next(calls)).shuffle(units)
                for unit in units:
                    tensors = dict(unit.tensors)
                    if doubled:
                        tensors = {name: tensor * 2 if name.endswith("o_proj.weight") else tensor for name, tensor in tensors.items()}
                    if self.mistake == "reads weights" and purpose == "convert":
                        tensors = {name: tensor if tensor.is_meta else tensor.double() for name, tensor in tensors.items()}
                    yield WeightUnit(tensors)

            return weights

        return wrap


class Head(nn.Module):
    def __init__(self, model, mistake):
        super().__init__()
        size = model.config.hidden_size
        self.inner, self.unused, self.mistake = nn.Linear(size, 1), nn.Linear(size, 1), mistake
        self.to(model.dtype)
        if mistake == "sound":
            del self.unused

    def forward(self, hidden):
        if self.mistake == "rows":
            hidden = hidden - hidden.mean(0)
        values = self.inner(hidden)
        if self.mistake == "sound":
            return values
        return values + 0 * self.unused(hidden) if self.mistake == "zero" else values


def make_head(run, policy, model):
    return Head(model, run.config.plugin("odd").mistake)


plugin = Plugin(
    name="odd", summary="mistakes", version="1", core=">=0", config=Options, hooks={"": "Odd"},
    provides={"head": {"odd": "make_head"}},
)
"""
PPO = {"advantage_estimator": "ppo", "critic_lr": 1e-2}


@pytest.fixture
def odd(tmp_path):
    path = tmp_path / "odd.py"
    path.write_text(PLUGIN)
    return str(path)


def run_test(contract, test, *args, **attributes):
    suite = type("Suite", (contract,), attributes)()
    getattr(suite, test)(*args)


def fails(contract, test, *args, error=AssertionError, **attributes):
    with pytest.raises(error):
        run_test(contract, test, *args, **attributes)


def suite_of(odd, mistake, **more):
    return {"plugins": (*more.pop("plugins", ()), odd), "options": {"mistake": mistake, **more}}


@pytest.mark.parametrize(
    ("mistake", "test"),
    [
        ("none", "test_it_adds_metrics"),
        ("one name", "test_it_adds_metrics"),
        ("one set", "test_each_data_set_has_metrics_of_its_own"),
        ("state", "test_equal_weights_have_equal_metrics"),
        ("training", "test_evaluating_does_not_change_training"),
    ],
)
def test_mistakes_of_evaluations_are_found(odd, mistake, test):
    fails(EvaluationContract, test, **suite_of(odd, mistake))
    run_test(EvaluationContract, test, **suite_of(odd, "sound"))


def test_swallowed_errors_of_the_trainer_are_found(odd, tmp_path):
    with pytest.raises(pytest.fail.Exception):
        run_test(LearnContract, "test_errors_of_the_trainer_stop_the_run", tmp_path, **suite_of(odd, "swallow"))
    run_test(LearnContract, "test_errors_of_the_trainer_stop_the_run", tmp_path, **suite_of(odd, "none"))


def test_changed_log_probs_are_found(odd, tmp_path):
    test = "test_it_leaves_what_the_engine_generated"
    fails(LearnContract, test, tmp_path, error=MilesError, **suite_of(odd, "tokens"))
    run_test(LearnContract, test, tmp_path, **suite_of(odd, "none"))


def test_a_wrapper_that_reaches_into_the_trainer_is_found(odd):
    fails(LearnContract, "test_workers_in_other_processes_learn_the_same", **suite_of(odd, "inside"))


@pytest.mark.parametrize(
    ("mistake", "test"),
    [
        ("rows", "test_rows_do_not_depend_on_each_other"),
        ("unused", "test_every_parameter_has_a_gradient"),
        ("zero", "test_every_parameter_has_a_gradient"),
    ],
)
def test_mistakes_of_heads_are_found(odd, mistake, test):
    fails(HeadContract, test, **suite_of(odd, mistake, plugins=("ppo",), **PPO))
    run_test(HeadContract, test, **suite_of(odd, "sound", plugins=("ppo",), **PPO))


@pytest.mark.parametrize(
    ("mistake", "test", "directory", "error"),
    [
        ("sync only", "test_the_engine_computes_what_the_trainer_computes", False, (AssertionError, MilesError)),
        ("export only", "test_an_export_is_a_checkpoint_of_the_trained_model", True, AssertionError),
        ("snapshot only", "test_a_snapshot_holds_the_trained_weights", False, AssertionError),
        ("order", "test_streams_are_repeatable", False, AssertionError),
        ("reads weights", "test_conversions_are_planned_without_weights", True, AssertionError),
    ],
)
def test_mistakes_of_weight_streams_are_found(odd, tmp_path, mistake, test, directory, error):
    arguments = [tmp_path] if directory else []
    fails(WeightsContract, test, *arguments, error=error, **suite_of(odd, mistake))


class TestCore(WeightsContract):
    """The stream without a plugin."""


class Retokenizes(Renderer):
    """Renders text again, as a naive continuation does."""

    def extend(self, tokens, messages, tools=None):
        text = self.tokenizer.decode(list(tokens)) + self._tail(messages, tools)
        return self.tokenizer.encode(text, add_special_tokens=False)


class Forgets(Renderer):
    """Leaves out the end of the answer."""

    def extend(self, tokens, messages, tools=None):
        return [*tokens, *self.render(messages)]


class TakesControl(Renderer):
    """Encodes special tokens of messages as such."""

    def _without_control(self, messages, literals):
        return list(messages)


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (Retokenizes, "test_appending_changes_no_earlier_token"),
        (Forgets, "test_a_continuation_is_the_end_of_the_conversation"),
        (Forgets, "test_wrong_messages_are_refused"),
        (TakesControl, "test_special_tokens_in_messages_are_text"),
    ],
)
def test_mistakes_of_renderers_are_found(kind, test):
    errors = (AssertionError, pytest.fail.Exception)
    fails(RendererContract, test, error=errors, make=lambda self: kind(make_tokenizer()))
    run_test(RendererContract, test, make=lambda self: Renderer(make_tokenizer()))
