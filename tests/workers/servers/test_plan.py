"""Policies whose whole weights would replace each other on the same servers."""

from types import SimpleNamespace

import pytest

from miles_core.plugin import ConfigError
from miles_workers.servers import check_servers


def run_of(**policies):
    """A run with policies: name -> addresses, or (engine, transport, generates, addresses)."""
    given = {n: v if isinstance(v, tuple) else ("vllm", "buckets", True, v) for n, v in policies.items()}
    made = [SimpleNamespace(name=name, generates=generates) for name, (_, _, generates, _) in given.items()]

    def config_of(policy):
        engine, transport, _, urls = given[policy.name]
        options = SimpleNamespace(url=urls and tuple(urls.split(",")))
        run = SimpleNamespace(engine=engine, transport=transport)
        return SimpleNamespace(run=run, plugin=lambda name: options)

    return SimpleNamespace(policies=made, config_of=config_of)


SAME = "http://b:1/,http://c:1"


@pytest.mark.parametrize("other", [SAME, ("vllm", "adapter", True, SAME)])
def test_another_policy_on_one_of_the_servers_is_refused(other):
    run = run_of(policy="http://a:1,http://b:1", past=other)
    with pytest.raises(
        ConfigError, match=r"^--vllm-url http://a:1,http://b:1: the policies past and policy would each"
    ):
        check_servers(run, run.policies[0], "vllm")


@pytest.mark.parametrize(
    "other", [None, "http://c:1", ("sglang", "buckets", True, SAME), ("vllm", "buckets", False, SAME)]
)
def test_policies_with_servers_of_their_own_are_accepted(other):
    run = run_of(policy="http://a:1,http://b:1", past=other)
    check_servers(run, run.policies[0], "vllm")


def test_adapters_share_servers():
    run = run_of(policy=("vllm", "adapter", True, SAME), other=("vllm", "adapter", True, SAME))
    check_servers(run, run.policies[0], "vllm")
