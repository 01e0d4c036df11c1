"""Engines that keep old weights, and sound runs, whose syncs pass."""

import logging

import pytest
import torch

from miles_core.errors import MismatchError
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.weights import Weights
from miles_embedded.manifest import plugin as EMBEDDED
from miles_embedded.model.load_units import RepeatedUpdate
from miles_formats.repeated import RepeatedEncoding
from miles_fp8.format import Fp8
from miles_testing.doubles import remote

FP8 = {"rollout_precision": "fp8", "train_precision": "fp8", "emulate_precision": True}
STALE = "layers.1.self_attn.k_proj"


@pytest.fixture
def loaded(monkeypatch):
    """Every update is loaded tensor by tensor, also if the last one could be repeated."""
    monkeypatch.setattr(RepeatedUpdate, "is_current", lambda self: False)


@pytest.fixture
def stale(monkeypatch, loaded):
    """From the second sync on, one tensor keeps its first values in every embedded engine."""
    begin = Weights.begin_update

    def begin_update(self, share=False):
        update, first = begin(self, share), self.version < 0
        take = update.take

        def skip(units):
            for unit in units:
                if STALE in unit.name and not first:
                    update._loader._find_view(unit.name)  # it counts as arrived
                else:
                    yield unit

        update.take = lambda units: take(skip(units))
        return update

    monkeypatch.setattr(Weights, "begin_update", begin_update)


def watch(monkeypatch):
    """Record the names that engines are asked for, by sync."""
    asked, checksums = [], Weights.checksums
    monkeypatch.setattr(Weights, "checksums", lambda self, names: asked.append(list(names)) or checksums(self, names))
    return asked


SOUND = {
    "inline": ([], {}),
    "dense": ([], {"family": "qwen3", "dtype": "bfloat16"}),
    "tied": ([], {"family": "llama"}),
    "gpt_oss": ([], {"family": "gpt_oss"}),
    "fp8": (["fp8"], FP8),
    "fp8 rollout": (["fp8"], {"rollout_precision": "fp8", "emulate_precision": True, "dtype": "bfloat16"}),
    "int4": (["int4"], {"rollout_precision": "int4", "int4_group_size": 16}),
    "shared": ([], {"use_zero_copy_sync": True}),
    "worker": ([remote.__file__], {"runtime": "remote"}),
    "staged": (
        [remote.__file__],
        {"runtime": "remote", "use_zero_copy_sync": True, "async_weight_sync": True, "schedule": "async"},
    ),
    "delta": (
        [remote.__file__],
        {"runtime": "remote", "use_zero_copy_sync": True, "dtype": "bfloat16", "lr": 1e-6, "remote_engines": 2},
    ),
    "lora": (["lora"], {"lora_rank": 2, "lr": 1e-2}),
    "colocated": ([], {"colocate": True}),
}


@pytest.mark.parametrize("case", SOUND)
def test_every_tensor_of_a_sound_run_arrives(case, toy_run, monkeypatch):
    asked = watch(monkeypatch)
    plugins, options = SOUND[case]
    toy_run(plugins, steps=2, self_check=True, **options)
    assert len(asked) == 3 * options.get("remote_engines", 1)  # one question per sync and engine
    assert len({len(names) for names in asked}) == 1 and len(asked[0]) > 10


@pytest.mark.parametrize("case", ["inline", "dense", "fp8", "fp8 rollout", "worker", "staged", "delta", "colocated"])
def test_a_tensor_that_keeps_its_old_values_is_named(case, toy_run, stale):
    plugins, options = SOUND[case]
    with pytest.raises(
        MismatchError, match=rf"stale weights: version 1 .* 1 of \d+ compared tensors .*{STALE}\.weight"
    ):
        toy_run(plugins, self_check=True, **options)


def test_verify_logprobs_reports_it_without_the_self_check(toy_run, stale):
    with pytest.raises(MismatchError, match=STALE):
        toy_run(self_check=False, verify_logprobs=True)


def test_a_repeated_update_that_leaves_something_out_is_found(toy_run, monkeypatch):
    copy, copied = torch._foreach_copy_, []

    @torch.no_grad()
    def leave_out(targets, tensors):
        copied.append(len(targets))
        copy(targets[1:], tensors[1:])

    monkeypatch.setattr(RepeatedUpdate, "copy", lambda self: [leave_out(*pair) for pair in self._copies])
    with pytest.raises(MismatchError, match=r"stale weights: version 1 .* compared tensors"):
        toy_run(self_check=True, lr=1e-2)
    assert max(copied) > 10


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_repeated_encoding_that_leaves_a_weight_out_is_found(toy_run, monkeypatch, dtype):
    """Both sides may share the memory of codes, so the sender encodes weights once more."""
    write, make = RepeatedEncoding._write, Fp8.make_writer
    left_out = []

    def leave_out(self, finite):
        if self._wide:
            left_out.append(min(self._wide))
            del self._wide[left_out[-1]]
        write(self, finite)

    monkeypatch.setattr(Fp8, "make_writer", lambda self, weights, outs: make(self, weights[1:], outs[1:]))
    monkeypatch.setattr(RepeatedEncoding, "_write", leave_out)
    with pytest.raises(MismatchError, match=r"stale weights: version 2 .* 1 of \d+ compared tensors"):
        toy_run(["fp8"], self_check=True, steps=3, **{**FP8, "lr": 1e-2, "dtype": dtype})
    assert bool(left_out) == (dtype == "float32")


def test_a_repeated_decoding_that_is_left_out_is_found(toy_run, monkeypatch):
    def leave_out(self):
        self._decode = None
        copy(self)

    copy = RepeatedUpdate.copy
    monkeypatch.setattr(RepeatedUpdate, "copy", leave_out)
    with pytest.raises(MismatchError, match=r"stale weights: version 3 .* compared tensors"):
        toy_run(["fp8"], self_check=True, steps=4, **{**FP8, "lr": 1e-2})


def test_the_self_check_can_be_turned_off(toy_run, stale, monkeypatch):
    asked = watch(monkeypatch)
    toy_run(self_check=False)
    assert not asked


UNKNOWN = EmbeddedEngine.capabilities - {"weight_checksums"}


@pytest.fixture
def unknown_layout(monkeypatch):
    """The engine cannot compute checksums, but score."""
    monkeypatch.setattr(EmbeddedEngine, "capabilities", UNKNOWN)


@pytest.mark.parametrize("plugins", [[], [remote.__file__]])
def test_an_engine_of_unknown_layout_is_judged_by_how_its_scores_move(
    plugins, toy_run, unknown_layout, loaded, monkeypatch
):
    begin = Weights.begin_update

    def keep(self, share=False):
        update = begin(self, share)
        if self.version >= 0:
            take = update.take
            update.take = lambda units: take(u for u in units if update._loader._find_view(u.name) is None)
        return update

    runtime = {"runtime": "remote"} if plugins else {}
    toy_run(plugins, self_check=True, steps=3, lr=1e-2, **runtime)
    monkeypatch.setattr(Weights, "begin_update", keep)
    with pytest.raises(MismatchError, match=r"stale weights: version 1 .* still serves the previous weights"):
        toy_run(plugins, self_check=True, steps=3, lr=1e-2, **runtime)


def test_an_engine_that_can_do_neither_is_reported(toy_run, monkeypatch, caplog):
    monkeypatch.setattr(EmbeddedEngine, "capabilities", UNKNOWN - {"score", "score_temperature"})
    with caplog.at_level(logging.INFO):
        toy_run(self_check=True, log_level="info")
    assert "the engine embedded can neither compare checksums nor score" in caplog.text


def test_the_manifest_declares_the_capability():
    assert "weight_checksums" in {c.name for c in EMBEDDED.list_capabilities("engine")}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("checks", [{"self_check": True}, {"verify_logprobs": True, "verify_logprobs_tolerance": 5}])
def test_one_stale_engine_of_several_is_named(checks, number, toy_run, unknown_layout, monkeypatch):
    begin, engines = Weights.begin_update, []

    def keep(self, share=False):
        update = begin(self, share)
        if not any(self is other for other in engines):
            engines.append(self)
        if self.version >= 0 and self is engines[number]:
            take = update.take
            update.take = lambda units: take(u for u in units if update._loader._find_view(u.name) is None)
        return update

    monkeypatch.setattr(Weights, "begin_update", keep)
    with pytest.raises(
        MismatchError, match=rf"stale weights: version 1 .*\(engine-{number}\).* still serves the previous"
    ):
        toy_run([remote.__file__], runtime="remote", remote_engines=2, steps=3, lr=1e-2, **checks)
