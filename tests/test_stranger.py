"""What somebody who never saw this repository plugs in with one file: every hook, a decoder, a correction."""

from __future__ import annotations

import sys
from itertools import groupby

import pytest
import torch

from miles_core.contracts.hooks import MAKERS, HookSpecs

EVERYTHING = '''
"""Writes down every call."""
from miles_core.plugin.marker import hookimpl

calls = []


def around(name):
    def wrap(inner):
        if name in ("rollout", "generate", "learn"):
            async def outer(*args):
                calls.append(name)
                return await inner(*args)
        else:
            def outer(*args):
                calls.append(name if name != "forward" else f"forward({args[2].kind})")
                return inner(*args)
        return outer
    calls.append(f"wrap_{name}")
    return wrap


class Everything:
    @hookimpl
    def on_start(self, run):
        calls.append("on_start")

    @hookimpl
    def on_model(self, run, policy, model, role):
        calls.append(f"on_model({role})")

    @hookimpl
    def on_mtp_layers(self, run, policy, requests):
        calls.append("on_mtp_layers")

    @hookimpl
    def on_request(self, run, request):
        calls.append("on_request")

    @hookimpl
    def on_sample(self, run, sample):
        calls.append("on_sample")

    @hookimpl
    def on_batch(self, run, policy, batch):
        calls.append("on_batch")

    @hookimpl
    def wrap_learn(self, run, policy):
        return around("learn")

    @hookimpl
    def wrap_forward(self, run, policy):
        return around("forward")

    @hookimpl
    def wrap_correction(self, run):
        return around("correction")

    @hookimpl
    def wrap_loss(self, run):
        return around("loss")

    @hookimpl
    def wrap_weights(self, run, policy, purpose):
        return around(f"weights({purpose})")

    @hookimpl
    def wrap_export(self, run, policy):
        return around("export")

    @hookimpl
    def wrap_optimizer_step(self, run, policy):
        return around("optimizer_step")

    @hookimpl
    def on_evaluation(self, run, name, groups, metrics):
        calls.append(f"on_evaluation({name})")

    @hookimpl
    def on_step(self, run, metrics):
        calls.append("on_step")
        metrics["everything/calls"] = float(len(calls))

    @hookimpl
    def on_save(self, run, policy, store):
        calls.append(f"on_save({policy and policy.name})")
        store.put("everything", data={"step": run.step})

    @hookimpl
    def on_load(self, run, policy, store):
        calls.append(f"on_load({policy and policy.name})")
        assert store.get("everything")[1] == {"step": 1}

    @hookimpl
    def on_stop(self, run, error):
        calls.append(f"on_stop({type(error).__name__})")
'''

SYNC = ["wrap_weights(sync)", "weights(sync)"]
BUILT = [
    "on_start",
    "on_model(train)",
    "wrap_correction",
    "wrap_forward",
    "wrap_loss",
    "wrap_optimizer_step",
    "on_model(rollout)",
    "wrap_learn",
]
STEP = [
    "on_request",
    "on_sample",
    "learn",
    "on_batch",
    "forward(old)",
    "correction",
    "forward(train)",
    "loss",
    "optimizer_step",
    *SYNC,
]


def module_of(name):
    """The imported file of a single-file plugin."""
    (module,) = [m for n, m in sys.modules.items() if n.startswith(f"miles_plugin_file_{name}_")]
    return module


def calls_of(name):
    """What the plugin wrote down, repetitions taken together; then forgotten."""
    calls = module_of(name).calls
    found = [call for call, _ in groupby(calls)]
    calls.clear()
    return found


def test_every_hook_in_the_order_of_the_map(toy_run, tmp_path):
    path = tmp_path / "everything.py"
    path.write_text(EVERYTHING)
    options = {"plugins": [str(path)], "n_samples_per_prompt": 1, "rollout_batch_size": 1, "kl_loss_coef": 0.1}
    options["advantage_estimator"] = "reinforce_plus_plus"  # one that takes a group of one
    run = toy_run(steps=1, directory=tmp_path / "run", **options)
    before = STEP.index("correction")
    step = [*STEP[:before], "on_model(ref)", "forward(ref)", *STEP[before:]]
    assert calls_of("everything") == [
        *BUILT,
        *SYNC,
        *step,
        "on_step",
        "on_save(policy)",
        "on_save(None)",
        "on_stop(NoneType)",
    ]
    assert run.metrics[0]["everything/calls"] > 20
    held_out = run.run.config.data.prompt_data
    more = {"eval_interval": 2, "eval_prompt_data": held_out, "export_hf": tmp_path / "exported"}
    toy_run(steps=2, directory=None, save=None, load=run.directory, **more, **options)
    calls = calls_of("everything")
    assert calls[calls.index("on_load(policy)") :][:4] == [
        "on_load(policy)",
        "on_load(None)",
        *SYNC,
    ]
    assert [c for c in calls if c.startswith("on_evaluation")] == ["on_evaluation()"]  # one data set without a name
    assert [c for c in calls if c.startswith("on_save")] == ["on_save(policy)", "on_save(None)"]
    assert calls[calls.index("wrap_export") :][:4] == [
        "wrap_export",
        "export",
        "wrap_weights(export)",
        "weights(export)",
    ]
    for hook in vars(HookSpecs):
        if not hook.startswith("_"):
            assert f"def {hook}(" in EVERYTHING, f"this test does not cover {hook}"


def test_on_stop_hears_of_a_failure(toy_run, tmp_path):
    path = tmp_path / "failing.py"
    path.write_text(EVERYTHING.replace('calls.append("on_batch")', "raise ArithmeticError('no')"))
    with pytest.raises(ArithmeticError) as caught:
        toy_run([str(path)], directory=tmp_path / "run")
    assert caught.value.__notes__[0] == "in plugin failing, hook on_batch"
    assert calls_of("failing")[-1] == "on_stop(ArithmeticError)"


def numbers(run):
    return [{n: v for n, v in r.items() if not n.startswith("time") and "second" not in n} for r in run.metrics]


def test_a_plugin_that_only_watches_changes_no_number(toy_run, tmp_path):
    path = tmp_path / "watching.py"
    path.write_text(EVERYTHING)
    watched, plain = numbers(toy_run([str(path)])), numbers(toy_run())
    for one, two in zip(watched, plain, strict=True):
        assert {n: one[n] for n in two if not n.startswith("mismatch")} == pytest.approx(
            {n: v for n, v in two.items() if not n.startswith("mismatch")}, rel=1e-5, abs=1e-7
        )


CORRECTION = """
import torch
from miles_core.algorithm.correction import Correction, compose_corrections
from miles_core.plugin.marker import hookimpl

def halved(inputs):
    ratio = (inputs.old_log_probs - inputs.rollout_log_probs).exp()
    return Correction(ratio.clamp(max=1.0) / 2, torch.ones_like(ratio, dtype=torch.bool), {"mine/ratio": (ratio.sum(), len(ratio))})

@hookimpl
def wrap_correction(run):
    return lambda inner: compose_corrections(inner, halved)
"""


def test_a_correction_of_ones_own_in_ten_lines(toy_run, tmp_path):
    path = tmp_path / "half.py"
    path.write_text(CORRECTION)
    plain, half = toy_run(steps=1, clip_grad=0), toy_run([str(path)], steps=1, clip_grad=0)
    assert half.metrics[0]["train/grad_norm"] == pytest.approx(plain.metrics[0]["train/grad_norm"] / 2, rel=1e-4)
    assert half.metrics[0]["mine/ratio"] == pytest.approx(1, abs=1e-4)
    both = toy_run([str(path), "tis"], steps=1, clip_grad=0, tis_mode="mask")
    # both multiply the loss, and each reports
    assert both.metrics[0]["train/grad_norm"] == pytest.approx(half.metrics[0]["train/grad_norm"], rel=1e-4)
    assert {"mine/ratio", "tis/weight_mean"} <= both.metrics[0].keys()


DRAFTING = '''
"""Drafts the next tokens and keeps those that sampling would have drawn anyway."""
import torch
from miles_core import __version__
from miles_embedded import Decoder, Emitted
from miles_core.plugin.manifest import Plugin

plugin = Plugin(
    name="drafting", summary="drafts", version="1", core=">=0",
    provides={"decoder": {"drafting": "make"}}, uses={"engine.draft": "the engine verifies drafts"},
)
made = []


class Drafting(Decoder):
    """A draft is whatever is most probable; a step feeds it and draws at every position with that position's own random number."""

    def __init__(self):
        self.steps = self.emitted = 0

    def step(self, engine, rows):
        drafts = [[row.tokens[-1], 40] if row.limit - len(row.tokens) > 1 else [] for row in rows]
        fed = engine.forward(rows, [[row.tokens[-1], *draft] for row, draft in zip(rows, drafts)])
        owners = [row for row, draft in zip(rows, drafts) for _ in range(len(draft) + 1)]
        positions = torch.tensor([len(r.tokens) + i for r, d in zip(rows, drafts) for i in range(len(d) + 1)])
        drawn = engine.sample(fed.logits, owners, positions)
        tokens, log_probs, supports, at = [], [], [], 0
        for draft in drafts:
            count = 1
            while count <= len(draft) and drawn.tokens[at + count - 1] == draft[count - 1]:
                count += 1
            tokens.append(drawn.tokens[at : at + count])
            log_probs.append(drawn.log_probs[at : at + count])
            supports.append(None if drawn.supports is None else drawn.supports[at : at + count])
            at += len(draft) + 1
            self.emitted += count
        engine.truncate(rows, [len(row.tokens) + len(new) - 1 for row, new in zip(rows, tokens)])
        self.steps += len(rows)
        if drawn.supports is None:
            return Emitted(tokens, log_probs)
        return Emitted(tokens, log_probs, supports, [[False] * len(t) for t in tokens])


def make():
    made.append(Drafting())
    return made[-1]
'''


@pytest.mark.parametrize(
    ("plugins", "options"),
    [([], {}), (["r3", "tis"], {}), (["r3"], {"rollout_top_k": 3}), ([], {"rollout_temperature": 0.5})],
    ids=["bare", "r3+tis", "top-k", "cold"],
)
def test_a_decoder_that_drafts_gives_the_same_run(toy_run, tmp_path, plugins, options):
    path = tmp_path / "drafting.py"
    path.write_text(DRAFTING)
    given = {"rollout_max_response_len": 12, **options}
    plain, drafted = toy_run(plugins, **given), toy_run([*plugins, str(path)], **given)
    decoder = drafted.engine.decoder
    assert decoder.emitted > decoder.steps  # some drafts were kept
    texts = [[s["response"] for s in run.samples] for run in (plain, drafted)]
    assert texts[0] == texts[1]
    for one, two in zip(numbers(plain), numbers(drafted), strict=True):
        assert one.keys() == two.keys()
        assert two == pytest.approx(one, rel=1e-3, abs=2e-5)
    assert torch.tensor([r["mismatch/abs_log_prob"] for r in drafted.metrics]).max() < 1e-4


def test_every_part_that_a_manifest_can_provide(toy_run, tmp_path):
    """One file that provides each kind of part, every one a thin layer around core's own."""
    path = tmp_path / "parts.py"
    path.write_text(PARTS)
    (tmp_path / "critic.yaml").write_text("policies: {policy: {}, critic: {role: critic}}")
    run = toy_run(
        [str(path)],
        steps=1,
        runtime="mine",
        trainer="mine",
        engine="mine",
        transport="mine",
        schedule="mine",
        advantage_estimator="mine",
        rm_type="mine",
        custom_rm_path=None,
        prompts="mine",
        generate="mine",
        optimizer="mine",
        config=tmp_path / "critic.yaml",
    )
    made = list(dict.fromkeys(run.run.state["made"]))
    assert made == [
        "sink",
        "reward",
        "generate",
        "prompts for train",
        "runtime",
        "trainer",
        "model for train",
        "optimizer of policy",
        "advantage",
        "engine",
        "model for rollout",
        "decoder",
        "transport",
        "model for critic",
        "head of critic",
        "optimizer of critic",
        "schedule",
        "check",
    ]
    # these are made for number formats, rollout workers, engines that know the layout of their weights, and images
    assert {kind.split()[0] for kind in made} == set(MAKERS) - {"codec", "inline_rollouts", "sent_weights", "media"}
    assert run.metrics[0]["reward/mean"] == pytest.approx(run.metrics[0]["rollout/length_mean"])


PARTS = """
from miles_core.algorithm.choices import ALGORITHMS
from miles_embedded.engine.build import make_engine
from miles_embedded.engine.decoder import PlainDecoder
from miles_embedded.model.load import make_model
from miles_embedded.model.value_head import make_head
from miles_embedded.trainer.build import make_trainer
from miles_core.plugin.manifest import Plugin
from miles_core.plugin import InlineRuntime
from miles_core.rollout.function import SingleTurn
from miles_core.rollout.queue import open_prompts
from miles_core.schedule.sync import SyncSchedule
from miles_core.sync.push import CopyTransport
from miles_core.train.adamw import make_optimizer

KINDS = ("runtime", "model", "trainer", "engine", "decoder", "transport", "schedule", "advantage", "reward", "check",
         "prompts", "generate", "optimizer", "head", "sink")
plugin = Plugin(
    name="parts", summary="every part", version="1", core=">=0",
    provides={kind: {"mine": kind} for kind in KINDS},
    capabilities={"engine": ("score",), "trainer": ("entropy", "optimizers", "values")},
)


def note(run, kind):
    made = run.state.setdefault("made", [])
    made.append(kind)


def runtime(run):
    note(run, "runtime")
    return InlineRuntime(run)


def trainer(run, policy):
    note(run, "trainer")
    return make_trainer(run, policy)


def engine(run, policy):
    note(run, "engine")
    return make_engine(run, policy)


def decoder(run):
    note(run, "decoder")
    return PlainDecoder()


def transport(run, policy, engine):
    note(run, "transport")
    return CopyTransport(engine)


def schedule(run, collector, parts):
    note(run, "schedule")
    return SyncSchedule(run, collector, parts)


def model(run, policy, role):
    note(run, f"model for {role}")
    return make_model(run, policy)


def advantage(run):
    note(run, "advantage")
    return ALGORITHMS["rloo"]


def check(run):
    note(run, "check")


def sink(run):
    note(run, "sink")


def prompts(run, data, purpose):
    note(run, f"prompts for {purpose}")
    return open_prompts(run.config, data, "--prompt-data")


def generate(run):
    note(run, "generate")
    return SingleTurn()


def optimizer(run, policy, groups):
    note(run, f"optimizer of {policy.name}")
    return make_optimizer(run, policy, groups)


def head(run, policy, model):
    note(run, f"head of {policy.name}")
    return make_head(run, policy, model)


def reward(run):
    note(run, "reward")

    async def length(args, sample):
        return float(sample.response_length)

    return length
"""
