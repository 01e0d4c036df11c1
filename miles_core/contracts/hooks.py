"""The hooks, and the order in which a run calls them.

Each name below is a hook, listed next to the phase of the run that calls it::

    start            make_media on_start make_sink              every process, driver
      build          make_runtime make_inline_rollouts make_model make_head on_model on_mtp_layers make_trainer make_optimizer
                     make_engine make_decoder make_transport make_codec make_sent_weights
                     wrap_forward wrap_loss wrap_correction wrap_optimizer_step      (called once; they return plain functions)
                     make_prompts make_schedule
      first sync     wrap_weights -> encode -> transport -> make_check
    each step
      rollout        groups: make_generate( on_request -> engine ) -> on_sample -> make_reward
      learn          wrap_learn( prepare and train ), for each policy that trains
      prepare        on_batch -> forward(old) -> forward(ref) -> make_advantage
      train          per optimiser step: correction -> per micro-batch: forward -> loss -> backward; optimizer_step
      sync           wrap_weights -> encode -> transport -> each check
      finish         [on_evaluation] -> on_step -> [on_save]
    resume           on_load
    end              [wrap_export( wrap_weights )] -> on_stop

The prefix determines the calling convention:

- ``make_*`` builds one part. A plugin does not implement it as a method; it names a callable in its manifest's ``provides``, and the
  run selects one provider by name.
- ``wrap_*`` is called once and returns a function that wraps the inner function, or None to leave it unwrapped. The first plugin of
  the plan is the outermost wrapper.
- ``on_*`` is called at an event and changes its arguments in place; it returns nothing.

Hooks are called only while building and at coarse events, never inside a forward pass, a loss or a stream of tensors.

An implementation accepts any subset of a hook's arguments, by name and without defaults, and is decorated with ``hookimpl``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from miles_core.plugin.load import Hooks, register

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from miles_core.algorithm.correction import Correct
    from miles_core.checkpoint.store import Store
    from miles_core.config.config import Config
    from miles_core.contracts.engine import Engine, Request
    from miles_core.contracts.mtp_request import MtpRequest
    from miles_core.contracts.run import Policy, Run
    from miles_core.contracts.runtime import Learn, LearnerHandle
    from miles_core.contracts.trainer import Forward, LossFunction, OptimizerStep
    from miles_core.data.batch import Batch
    from miles_core.data.sample import Sample
    from miles_core.data.weight_unit import WeightUnit
    from miles_core.plugin.facts import Facts
    from miles_core.plugin.manifest import Plugin
    from miles_core.plugin.plan import Plan

    Export = Callable[[], Iterator[WeightUnit]]
    WriteExport = Callable[[Path], None]

#: The purpose of an exported stream of weights.
Purpose = Literal["sync", "export", "snapshot", "convert"]
F = TypeVar("F", bound=Callable[..., Any])
#: The result of a ``wrap_*`` hook: a function that takes the inner function and returns one with the same arguments and result.
Wrap = Callable[[F], F]

#: kind -> (arguments of the callable in ``provides``, its return type, the process that calls it).
MAKERS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "runtime": (("run",), "miles_core.contracts.runtime.Runtime", "driver"),
    "model": (("run", "policy", "role"), "torch.nn.Module", "owning process"),
    "trainer": (("run", "policy"), "miles_core.contracts.trainer.Trainer", "every trainer rank"),
    "engine": (("run", "policy"), "miles_core.contracts.engine.Engine", "rollout worker"),
    "decoder": (
        ("run", "policy", "engine"),
        "the object that the engine's scheduler calls each step",
        "rollout worker",
    ),
    "schedule": (("run", "collector", "parts"), "miles_core.contracts.schedule.Schedule", "driver"),
    "transport": (
        ("run", "policy", "engine", "world"),
        "miles_core.contracts.transport.Transport",
        "every trainer rank",
    ),
    "prompts": (("run", "data", "purpose"), "miles_core.data.PromptSource", "driver"),
    "media": (("run",), "f(text, media) -> the text with its placeholders expanded", "driver"),
    "generate": (("run",), "miles_core.plugin.RolloutFunction, or async f(sample, ask) -> samples", "rollout worker"),
    "reward": (
        ("run", "policy"),
        "async f(args, sample) -> float | dict; group_reward: async f(args, samples) -> list",
        "rollout worker",
    ),
    "head": (
        ("run", "policy", "model"),
        "torch.nn.Module, hidden states [rows, hidden] -> values [rows] or [rows, 1]",
        "every trainer rank",
    ),
    "optimizer": (
        ("run", "policy", "groups"),
        "an object with torch.optim.Optimizer's interface",
        "every trainer rank",
    ),
    "advantage": (("run", "policy"), "f(AdvantageInputs) -> Tensor[tokens]", "every trainer rank"),
    "check": (("run",), "async f(PolicyParts) -> metrics, or None", "driver"),
    "sink": (("run",), "miles_core.observe.metrics.Sink, or None", "driver"),
    "codec": (("format", "config", "checkpoint"), "miles_core.precision.codec.Codec", "every trainer rank, engine"),
    "inline_rollouts": (("run",), "miles_core.contracts.runtime.Runtime", "driver"),
    "sent_weights": (("codec", "dtypes"), "miles_core.train.rank.SentWeights", "every trainer rank"),
}
#: Kinds of parts that commands use without a run, from any installed plugin: kind -> (arguments, result).
WITHOUT_A_RUN: dict[str, tuple[tuple[str, ...], str]] = {
    "search": (("argv",), "exit code of miles plan --search"),
    "correction": (
        ("argv", "schema", "problems", "attempt"),
        "message of a corrected command line (command_line), or about an option of another program (foreign_option: name)",
    ),
    "samples": (("run_dir", "kind", "step"), "iterator of stored samples, each a mapping"),
    "report": (("run_dir",), "path of the report"),
}


class HookSpecs:
    """Specifications of all event and wrapper hooks. ``Runs in`` names the process that calls the hook."""

    def on_start(self, run: Run) -> None:
        """Called after the plan is accepted and before any part is built. Runs in: every process."""

    def on_model(self, run: Run, policy: Policy, model: nn.Module, role: str) -> None:
        """Called for each new model instance, before data-parallel sharding, compilation and activation-checkpointing wrappers.

        Replace or hook modules here. Do not store per-call state on modules. The model may be on the meta device. With tensor, expert or
        pipeline parallelism, ``model`` is this rank's part, and the hook is called once per chunk. ``role`` is ``train``, ``rollout``,
        ``ref``, ``critic``, ``draft`` or ``shared`` (engine and trainer use the same module).
        Runs in: the process that owns the model, once per instance."""

    def on_mtp_layers(self, run: Run, policy: Policy, requests: list[MtpRequest]) -> None:
        """Request training of the checkpoint's multi-token prediction layer: append a ``MtpRequest`` to ``requests``.

        Called by trainers with the capability ``mtp_layers``, because plugins cannot add layers to their models. Without a request, such
        a trainer does not build the layer. Runs in: every trainer rank, before its model is built."""

    def on_request(self, run: Run, policy: Policy, request: Request) -> None:
        """Called before a request is sent to the engine of ``policy``; may add extras or metadata. Runs in: the driver, or
        each rollout worker."""

    def on_sample(self, run: Run, sample: Sample) -> None:
        """Called once for each finished sample, before its reward is computed. Runs in: the driver, or each rollout worker."""

    def on_evaluation(self, run: Run, name: str, groups: list[list[Sample]], metrics: dict[str, float]) -> None:
        """Called after the evaluation of one data set of held-out prompts; may add or change its ``metrics`` before they are recorded.

        ``name`` is the data set's name ("" without one); ``groups`` holds its samples by prompt. Runs in: driver."""

    def wrap_learn(
        self, run: Run, policy: Policy, handles: Mapping[str, LearnerHandle], engines: Mapping[str, Engine]
    ) -> Wrap[Learn] | None:
        """Wrap ``async learn(samples, step) -> Learned``, which trains a policy of the role ``train`` on one rollout.

        ``handles`` maps policy names to learners, ``engines`` to the engines of policies that generate. A wrapper may compute
        ``values``, ``log_probs`` or ``top_log_probs`` with other policies and store the results in ``Sample.fields`` under declared names,
        give a policy the weights of another (``save``, ``load``), call ``learn`` of a critic with the same samples, or
        return ``Learned({}, 0)`` to skip the update. Called once, after all policies are built. Runs in: driver."""

    def on_batch(self, run: Run, policy: Policy, batch: Batch) -> None:
        """Called after the samples of a rollout are collated, before log-probabilities and advantages are computed; may add columns or
        change them in place. Runs in: every trainer rank."""

    def wrap_forward(self, run: Run, policy: Policy) -> Wrap[Forward] | None:
        """Wrap ``forward(chunk, micro_batch, ctx) -> Output``, the pass of one micro-batch through one model chunk, for every kind of pass
        (see ``Context``). Store values that a recomputation needs in ``ctx.attached``. Runs in: every trainer rank."""

    def wrap_correction(self, run: Run, policy: Policy) -> Wrap[Correct] | None:
        """Wrap ``correct(inputs) -> Correction``, computed from all local tokens of one optimiser step, after old log-probs and
        advantages and before the first backward pass.

        ``compose_corrections`` builds the wrapper and takes the correction's ``Needs``, which determine the additional passes.
        Runs in: every trainer rank, once per optimiser step (once per micro-batch without needs)."""

    def wrap_loss(self, run: Run, policy: Policy) -> Wrap[LossFunction] | None:
        """Wrap ``loss(output, micro_batch, ctx) -> Loss``, the loss of one micro-batch of a policy or a critic (``policy.role``). A critic's
        ``output`` has ``values`` instead of ``log_probs``. Runs in: every trainer rank."""

    def wrap_weights(self, run: Run, policy: Policy, purpose: Purpose) -> Wrap[Export] | None:
        """Wrap ``weights() -> iterator of WeightUnit``, the stream of all weights that leave a trainer.

        A wrapper may add, drop, merge or rename tensors, but must not quantise them. ``purpose`` is ``sync`` for the engine, ``export`` for a
        Hugging Face checkpoint (``--export-hf``), ``snapshot`` for weights that the trainer's model later computes with, or ``convert`` for the
        weights of a checkpoint that ``miles convert`` reads, first on the meta device. Called for each stream. The first plugin receives the
        output of the later ones. Runs in: every trainer rank; ``convert``: the process of the command."""

    def wrap_export(self, run: Run, policy: Policy) -> Wrap[WriteExport] | None:
        """Wrap ``export(directory)``, which writes the Hugging Face checkpoint of ``--export-hf``. A wrapper may write other files next to
        it, or write another kind of checkpoint and not call the inner function. Runs in: every trainer rank."""

    def wrap_optimizer_step(self, run: Run, policy: Policy) -> Wrap[OptimizerStep] | None:
        """Wrap ``optimizer_step() -> metrics``, called with complete gradients before clipping. Runs in: every trainer rank."""

    def on_step(self, run: Run, metrics: dict[str, float]) -> None:
        """Called after each step; may add metrics named ``<plugin>/...``. Runs in: driver."""

    def on_save(self, run: Run, policy: Policy | None, store: Store) -> None:
        """Called while a checkpoint is written; ``store`` saves tensors and JSON data under the plugin's name. Runs in: every trainer
        rank (with ``policy``), and the driver (``policy`` is None, with a separate store)."""

    def on_load(self, run: Run, policy: Policy | None, store: Store) -> None:
        """Called while a checkpoint is read. Runs in: every trainer rank (with ``policy``), and the driver (``policy`` is None)."""

    def on_stop(self, run: Run, error: BaseException | None) -> None:
        """Called when the run ends, with the ``error`` that ended it or None; release all resources here. Runs in: every process."""


#: Hook names, in the order of a run.
HOOKS = tuple(name for name in vars(HookSpecs) if name.startswith(("on_", "wrap_")))


def load_hooks(
    plan: Plan,
    manifests: Mapping[str, Plugin],
    config: Config | Mapping[str, Any] | None = None,
    *,
    facts: Facts | None = None,
) -> Hooks:
    """Import, instantiate and register the hook classes of a plan, and check them against ``HookSpecs``.

    Args:
        plan: the accepted plan.
        manifests: the manifests from which the plan was resolved.
        config: a ``Config``, or plugin name -> options; None uses the default of every option. A hook class whose constructor takes
            one argument receives the options of its plugin.
        facts: this worker's facts, which decide hook conditions that the driver could not decide.

    Raises:
        PluginError: a class cannot be imported or instantiated, or implements a hook incorrectly; names plugin, class and hook.
    """

    def options(plugin: Plugin) -> Any:
        if isinstance(config, Mapping) and plugin.name in config:
            return config[plugin.name]
        if plugin.config is None:
            return None
        return plugin.config() if config is None or isinstance(config, Mapping) else config.plugin(plugin.name)

    from miles_core.contracts.boundaries import BOUNDARIES  # imports torch, which planning does not need

    return register(plan, manifests, HookSpecs, options, facts=facts, boundaries=BOUNDARIES)
