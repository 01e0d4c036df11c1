"""Agents that use the OpenAI API as rollout functions for miles-core: an endpoint with exact tokens and one session per sample."""

from miles_core.plugin import Hint, Panel, Plugin, Rule, above
from miles_endpoint.config import EndpointConfig

__version__ = "0.1.0"

plugin = Plugin(
    name="endpoint",
    summary="an OpenAI-compatible endpoint in front of the engine: trains agents in any language with exact tokens",
    version=__version__,
    core="~=0.1",
    config=EndpointConfig,
    provides={
        "generate": {"endpoint": "miles_endpoint.rollout:make_generate"},
        "reward": {"agent": "miles_endpoint.rollout:make_reward"},
    },
    requires=(
        Rule(
            needs="endpoint.agent",
            because="there is no agent to run: give --agent 'COMMAND', MODULE:FUNCTION or FILE.py:FUNCTION",
        ),
        Rule(
            needs="rollout.generate == endpoint",
            when="not rollout.generate_key and not rollout.custom_generate_function_path",
            because="agents are run by this rollout function only",
        ),
        Rule(
            needs="endpoint.port == 0",
            when="rollout.workers",
            because="every rollout worker has a server of its own, and several can share a machine",
        ),
    ),
    hints=(
        Hint(
            "agents-fail",
            "rollout/failed",
            above(0.1),
            "{metric}: {percent} of the rollouts failed",
            "see run.log for the agents' errors; give slow agents more time (--agent-timeout), or run fewer at once "
            "(--max-concurrent-samples)",
        ),
        Hint(
            "edited-histories",
            "endpoint/branch_edited",
            above(1.0),
            "{metric}: {value} requests per rollout show answers that were changed, and begin a new branch",
            "let the agent send earlier messages back as it received them; each branch is rendered and computed again",
        ),
        Hint(
            "rewriting-template",
            "endpoint/branch_reasoning",
            above(1.0),
            "{metric}: {value} requests per rollout begin a new branch because the chat template removes earlier reasoning",
            "switch that off if the template can (--chat-template-kwargs clear_thinking=false, truncate_history_thinking=false or "
            "preserve_thinking=true), or use an instruct model",
        ),
    ),
    panels=(
        Panel(
            "agent_time",
            "Time of an agent",
            {"endpoint/engine_seconds": "waits for the engine", "endpoint/agent_seconds": "works"},
            "seconds per rollout",
            kind="stack",
        ),
        Panel(
            "agent_calls",
            "Tool calls of agents",
            {"endpoint/tool_calls": "calls", "endpoint/tool_errors": "errors"},
            "per rollout",
        ),
        Panel(
            "agent_requests",
            "Requests that do not start a new turn",
            {f"endpoint/{name}": name for name in ("refused", "replayed", "cancelled", "undelivered")},
            "per rollout",
        ),
        Panel("agent_branches", "New branches by reason", {"endpoint/branch_*": "*"}, "per rollout"),
        Panel(
            "agent_failures",
            "Failed agents",
            {f"endpoint/{name}": name for name in ("crashed", "timed_out", "silent", "no_reward")},
            percent=True,
        ),
    ),
    toy={"generate": "endpoint", "agent": "miles_endpoint.toy:agent"},
)
