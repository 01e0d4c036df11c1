"""What a plugin declares: one frozen dataclass, data only, importable without torch.

The resolver reads manifests before anything is built; the classes named in ``hooks`` and ``provides`` are imported
only after the plan is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_core.data.field import Field
from miles_core.plugin.hint import Hint, Remedy
from miles_core.plugin.panel import Panel


@dataclass(frozen=True)
class Rule:
    """A condition the run must meet, in the grammar of ``miles_core.plugin.rule``.

    Attributes:
        needs: the condition, e.g. ``"gpu.sm >= 100"`` or ``"plugin.other"``.
        because: the reason, shown word for word.
        when: the rule is checked only where this holds; empty is always.
        hardware: the rule is about tensor cores a format needs; ``--emulate-precision`` waives it.
    """

    needs: str
    because: str
    when: str = ""
    hardware: bool = False


@dataclass(frozen=True)
class Pair:
    """A supported cell of rollout x training precision, with the rules that hold inside it."""

    rollout: str
    train: str
    rules: tuple[Rule, ...] = ()
    recommends: tuple[Rule, ...] = ()
    experimental: bool = False


@dataclass(frozen=True)
class Set:
    """A value this plugin gives to another part's option, optionally only ``when`` a condition holds; ``because`` is
    shown when it contradicts somebody."""

    value: Any
    when: str = ""
    because: str = ""


@dataclass(frozen=True)
class Capability:
    """Something a backend can do only where a condition holds, e.g. ``Capability("keyed_sampling",
    when="server.deterministic")``; one without a condition is its name alone."""

    name: str
    when: str = ""


@dataclass(frozen=True)
class Package:
    """Software that a plugin's own distribution does not bring along.

    Attributes:
        name: of the distribution, e.g. ``"a-library"``.
        versions: that the plugin works with, e.g. ``">=2.50"``; empty is any.
        when: it is needed only where this holds; empty is always.
        install: how to install it, and what else would do.
    """

    name: str
    versions: str = ""
    when: str = ""
    install: str = ""

    def fits(self, version: object) -> bool:
        """Whether an installed version, or ``"none"``, is one the plugin works with."""
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
        summary: its line in ``miles --help``.
        target: ``"module:function"``, ``function(argv) -> exit code``; imported when the command is called.
    """

    summary: str
    target: str


@dataclass(frozen=True)
class Plugin:
    """A plugin's manifest.

    Attributes:
        name: what users type after ``--plugins``; equal to the entry point's name.
        summary: one line for ``miles plugins``.
        version: the distribution's version.
        core: the range of miles-core versions it works with, e.g. ``"~=0.1"``.
        config: a dataclass whose fields are made with ``miles_core.plugin.options``; its fields become flags and the
            table ``[name]`` of a configuration file. ``None`` when the plugin has no options.
        hooks: condition -> ``"module:Class"`` or several of them; only those whose condition holds are imported. In a
            single-file plugin ``"Class"`` is a class of that file.
        fields: columns added to samples and batches.
        formats: number formats, name -> ``"module:Class"`` (``miles_core.format.Format``).
        provides: parts made by name, kind -> {name: ``"module:callable"``}; kinds are the ``make_*`` hooks' nouns.
        sets: option path -> value (or ``Set(value, when)``) applied before anything is built.
        uses: capabilities of the engine or trainer this plugin depends on, capability -> reason; ``"engine.x"`` or
            ``"trainer.x"`` where one word is both.
        capabilities: what the backends this plugin provides can do, kind -> names (or ``Capability(name, when)``), e.g.
            ``{"engine": ("score",)}``. A transport whose messages an engine must know (``Engine.receive``) is named under
            the kind ``transport``, and engines that know them declare ``transport:NAME``.
        packages: software that its distribution does not bring along. A run is refused where the driver's installation lacks
            one; a plan for other machines assumes it there.
        requires: rules that must hold. A rule ``plugin.x`` activates x.
        recommends: advice, printed and never enforced.
        notes: condition -> a sentence that the plan tells the user where it holds, such as which of several ways is taken.
        claims: exclusive slots, slot -> reason; two active claimants of one slot conflict.
        pairs: supported precision cells.
        before, after: names of plugins this one comes before or after in every chain.
        aliases: extra spellings, flag -> {option path: value}, e.g. ``{"--rollout-mine": {"rollout.precision":
        "mine"}}``. environment: environment variable -> option path it sets, as if the flag were given.
        elsewhere: flags that it does not have and that users will look for, spelling -> what they give instead, e.g.
            ``{"--server-model": "give --hf-checkpoint"}`` where core's option says the same. A mapping translates what follows
            the flag, e.g. ``{"--server-size": {"*": "--size {}"}}``; see ``miles_core.config.translate``.
        defaults: values of options that nobody chose, option's fact -> value: a backend that ships with an installation says
            so here. Two installed manifests with different values for one option are refused.
        facts: facts this plugin defines beside its options, name -> one line of meaning.
        passthrough: flag prefix -> configuration table, e.g. ``{"--server-": "server"}``: every flag (and every key of
            that table) which no option declares is taken as it is, for software with a command line of its own.
        review: ``"module:function"``, ``review(facts, model) -> Review``, for what a rule cannot say because it takes
            arithmetic (do these sizes divide, does it fit). It is asked whenever a plan with this plugin is checked, many
            times when a plan is refused, so it must be quick and import no torch. ``facts`` are the ``Facts`` of the plan,
            ``model`` is the checkpoint's ``config.json`` or None where it is not known here.
        memory: ``"module:function"``, ``memory(facts, model) -> Iterable[Usage]``: what one GPU holds of each process that its backends
            run as in this plan, under the conditions of ``review``. The plan shows it and refuses what cannot fit.
        examine: ``"module:function"``, ``examine(config, weights)``, for what only a look at the checkpoint tells (are its weights those
            that the model needs). It is asked once of an accepted plan whose model this plugin builds (it provides the kind
            ``model``, or it provides the run's trainer and no ``model``, because that trainer has one of its own), before
            anything is built, and raises a ``MilesError``; it may import torch and read headers, but no weights. ``config`` is
            the run's; ``weights`` says that they must be there, which a plan of a ``config.json`` alone does not ask.
        examine: ``"module:function"``, a function of any of ``config``, ``weights`` and ``manifests``, for checks that need the
            checkpoint's files. Called once for an accepted plan, before anything is built, where this plugin builds the model (it
            provides the kind ``model``, or the run's trainer and no ``model``). It raises a ``MilesError``; it may import torch and
            read headers, but no weights. ``config`` is the run's, ``weights`` is False for a plan of a ``config.json`` alone, and
            ``manifests`` holds every known plugin.
        hints: what this plugin's metrics, and core's, say about it, and what helps then; see ``Hint``. They are followed
            while the plugin is installed, active or not: ``when`` says in which runs.
        panels: plots of the report that show several metrics together; a metric of the plugin that is in none has one of its own.
        remedies: what it does against a trouble that core's hints and errors warn of.
        commands: name -> ``Command`` that it adds to ``miles``. Two installed plugins may not add the same one.
        converts: flag of this plugin -> ``"module:callable"``, what ``miles convert`` does where that flag is given instead of
            a format: ``f(model_dir, save_dir, options)`` writes a checkpoint and returns a line that says what it did.
        measures: ``"module:callable"``, a function without arguments that measures what this host can do for the plugin and
            returns label -> text; ``miles doctor --measure`` shows it.
        demo: ``miles demo`` trains with this plugin where it is installed.
        standard: its parts and its ``examine`` function take part in every run, as core's own do, and no plan lists it. For the siblings
            that ship in core's wheel; a standard plugin has no hooks, options, rules or claims.
    """

    name: str
    summary: str
    version: str
    core: str
    config: type | None = None
    hooks: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    fields: tuple[Field, ...] = ()
    formats: Mapping[str, str] = field(default_factory=dict)
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
    elsewhere: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)
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
    standard: bool = False

    def capability(self, kind: str, name: str) -> Capability | None:
        """What it declares under that name for its backends of a kind; None where they cannot do it at all."""
        return next((c for c in self.declared(kind) if c.name == name), None)

    def declared(self, kind: str) -> tuple[Capability, ...]:
        """All capabilities of its backends of a kind, whatever their conditions come to."""
        return tuple(c if isinstance(c, Capability) else Capability(c) for c in self.capabilities.get(kind, ()))
