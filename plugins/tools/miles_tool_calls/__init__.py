"""Tools in several turns for miles-core: Python functions and MCP servers, in the tool-call format of the model."""

from miles_core.plugin import Hint, Package, Panel, Plugin, Rule, above
from miles_tool_calls.config import ToolsConfig

__version__ = "0.1.0"

plugin = Plugin(
    name="tools",
    summary="the model calls Python functions and MCP servers in several turns",
    version=__version__,
    core="~=0.1",
    config=ToolsConfig,
    provides={"generate": {"tools": "miles_tool_calls.rollout:make_generate"}},
    packages=(
        Package(
            "mcp",
            ">=2,<3",
            when="tools.mcp_servers != none",
            install='pip install "mcp>=2,<3", or leave --mcp-servers out',
        ),
    ),
    requires=(
        Rule(
            needs="tools.functions or tools.mcp_servers",
            because="the model has no tools to call: give --tools FILE.py or --mcp-servers FILE",
        ),
        Rule(
            needs="data.apply_chat_template",
            because="schemas, calls and results are written by the model's chat template",
        ),
        Rule(
            needs="rollout.generate == tools",
            when="not rollout.generate_key and not rollout.custom_generate_function_path",
            because="tools are offered to the model by this rollout function only",
        ),
    ),
    hints=(
        Hint(
            "malformed-calls",
            "tools/malformed",
            above(1.0),
            "{metric}: {value} calls per sample cannot be read",
            "check that --tool-format is the format of this model, show examples in the prompts, or warm up on some (--sft-data)",
        ),
        Hint(
            "failed-samples",
            "tools/failed_samples",
            above(0.1),
            "{metric}: {percent} of the samples failed because tools were unreachable",
            "see run.log for the reasons: an MCP server that ended, or a class that cannot be instantiated",
        ),
    ),
    panels=(
        Panel(
            "tool_calls",
            "Tool calls",
            {"tools/calls": "calls", "tools/errors": "errors", "tools/malformed": "cannot be read"},
            "per sample",
        ),
        Panel("tool_time", "Time waiting for tools", {"tools/seconds": "seconds"}, "seconds per sample"),
        Panel(
            "tool_limits",
            "Samples that reached a limit or failed",
            {"tools/limited": "limit", "tools/failed_samples": "failed"},
            percent=True,
        ),
    ),
    toy={"generate": "tools", "tools": "miles_tool_calls.toy:look", "tool_prompt": "text", "apply_chat_template": True},
)
