"""The manifest of a plugin: a frozen dataclass that contains only data and can be imported without torch.

The checker reads manifests before anything is built. The classes named in ``hooks`` and ``provides`` are imported only after the
plan is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from miles_core.data.field import Field
from miles_core.plugin.hint import Hint, Remedy
from miles_core.plugin.panel import Panel


@dataclass(frozen=True)
class Rule:
    """A condition that a run must meet, in the grammar of ``miles_core.plugin.rule``.

    Attributes:
        needs: the condition, e.g. ``"gpu.sm >= 100"`` or ``"plugin.other"``.
        because: the reason, shown verbatim.
        when: condition under which the rule applies; empty is always.
        hardware: whether the rule is about tensor cores that a format needs; ``--emulate-precision`` waives such rules.
    """

    needs: str
    because: str
    when: str = ""
    hardware: bool = False


@dataclass(frozen=True)
class Pair:
    """A supported pair of rollout and training precision, with the rules and recommendations that apply to it."""

    rollout: str
    train: str
    rules: tuple[Rule, ...] = ()
    recommends: tuple[Rule, ...] = ()
    experimental: bool = False


@dataclass(frozen=True)
class Set:
    """A value that a plugin sets for an option of core or of another plugin.

    Attributes:
        value: the value.
        when: condition under which it is set; empty is always. An environment variable (``env.NAME``) whose condition asks for GPUs that are
            not known on the driver's host is set, so that workers with such GPUs have it.
        because: the reason, shown if the value conflicts with the user's or another plugin's value.
    """

    value: Any
    when: str = ""
    because: str = ""


@dataclass(frozen=True)
class Capability:
    """A capability that a backend has under a condition, e.g. ``Capability("keyed_sampling", when="server.deterministic")``.

    A manifest lists an unconditional capability by its name only.
    """

    name: str
    when: str = ""


@dataclass(frozen=True)
class Package:
    """A package that a plugin needs but its distribution does not install.

    Attributes:
        name: name of the distribution, e.g. ``"a-library"``.
        versions: supported versions, e.g. ``">=2.50"``; empty is any.
        when: condition under which the package is needed; empty is always.
        install: how to install the package, and the alternatives.
        without: what the run does without the package; if set, the package is optional, and its absence is a note and no problem.
    """

    name: str
    versions: str = ""
    when: str = ""
    install: str = ""
    without: str = ""

    def fits(self, version: object) -> bool:
        """Whether the plugin supports an installed version; False for ``"none"``."""
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion

        try:
            return version != "none" and SpecifierSet(self.versions).contains(str(version), prereleases=True)
        except InvalidVersion:
            return False


@dataclass(frozen=True)
class Command:
    """A command of ``miles``, e.g. ``miles report``.

    Attributes:
        summary: the command's line in ``miles --help``.
        target: ``"module:function"``, a ``function(argv) -> exit code``; imported when the command is called.
    """

    summary: str
    target: str


@dataclass(frozen=True)
class Plugin:
    """A plugin's manifest.

    Attributes:
        name: the name used in ``--plugins``; equal to the name of the entry point.
        summary: one line for ``miles plugins``.
        version: the distribution's version.
        core: supported versions of miles-core, e.g. ``"~=0.1"``.
        config: a dataclass whose fields are declared with ``miles_core.plugin.option``; they become flags and the table ``[name]`` of a
            configuration file. None if the plugin has no options.
        hooks: condition -> ``"module:Class"``, or a tuple of them; a class is imported only if its condition holds. In a
            single-file plugin, ``"Class"`` is a class of that file.
        fields: columns that the plugin adds to samples and batches.
        formats: number formats, name -> ``"module:Class"`` (``miles_formats.Format``).
        format_error: condition -> ``Format.error`` of the number format (the first that holds; empty is always), and
        rounds_inputs: whether it rounds the inputs of products, too: the plan shows how far engine and trainer may then differ.
        provides: parts, kind -> {name: ``"module:callable"``}; the kinds are the names of the ``make_*`` hooks
            without prefix, ``record`` (a function that writes a file into the directory of a new run), ``progress`` (the live
            display, a ``miles_core.observe.progress.Progress``) and ``report``.
        sets: option path -> value, ``Set(value, when)`` or a tuple of ``Set``, applied before anything is built.
        uses: capabilities of the engine or trainer that the plugin needs, capability -> reason; ``"engine.x"`` or
            ``"trainer.x"`` if both kinds have a capability of that name.
        capabilities: capabilities of the backends that the plugin provides, kind -> names (or ``Capability(name, when)``), e.g.
            ``{"engine": ("score",)}``. A transport that sends messages to the engine (``Engine.receive``) is listed under the kind
            ``transport``; engines that support its messages declare ``transport:NAME``. An engine or trainer declares the number formats
            for which its ``quantizer`` returns an implementation as ``format:NAME``, or all of them as ``format:*``.
        packages: packages that its distribution does not install. A plan is rejected if the driver's installation lacks one; a
            plan for other machines assumes that they exist there.
        requires: rules that must hold. A rule ``plugin.x`` activates x.
        recommends: recommendations, printed but not enforced.
        notes: condition -> note that the plan shows if the condition holds, such as which of several implementations is used.
        claims: exclusive slots, slot -> reason; two active plugins that claim the same slot conflict.
        pairs: supported precision pairs.
        before, after: names of plugins that this plugin precedes or follows in every chain.
        aliases: flags that set fixed values, flag -> {option path: value}, e.g. ``{"--rollout-mine": {"rollout.precision": "mine"}}``.
            One that sets several options replaces other flags that set them.
        environment: environment variable -> path of the option that it sets.
        foreign_flags: flags of other software that users may expect, flag -> what to use instead, e.g.
            ``{"--server-model": "give --hf-checkpoint"}``. A mapping translates the flag's value, e.g.
            ``{"--server-size": {"*": "--size {}"}}``; see ``miles_tools.command_line``.
        defaults: default values of options, fact -> value, for backends that ship with an installation. Two installed manifests
            with different values for one option are an error.
        facts: facts that the plugin defines in addition to its options, name -> one-line description.
        passthrough: flag prefix -> configuration table, e.g. ``{"--server-": "server"}``: flags with this prefix (and keys of the
            table) that no option declares are passed unchecked to software with its own command line.
        review: ``"module:function"``, ``review(facts, model) -> Review``, for checks that need arithmetic, such as divisibility.
            Called for every check of a plan with this plugin, many times for a rejected plan, so it must be fast and must not
            import torch. ``facts`` are the plan's ``Facts``; ``model`` is the checkpoint's ``config.json``, or None if unknown.
        memory: ``"module:function"``, ``memory(facts, model) -> Iterable[Usage]``: the memory that each process of the plugin's
            backends uses on one GPU. Called like ``review``. The plan shows the result, and is rejected if it exceeds the GPU.
        examine: ``"module:function"``, a function of any of ``config``, ``weights`` and ``manifests``, for checks that need the
            checkpoint's files. Called once for an accepted plan, before anything is built, if this plugin builds the model (it
            provides the kind ``model``, or the run's trainer and no ``model``). It raises a ``MilesError``; it may import torch and
            read headers, but no weights. ``config`` is the run's, ``weights`` is False for a plan of a ``config.json`` alone, and
            ``manifests`` holds every known plugin.
        hints: advice triggered by metrics of the plugin or of core; see ``Hint``. Used if the plugin is installed, whether or not
            it is active; ``when`` selects the runs.
        panels: plots of the report that show several metrics together; every other metric of the plugin has its own plot.
        remedies: remedies for problems that core's hints and errors warn about.
        commands: name -> ``Command`` to add to ``miles``. Two installed plugins may not add the same command.
        converts: flag of this plugin -> ``"module:callable"``, which ``miles convert`` calls if the flag is given instead of a
            format: ``f(model_dir, save_dir, options)`` writes a checkpoint and returns a one-line summary.
        measures: ``"module:callable"``, a function without arguments that measures this host for the plugin and returns
            label -> text; used by ``miles doctor --measure``.
        demo: whether ``miles demo`` trains with this plugin if it is installed.
        toy: options of a toy run that uses the plugin, flag with underscores -> value, e.g. ``{"mine_group_size": 32}``; used by
            ``miles plugins matrix``. None omits an option of the toy run, and a mapping is a table of a configuration file. The texts
            ``{model}`` and ``{draft}`` are paths of further tiny models, the second smaller than the run's.
        standard: whether the plugin's parts, options and ``examine`` are part of every run, like core's, without being listed in plans.
            For plugins in core's wheel; a standard plugin has no hooks, rules or claims.
    """

    name: str
    summary: str
    version: str
    core: str
    config: type | None = None
    hooks: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    fields: tuple[Field, ...] = ()
    formats: Mapping[str, str] = field(default_factory=dict)
    format_error: Mapping[str, float] = field(default_factory=dict)
    rounds_inputs: bool = False
    provides: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    sets: Mapping[str, Any] = field(default_factory=dict)
    uses: Mapping[str, str] = field(default_factory=dict)
    capabilities: Mapping[str, tuple[str | Capability, ...]] = field(default_factory=dict)
    packages: tuple[Package, ...] = ()
    requires: tuple[Rule, ...] = ()
    recommends: tuple[Rule, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    claims: Mapping[str, str] = field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    aliases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    foreign_flags: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    passthrough: Mapping[str, str] = field(default_factory=dict)
    review: str = ""
    memory: str = ""
    examine: str = ""
    hints: tuple[Hint, ...] = ()
    panels: tuple[Panel, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    commands: Mapping[str, Command] = field(default_factory=dict)
    converts: Mapping[str, str] = field(default_factory=dict)
    measures: str = ""
    demo: bool = False
    toy: Mapping[str, Any] = field(default_factory=dict)
    standard: bool = False

    def capability(self, kind: str, name: str) -> Capability | None:
        """Return the declaration of a capability for the plugin's backends of a kind; None if they do not have it.

        A declared name such as ``format:*`` stands for every capability with this beginning."""
        declared = self._declared.get(kind, {})
        return declared.get(name) or declared.get(f"{name.partition(':')[0]}:*")

    def list_capabilities(self, kind: str) -> tuple[Capability, ...]:
        """Return all capabilities of the plugin's backends of a kind, including conditional ones."""
        return tuple(self._declared.get(kind, {}).values())

    @cached_property
    def _declared(self) -> dict[str, dict[str, Capability]]:
        """Kind -> name -> capability."""
        made = {
            kind: [c if isinstance(c, Capability) else Capability(c) for c in given]
            for kind, given in self.capabilities.items()
        }
        return {kind: {c.name: c for c in capabilities} for kind, capabilities in made.items()}
