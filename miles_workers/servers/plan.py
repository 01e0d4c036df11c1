"""Checks of the option with the addresses of servers, of a plan and of a run. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from miles_core.errors import ConfigError
from miles_core.plugin.facts import Facts
from miles_core.plugin.problem import Problem, describe_fact
from miles_core.redact import redact
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


def find_shared_servers(facts: Facts, engine: str) -> Iterator[Problem]:
    """Report policies whose whole weights would replace each other on the same servers. Arguments as for ``find_url_problems``."""
    option = f"{engine}.url"
    urls: dict[str, str] = {}
    for name in (each for each in facts.policies if facts.value(f"policies.{each}.generates", True)):
        own = facts.scope(name)
        if own.value("engine") != engine or not (listed := own.value(option)):
            continue
        for url in str(listed).split(","):
            other = urls.setdefault(url.strip(" /"), name)
            if other == name or (own.value("transport"), facts.scope(other).value("transport")) == ("adapter",) * 2:
                continue
            values = tuple(describe_fact(facts.scope(each).lookup(option)) for each in (other, name))
            choices = (option, "lora.sync") if facts.value("plugin.lora") else (option,)
            tries = partial(list[dict[str, Any]], [{"lora.sync": "adapter"}] if len(choices) > 1 else [])
            why = _describe_shared_server(other, name, engine)
            yield Problem(engine, "one policy per server", why, values, choices=choices, tries=tries)
            return


def check_servers(run: Any, policy: Any, engine: str) -> None:
    """Raise ConfigError if another policy, also one that a plugin added after the plan, sends whole weights to the policy's servers.

    Args:
        run, policy: of the engine that is made.
        engine: as for ``find_url_problems``.
    """

    def addresses(each: Any) -> set[str]:
        config = run.config_of(each)
        return {url.strip(" /") for url in config.plugin(engine).url or ()} if config.run.engine == engine else set()

    own = addresses(policy)
    for other in run.policies if own and run.config_of(policy).run.transport != "adapter" else ():
        if other is not policy and other.generates and own & addresses(other):
            why = _describe_shared_server(other.name, policy.name, engine)
            raise ConfigError(f"--{engine}-url {','.join(map(redact, sorted(own)))}: {why}")


def _describe_shared_server(one: str, other: str, engine: str) -> str:
    """Explain why two policies that are sent whole cannot be on the same servers, and what to do."""
    return (
        f"the policies {one} and {other} would each send all of their weights to the same servers and replace the other's: train adapters "
        "(--plugins lora --lora-sync adapter), or give each policy servers of its own in the configuration file, "
        f"policies: {{{other}: {{{engine}: {{url: ADDRESS}}}}}}"
    )
