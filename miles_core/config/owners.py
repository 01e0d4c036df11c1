"""What follows from a plugin that owns an option: the backends that select it, and the plugins that it may activate."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.config.schema import Schema
from miles_core.plugin.activate import BACKENDS


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
                needs = rule.needs.strip()
                if needs.startswith("plugin."):
                    waiting.append(needs.removeprefix("plugin.").split()[0])
    return names
