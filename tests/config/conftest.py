"""Manifests of pretend plugins, and a loader that knows only them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from miles_core.config.load import load
from miles_core.plugin.manifest import Plugin, Rule
from miles_core.plugin.options import option
from miles_embedded import plugin as embedded


@dataclass(frozen=True)
class Replay:
    """Options of the pretend plugin replay."""

    use_replay: bool = option(False, help="replay the routing", enables=True, aliases=("--use-routing-replay",))
    buffer_size: int = option(1024, flag="--replay-buffer-size", help="records kept in memory", ge=1)
    rate: float | None = option(None, flag="--replay-rate", help="fraction that is replayed", enables=True)
    bias: float = option(0.0, flag="--replay-bias", help="bias of a replay; 0 is none", enables=True)


@dataclass(frozen=True)
class Weights:
    """Options of the pretend plugin weights."""

    threshold: float | None = option(None, flag="--weights-threshold", help="largest weight", gt=0)
    level: str = option("token", flag="--weights-level", help="what a weight belongs to", choices=("token", "sequence"))


@dataclass(frozen=True)
class Small:
    """Options of the pretend number format small."""

    recipe: str | None = option(None, flag="--small-recipe", help="kind of scaling", choices=("block",))
    group_size: int = option(128, help="values per scale")


@dataclass(frozen=True)
class Tiny:
    """Options of the pretend number format tiny."""

    recipe: str | None = option(None, flag="--small-recipe", help="kind of scaling", choices=("micro",))


@dataclass(frozen=True)
class Server:
    """Options of the pretend engine server."""

    port: int = option(0, flag="--server-port", help="port; 0 takes a free one")


def plugin(name: str, **fields: object) -> Plugin:
    return Plugin(name=name, summary=f"pretend {name}", version="1.0", core=">=0", **fields)


@pytest.fixture
def manifests() -> list[Plugin]:
    return [
        embedded,
        plugin("replay", config=Replay),
        plugin("weights", config=Weights),
        plugin("fan", requires=(Rule("plugin.weights", "it reweights"),)),
        plugin(
            "small",
            config=Small,
            formats={"small": "miles_small.format:Small"},
            aliases={"--rollout-small": {"rollout.precision": "small"}, "--train-small": {"train.precision": "small"}},
            environment={"SMALL_GROUP_SIZE": "small.group_size"},
        ),
        plugin(
            "tiny",
            config=Tiny,
            formats={"tiny": "miles_tiny.format:Tiny"},
            aliases={"--rollout-tiny": {"rollout.precision": "tiny"}},
        ),
        plugin(
            "server",
            config=Server,
            provides={"engine": {"server": "miles_server:make"}},
            passthrough={"--server-": "server"},
        ),
    ]


@pytest.fixture
def loaded(manifests):
    """load(*argv) with the pretend plugins and no environment."""

    def call(*argv: str, **environment: str):
        return load([str(word) for word in argv], manifests=manifests, environment=environment)

    return call


@pytest.fixture
def written(tmp_path):
    """written(text, name) -> path of a configuration file."""

    def write(text: str, name: str = "run.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write
