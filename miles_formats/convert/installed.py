"""Looks up installed number formats, active or not, to convert and read checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miles_core.errors import CheckpointError, ConfigError
from miles_core.nearest import find_nearest
from miles_core.plugin.discovery import discover
from miles_core.plugin.facts import COMES_WITH
from miles_core.plugin.load import import_target

if TYPE_CHECKING:
    from miles_core.plugin.manifest import Plugin
    from miles_core.precision.format import Format


def providers(manifests: Mapping[str, Plugin] | None = None) -> dict[str, Plugin]:
    """Return format name -> plugin that provides it. ``manifests`` defaults to all installed plugins."""
    manifests = discover() if manifests is None else manifests
    return {name: plugin for plugin in manifests.values() for name in plugin.formats}


def format_class(name: str, manifests: Mapping[str, Plugin] | None = None) -> type[Format]:
    """Import the class of a number format.

    Raises:
        ConfigError: no installed plugin provides the format.
        PluginError: the class cannot be imported.
    """
    known = providers(manifests)
    if name not in known:
        raise ConfigError(describe_unknown(name, known))
    made: type[Format] = import_target(known[name].name, known[name].formats[name])
    return made


def describe_unknown(name: str, known: Mapping[str, Plugin]) -> str:
    """Return the error message for a format that no installed plugin provides."""
    close = find_nearest(name, [*known, "bf16"])
    have = f"installed: {', '.join(sorted(known))}" if known else "none is installed"
    return f"there is no number format {name!r} ({have}); {f'did you mean {close[0]}?' if close else COMES_WITH}"


def recognise(block: Mapping[str, Any], where: str) -> Format:
    """Create the installed format that a checkpoint's ``quantization_config`` describes.

    Raises:
        CheckpointError: no format recognises the block, or several do.
        PluginError: a format cannot be imported.
    """
    known = providers()
    classes = {name: format_class(name, {p.name: p for p in known.values()}) for name in sorted(known)}
    found = [name for name, format in classes.items() if format.recognises(block)]
    if len(found) == 1:
        return classes[found[0]].from_checkpoint(block)
    method = str(block.get("quant_method", "unnamed"))
    if found:
        raise CheckpointError(f"{where}: {' and '.join(found)} both recognise its quantization_config ({method})")
    raise CheckpointError(
        f"{where} is quantised (quant_method {method!r}) in a way that no installed number format recognises "
        f"(installed: {', '.join(sorted(known)) or 'none'}); install the plugin that reads it, or take its BF16 weights"
    )
