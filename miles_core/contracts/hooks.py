"""The hooks, and with them the map of the loop.

One run, in order; every name below is a hook, indented under the moment it belongs to::

    start            on_start                                   every process
      build          make_runtime make_model make_head on_model on_further_layers make_trainer make_optimizer make_engine make_decoder make_transport
                     wrap_forward wrap_loss wrap_correction wrap_optimizer_step      (asked once, then plain functions)
                     make_prompts make_schedule wrap_rollout wrap_generate
      first sync     wrap_weights -> encode -> transport -> on_weights_synced -> make_check
    each step
      rollout        wrap_rollout( groups: wrap_generate( make_generate( on_request -> engine ) -> on_sample ) -> make_reward )
      learn          wrap_learn( prepare and train ), for each policy that trains
      prepare        on_batch -> forward(old) -> forward(ref) -> make_advantage
      train          per optimiser step: correction -> per micro-batch: forward -> loss -> backward; optimizer_step
      sync           wrap_weights -> encode -> transport -> on_weights_synced -> each check
      finish         [on_evaluation] -> on_step -> [on_save]
    resume           on_load
    end              on_stop

The verb gives the calling convention. ``make_*`` builds one part; the provider is selected by name from what manifests
provide, so it is a spec without an implementation method: a plugin names a callable in ``provides``. ``wrap_*`` is asked
once and returns a function around the inner one (or None to stay out); the first plugin of the plan is the outermost. ``on_*`` is told
and its return value ignored. pluggy runs at build time and for coarse events; no pluggy call sits inside a forward, a loss
or a per-tensor stream.

An implementation takes any subset of a hook's arguments, by name, without defaults, and is marked with ``hookimpl``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from miles_core.plugin.load import Hooks, register
from miles_core.plugin.marker import hookspec

if TYPE_CHECKING:
    from torch import nn

    from miles_core.algorithm.correction import Correct
    from miles_core.checkpoint.store import Store
    from miles_core.config.config import Config
    from miles_core.contracts.engine import Request
    from miles_core.contracts.further_layer import FurtherLayer
    from miles_core.contracts.policy import Policy
    from miles_core.contracts.run import Run
    from miles_core.contracts.runtime import Learn, LearnerHandle
    from miles_core.contracts.trainer import Forward, LossFunction, OptimizerStep
    from miles_core.data.batch import Batch
    from miles_core.data.sample import Sample
    from miles_core.data.unit import Unit
    from miles_core.plugin.facts import Facts
    from miles_core.plugin.manifest import Plugin
    from miles_core.plugin.plan import Plan

    Rollout = Callable[[int], Awaitable[list[list[Sample]]]]
    Generate = Callable[[Sample], Awaitable[list[Sample]]]
    Export = Callable[[], Iterator[Unit]]

#: What a stream of weights is made for.
Purpose = Literal["sync", "export", "snapshot"]
F = TypeVar("F", bound=Callable[..., Any])
#: What a ``wrap_*`` hook returns: it takes the inner function and returns one with the same arguments and result.
Wrap = Callable[[F], F]

#: kind -> (arguments of the callable a manifest provides, what it returns, in which process).
MAKERS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "runtime": (("run",), "miles_core.contracts.runtime.Runtime", "driver"),
    "model": (("run", "policy", "role"), "torch.nn.Module", "owning process"),
    "trainer": (("run", "policy"), "miles_core.contracts.trainer.Trainer", "every trainer rank"),
    "engine": (("run", "policy"), "miles_core.contracts.engine.Engine", "rollout worker"),
    "decoder": (("run", "policy", "engine"), "what the engine's scheduler calls at each step", "rollout worker"),
    "schedule": (("run", "collector", "parts"), "miles_core.contracts.schedule.Schedule", "driver"),
    "transport": (
        ("run", "policy", "engine", "world"),
        "miles_core.contracts.transport.Transport",
        "every trainer rank",
    ),
    "prompts": (("run", "data", "purpose"), "miles_core.PromptSource", "driver"),
    "generate": (("run",), "miles_core.RolloutFunction, or async f(sample, ask) -> samples", "rollout worker"),
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
}


class HookSpecs:
    """Every event and wrapper hook. ``Runs in`` names the process."""

    @hookspec
    def on_start(self, run: Run) -> None:
        """The plan is accepted and nothing is built yet. Runs in: every process."""

    @hookspec
    def on_model(self, run: Run, policy: Policy, model: nn.Module, role: str) -> None:
        """A model instance exists, possibly on the meta device, before data-parallel sharding, compilation and checkpoint
        wrappers; with tensor, expert or pipeline parallelism it is this rank's part, once a chunk. ``role`` is ``train``,
        ``rollout``, ``ref``, ``critic``, ``draft`` or ``shared`` (engine and trainer hold one module). Swap or hook modules
        here; no per-call state may live on a module. Runs in: the owning process, once an instance."""

    @hookspec
    def on_further_layers(self, run: Run, policy: Policy, wishes: list[FurtherLayer]) -> None:
        """A trainer that has the capability ``further_layers`` and a model of its own, which plugins cannot put layers into, asks which
        layers of the checkpoint behind the decoder it shall hold and train; without a wish it builds none. Append to ``wishes``. Runs in:
        every trainer rank, before its model is built."""

    @hookspec
    def wrap_rollout(self, run: Run) -> Wrap[Rollout] | None:
        """Around ``async rollout(step) -> list[group]``, the collection of one step's groups (a group is a list of samples of one
        prompt), whatever the schedule: with ``ahead`` it runs a step early, with ``async`` it takes groups that are ready. A filter,
        which may call ``rollout`` again for more, and not a place to keep groups: no checkpoint would know of them. Runs in:
        driver."""

    @hookspec
    def wrap_generate(self, run: Run) -> Wrap[Generate] | None:
        """Around ``async generate(sample) -> list[Sample]``, one sample's generation without its reward. Runs in: the process
        that awaits the engine (driver)."""

    @hookspec
    def on_request(self, run: Run, policy: Policy, request: Request) -> None:
        """A request is about to leave for the engine of ``policy``; add extras or metadata. Runs in: the process that
        awaits the engine (driver)."""

    @hookspec
    def on_sample(self, run: Run, sample: Sample) -> None:
        """A sample is finished, its reward not yet known. Called once a sample. Runs in: the process that awaits the engine (driver)."""

    @hookspec
    def on_evaluation(self, run: Run, name: str, groups: list[list[Sample]], metrics: dict[str, float]) -> None:
        """A data set of held-out prompts was generated and scored. ``name`` is its name ("" without one), ``groups`` its samples by
        prompt; add or change its ``metrics`` before they are recorded. Runs in: driver."""

    @hookspec
    def wrap_learn(self, run: Run, policy: Policy, handles: Mapping[str, LearnerHandle]) -> Wrap[Learn] | None:
        """Around ``async learn(samples, step) -> Learned``, all that a policy of the role ``train`` learns from one rollout. ``handles``
        holds the learner of every policy by name: ask others for ``values``, ``log_probs`` or ``top_log_probs`` and attach the answers to
        ``Sample.fields`` under declared names, let a critic ``learn`` from the same samples, or return ``Learned({}, 0)`` to leave the
        policy as it is. Asked once, when all policies are built. Runs in: driver."""

    @hookspec
    def on_batch(self, run: Run, policy: Policy, batch: Batch) -> None:
        """All samples of a rollout are collated, before log-probabilities and advantages; columns may be added or changed in
        place. Runs in: every trainer rank."""

    @hookspec
    def wrap_forward(self, run: Run, policy: Policy) -> Wrap[Forward] | None:
        """Around ``forward(chunk, micro_batch, ctx) -> Output``, one micro-batch through one model chunk, in every pass
        (see ``Context``). What a recomputation needs goes into ``ctx.attached``. Runs in: every trainer rank."""

    @hookspec
    def wrap_correction(self, run: Run, policy: Policy) -> Wrap[Correct] | None:
        """Around ``correct(inputs) -> Correction``, on all local tokens of one optimiser step, after old log-probs and
        advantages and before the first backward; ``compose_corrections`` does it and takes what the correction ``Needs``, which
        decides the passes made for it. Runs in: every trainer rank, once an optimiser step (without needs: a micro-batch)."""

    @hookspec
    def wrap_loss(self, run: Run, policy: Policy) -> Wrap[LossFunction] | None:
        """Around ``loss(output, micro_batch, ctx) -> Loss``, the loss of a micro-batch: the policy's, or a critic's (``policy.role``), whose
        ``output`` has ``values`` and no ``log_probs``. Runs in: every trainer rank."""

    @hookspec
    def wrap_weights(self, run: Run, policy: Policy, purpose: Purpose) -> Wrap[Export] | None:
        """Around ``weights() -> iterator of Unit``, the export stream of the model copy: add, drop, merge or rename tensors, never
        quantise. All weights that leave a trainer pass through it. ``purpose``: ``sync`` for the engine, ``export`` for a Hugging Face
        checkpoint (``--export-hf``), ``snapshot`` for weights that the trainer's own model is to compute with again. Asked for each
        stream. The first plugin sees what the later ones produced. Runs in: every trainer rank."""

    @hookspec
    def wrap_optimizer_step(self, run: Run, policy: Policy) -> Wrap[OptimizerStep] | None:
        """Around ``optimizer_step() -> metrics``, gradients complete and not yet clipped. Runs in: every trainer rank."""

    @hookspec
    def on_weights_synced(self, run: Run, policy: Policy, version: int) -> None:
        """The engine serves ``version``. Runs in: driver."""

    @hookspec
    def on_step(self, run: Run, metrics: dict[str, float]) -> None:
        """A step is complete; add metrics under ``<plugin>/...``. Runs in: driver."""

    @hookspec
    def on_save(self, run: Run, policy: Policy | None, store: Store) -> None:
        """A checkpoint is being written; ``store`` takes tensors and JSON under the plugin's own name. Runs in: every trainer
        rank (``policy`` set), and the driver (``policy`` None, another store)."""

    @hookspec
    def on_load(self, run: Run, policy: Policy | None, store: Store) -> None:
        """A checkpoint is being read. Runs in: every trainer rank."""

    @hookspec
    def on_stop(self, run: Run, error: BaseException | None) -> None:
        """The run ends, well or with ``error``; release what you hold. Runs in: every process."""


#: Their names, in the order of a run.
HOOKS = tuple(name for name in vars(HookSpecs) if name.startswith(("on_", "wrap_")))


def load_hooks(
    plan: Plan,
    manifests: Mapping[str, Plugin],
    config: Config | Mapping[str, Any] | None = None,
    *,
    facts: Facts | None = None,
) -> Hooks:
    """Import, instantiate and register every hook class of a plan, held against the specifications above.

    Args:
        plan: the accepted plan.
        manifests: the catalogue it was resolved from, or an equal one on a worker.
        config: a ``Config``, or plugin -> options; None is every option at its default. A hooks class that takes one
            argument gets its plugin's options.
        facts: this worker's facts, to decide hooks whose condition the driver could not.

    Raises:
        PluginError: a class cannot be imported or made, or implements a hook wrongly; names plugin, class and hook.
    """

    def options(plugin: Plugin) -> Any:
        if isinstance(config, Mapping) and plugin.name in config:
            return config[plugin.name]
        if plugin.config is None:
            return None
        return plugin.config() if config is None or isinstance(config, Mapping) else config.plugin(plugin.name)

    from miles_core.contracts.returned import BOUNDARIES  # which imports torch, and plans are made without it

    return register(plan, manifests, HookSpecs, options, facts=facts, boundaries=BOUNDARIES)
