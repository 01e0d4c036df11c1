"""What follows from a plugin that owns an option: the backends that select it, and the plugins that it may activate."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from miles_core.config.schema import CORE, Schema
from miles_core.plugin.activate import BACKENDS, SELECTED, plugins_needed
from miles_core.plugin.facts import Facts


def backends_of(schema: Schema, plugin: str) -> dict[str, str]:
    """Return the backends that a plugin provides: path of the option that selects one -> its name."""
    provides = schema.manifests[plugin].provides
    return {
        option.path: next(iter(provides[option.info.part]))
        for option in schema.options.values()
        if option.info.part in BACKENDS and option.info.part in provides
    }


def with_requirements(schema: Schema, plugins: Iterable[str]) -> set[str]:
    """Return these plugins and, recursively, all plugins that their rules may activate (``needs = "plugin.x"``)."""
    names: set[str] = set()
    waiting = list(plugins)
    while waiting:
        name = waiting.pop()
        if name not in names and name in schema.manifests:
            names.add(name)
            for rule in schema.manifests[name].requires:
                waiting += plugins_needed(rule)
    return names


def choose_owner(
    schema: Schema, owners: Sequence[str], spellings: Sequence[str], taken: Collection[str], chosen: Collection[str]
) -> str:
    """Return the plugin that options of ``owners`` enable; "" if none of them, or if several may be meant.

    The only owner; else the one whose name the flags begin with (``--mine-size`` of ``mine``); else the only one that provides no backend,
    such as a feature with flags for every engine.

    Args:
        owners: the installed plugins that declare the options.
        spellings: the flags as given.
        taken: the plugins of the run so far.
        chosen: paths that the user set. A plugin with a backend is out of the question if the user selected another.
    """
    free = [name for name in owners if name not in taken and not backends_of(schema, name).keys() & set(chosen)]
    named = [name for name in free if all(spelling.startswith(f"--{name}-") for spelling in spellings)]
    if len(owners) == 1 or named:
        return next(iter(named or free), "")
    features = [name for name in free if not backends_of(schema, name)]
    return features[0] if len(features) == 1 and not set(taken) & set(owners) else ""


def find_enabled(schema: Schema, facts: Facts, active: Collection[str]) -> Iterator[str]:
    """Yield the plugins that the options among ``facts`` enable when a configuration is loaded (``config.load``).

    Args:
        active: the plugins of the run.
    """
    chosen = {path for path, option in schema.options.items() if (fact := facts.get(option.fact)) and fact.chosen}
    for path in chosen:
        option, owners = schema.options[path], schema.flag_of(path).owners
        value = facts[option.fact].value
        is_part = isinstance(value, str) and option.info.part not in SELECTED
        providers = option.providers.get(value, ()) if is_part else ()
        if option.enables_with(value):
            yield option.owner
        elif option.info.enables or {CORE, *active} & {*owners}:
            if len(providers) == 1 and providers[0] not in active:
                yield providers[0]
        elif owner := choose_owner(schema, owners, [option.flag], active, chosen):
            yield owner
