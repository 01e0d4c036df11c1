"""The commands of ``miles``: those of core and those of installed plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from miles_core.errors import PluginError
from miles_core.plugin.discovery import discover
from miles_core.plugin.load import import_target
from miles_core.plugin.manifest import Command, Plugin

CORE_COMMANDS = {
    "train": Command("run a training", "miles_core.cli.train:run"),
    "plan": Command(
        "show what a run would consist of, why it cannot start, or the fastest layouts (--search)",
        "miles_core.cli.plan:run",
    ),
}


class Commands(Mapping[str, Command]):
    """Commands by name, core's first.

    Args:
        manifests: plugin manifests by name.

    Raises:
        PluginError: two plugins, or a plugin and core, add a command with the same name.
    """

    def __init__(self, manifests: Mapping[str, Plugin]) -> None:
        self._commands = dict(CORE_COMMANDS)
        self._owner = dict.fromkeys(CORE_COMMANDS, "miles-core")
        for plugin in manifests.values():
            for name, command in plugin.commands.items():
                if name in self._commands:
                    raise PluginError(
                        f"both {self._owner[name]} and {plugin.name} add the command 'miles {name}'; uninstall one of them"
                    )
                self._commands[name], self._owner[name] = command, plugin.name

    @classmethod
    def installed(cls) -> Commands:
        """Return the commands of this environment. Skips plugins that cannot be imported; ``miles plugins`` reports them."""
        return cls(discover())

    @property
    def summaries(self) -> dict[str, str]:
        """Name -> one-line help."""
        return {name: command.summary for name, command in self.items()}

    def load(self, name: str) -> Callable[[list[str]], Any]:
        """Import the function of a command.

        Raises:
            PluginError: the function cannot be imported.
        """
        function: Callable[[list[str]], Any] = import_target(self._owner[name], self[name].target)
        return function

    def __getitem__(self, name: str) -> Command:
        return self._commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._commands)

    def __len__(self) -> int:
        return len(self._commands)
