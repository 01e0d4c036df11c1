"""Plan checks of the option with the addresses of servers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from miles_core.errors import ConfigError
from miles_core.plugin.facts import Facts
from miles_core.plugin.problem import Problem, describe_fact
from miles_workers.servers.server_list import ServerList


def find_url_problems(facts: Facts, engine: str) -> Iterator[Problem]:
    """Report addresses that cannot be used, and several processes of the run that would use the same servers.

    Args:
        facts: the facts of the run.
        engine: name of the engine, and prefix of its options.
    """
    if not (listed := facts.value(f"{engine}.url")):
        return
    flag = f"--{engine}-url"
    try:
        ServerList(flag, str(listed).split(",")).read()
    except ConfigError as error:
        needs = "addresses like http://host:30000, or a file of them"
        yield Problem(engine, needs, str(error), (describe_fact(facts.lookup(f"{engine}.url")),))
    if not facts.value("plugin.ray") or facts.value("transport") == "adapter":
        return
    names = ("ray.rollout_num_gpus", "ray.rollout_num_gpus_per_engine")
    gpus, per_engine = (facts.value(name) for name in names)
    if (
        gpus and per_engine and gpus > per_engine
    ):  # each engine would send all weights to the same servers, and pause all of them
        why = f"one process of the run distributes requests and weights over all servers of {flag}"
        values = tuple(describe_fact(facts.lookup(name)) for name in (*names, f"{engine}.url"))
        yield Problem(engine, "one engine", why, values, choices=names[:1], tries=lambda: [{names[0]: per_engine}])
