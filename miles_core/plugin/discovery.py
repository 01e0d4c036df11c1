"""Find installed plugins and load their manifests.

A distribution registers ``[project.entry-points."miles.plugins"] mine = "miles_mine:plugin"``. A plugin may also be a single
file, ``--plugins ./my.py``. Scanning reads only metadata; a manifest is imported on first access, which is fast because
manifests do not import torch. An installed plugin is not automatically active.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from miles_core.errors import PluginError
from miles_core.nearest import did_you_mean
from miles_core.plugin.declared import find_mistakes
from miles_core.plugin.failure import explain_import_failure
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.marker import MARK
from miles_core.version import __version__

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

GROUP = "miles.plugins"
_CORE_REQUIREMENT = re.compile(r"\s*miles[-_.]+core\s*(?P<rest>(?![\w.-]).*)", re.I | re.S)
_OF_AN_EXTRA = re.compile(r";\s*extra\s*==\s*['\"][^'\"]*['\"]\s*$")
_FILE_MODULE = "miles_plugin_file_"


class Catalogue(Mapping[str, Plugin]):
    """The available plugins, by name.

    Access by name imports the plugin's manifest and raises PluginError if that fails. Iteration imports all manifests and skips
    those that fail; ``broken`` holds the reasons, for ``miles plugins`` and the notes of a run.

    Attributes:
        sources: plugin -> ``miles-plugin-mine 0.1.0`` or ``file:PATH sha256:...``; filled by scanning.
        broken: plugin -> why its manifest cannot be used.
        heavy: plugins whose manifest imports torch, which slows down every command.
    """

    def __init__(self, points: Iterable[EntryPoint] = ()) -> None:
        self._points: dict[str, dict[str, EntryPoint]] = {}
        self._loaded: dict[str, Plugin] = {}
        self.sources: dict[str, str] = {}
        self.broken: dict[str, str] = {}
        self.heavy: list[str] = []
        for point in points:
            self._points.setdefault(point.name, {})[_source(point)] = point
        for name, points_by_source in self._points.items():
            self.sources[name] = next(iter(points_by_source))

    def __getitem__(self, name: str) -> Plugin:
        if name not in self._loaded:
            if name not in self._points:
                raise KeyError(name)
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._points or name in self._loaded

    def __iter__(self) -> Iterator[str]:
        for name in self.names:
            if name not in self._loaded and name not in self.broken:
                try:
                    self[name]
                except PluginError as error:
                    self.broken[name] = str(error)
            if name not in self.broken:
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def names(self) -> list[str]:
        """All plugin names, single files first. Imports nothing."""
        return [*sorted(self._loaded.keys() - self._points.keys()), *sorted(self._points)]

    def exclude(self, name: str, why: str) -> None:
        """Exclude an installed plugin and record the reason in ``broken``."""
        self.broken[name] = f"{name} ({self.sources[name]}): {why}"

    def request(self, wanted: str) -> str:
        """Load the manifest of a plugin named on the command line.

        Args:
            wanted: a name, or the path of a single-file plugin (``is_file``).

        Returns:
            the plugin's name.

        Raises:
            PluginError: the plugin is not installed (names similar ones), is installed twice, or its manifest cannot be
                imported.
        """
        if is_file(wanted):
            return self.add_file(Path(wanted))
        if wanted not in self:
            hint = (
                did_you_mean(wanted, self.names)
                or f"install the package that provides it (usually miles-plugin-{wanted.replace('_', '-')})"
            )
            raise PluginError(f"no plugin {wanted!r} is installed; {hint}")
        return self[wanted].name

    def add_file(self, path: Path) -> str:
        """Add a single-file plugin and return its name.

        The file may define a manifest ``plugin``, whose hooks and parts name classes of the file. Otherwise its functions and
        classes marked with ``hookimpl`` become a plugin named like the file.

        Raises:
            PluginError: the file does not exist, cannot be imported, or defines neither; or its name is in use.
        """
        path = path.expanduser().resolve()
        if not path.is_file():
            raise PluginError(f"--plugins {path}: no such file")
        source = f"file:{path} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
        for name, known in self.sources.items():
            if known == source and name in self._loaded:
                return name
        stem = re.sub(r"\W", "_", path.stem)
        module = _import_file(path, f"{_FILE_MODULE}{stem}_{source[-12:]}")
        declared = getattr(module, "plugin", None)
        plugin = (
            _qualify_targets(declared, module, path) if declared is not None else _make_manifest(stem, module, path)
        )
        if plugin.name in self:
            raise PluginError(
                f"two plugins are called {plugin.name!r}: {self.sources[plugin.name]} and {path}; "
                "rename the one in the file"
            )
        self._loaded[plugin.name] = plugin
        self.sources[plugin.name] = source
        return plugin.name

    def _load(self, name: str) -> Plugin:
        points_by_source = self._points[name]
        if len(points_by_source) > 1:
            raise PluginError(
                f"two distributions provide a plugin called {name!r}: {' and '.join(sorted(points_by_source))}; "
                "uninstall one of them"
            )
        source, point = next(iter(points_by_source.items()))
        _check_core_range(name, source, point)
        light = "torch" not in sys.modules
        with explain_import_failure(f"plugin {name!r} ({source})", point.value):
            plugin = point.load()
        if light and "torch" in sys.modules:
            self.heavy.append(name)
        if not isinstance(plugin, Plugin):
            raise PluginError(
                f"plugin {name!r} ({source}): {point.value} is {type(plugin).__name__}, not a miles_core.plugin.Plugin"
            )
        if wrong := list(find_mistakes(plugin)):
            raise PluginError(f"plugin {name!r} ({source}): {'; '.join(wrong)}")
        if plugin.name != name:
            raise PluginError(
                f"plugin {name!r} ({source}): its manifest calls itself {plugin.name!r}; "
                "entry point and manifest must agree"
            )
        return plugin


def _check_core_range(name: str, source: str, point: EntryPoint) -> None:
    """Check the range of core versions that a distribution requires (``Requires-Dist: miles-core``), before its code is imported.

    ``pip install --no-deps`` and editable installs bypass pip's own check.

    Raises:
        PluginError: the installed core is outside of the range.
    """
    for line in _metadata(point.dist)[1] if point.dist is not None else ():
        wanted = _core_range(line)
        if wanted is not None and not wanted.contains(__version__, prereleases=True):
            raise PluginError(
                f"plugin {name!r} ({source}): it supports miles-core {wanted}, and {__version__} is installed; install a matching "
                "version of the plugin or of miles-core"
            )


@cache
def _core_range(requirement: str) -> SpecifierSet | None:
    """Return the versions of core that a line of ``Requires-Dist`` asks for here; None if it is about something else."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    matched = _CORE_REQUIREMENT.match(requirement)
    if not matched or _OF_AN_EXTRA.search(matched["rest"]):
        return None
    if not set(matched["rest"]) & set("[(;@"):  # the usual line; the full parser takes 40 ms to import
        try:
            return SpecifierSet(matched["rest"])
        except InvalidSpecifier:  # pip reports it
            return None
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = Requirement(requirement)
    except InvalidRequirement:
        return None
    return wanted.specifier if wanted.marker is None or wanted.marker.evaluate() else None


def discover() -> Catalogue:
    """Return the catalogue of plugins installed in this environment. Reads metadata and imports nothing."""
    return Catalogue(entry_points(group=GROUP))


def is_file(wanted: str) -> bool:
    """Whether an item of ``--plugins`` is the path of a single-file plugin: it ends in ``.py`` or holds a path separator."""
    return wanted.endswith(".py") or "/" in wanted or "\\" in wanted


def _source(point: EntryPoint) -> str:
    return _metadata(point.dist)[0] if point.dist is not None else point.value


@lru_cache(maxsize=256)
def _metadata(distribution: Distribution) -> tuple[str, tuple[str, ...]]:
    """Return ``miles-plugin-mine 0.1.0`` and the lines of ``Requires-Dist``, from one parse of a distribution's metadata."""
    parsed = distribution.metadata
    return "{Name} {Version}".format_map(parsed), tuple(parsed.get_all("Requires-Dist") or distribution.requires or ())


def _import_file(path: Path, name: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"--plugins {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with explain_import_failure(f"--plugins {path}", "the file"):
            spec.loader.exec_module(module)
    except PluginError:
        del sys.modules[name]
        raise
    return module


def _qualify_targets(plugin: Any, module: ModuleType, path: Path) -> Plugin:
    """Replace targets ``"Class"`` in a file's manifest by ``"module:Class"``."""
    if not isinstance(plugin, Plugin):
        raise PluginError(f"--plugins {path}: its 'plugin' is {type(plugin).__name__}, not a miles_core.plugin.Plugin")
    if wrong := list(find_mistakes(plugin)):
        raise PluginError(f"--plugins {path}: {'; '.join(wrong)}")

    def full(target: str) -> str:
        return target if ":" in target else f"{module.__name__}:{target}"

    return dataclasses.replace(
        plugin,
        hooks={c: full(t) if isinstance(t, str) else tuple(map(full, t)) for c, t in plugin.hooks.items()},
        formats={name: full(target) for name, target in plugin.formats.items()},
        provides={kind: {n: full(t) for n, t in parts.items()} for kind, parts in plugin.provides.items()},
    )


def _make_manifest(stem: str, module: ModuleType, path: Path) -> Plugin:
    """Create a manifest for a file that defines only marked functions or classes with marked methods."""
    own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}
    targets = [n for n, v in own.items() if isinstance(v, type) and any(hasattr(f, MARK) for f in vars(v).values())]
    if any(hasattr(v, MARK) for v in own.values() if not isinstance(v, type)):
        targets.append("")  # the module itself holds hooks
    if not targets:
        unmarked = ", ".join(n for n in own if n.startswith(("on_", "wrap_")))
        raise PluginError(
            f"--plugins {path}: the file has no manifest called 'plugin' and nothing marked with miles_core.plugin.hookimpl"
            f"{unmarked and f'; put @hookimpl above {unmarked}'}"
        )
    hooks = {"": tuple(f"{module.__name__}:{name}" for name in targets)}
    summary = (module.__doc__ or f"hooks of {path.name}").strip().splitlines()[0]
    return Plugin(stem, summary, "0", f"=={__version__}", hooks=hooks)
