"""Options of the tools plugin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from miles_core.plugin import option


@dataclass(frozen=True, kw_only=True)
class ToolsConfig:
    """Tools that the model may call in several turns (``--generate tools``)."""

    functions: tuple[str, ...] = option(
        (),
        flag="--tools",
        help="files or modules with tools: FILE.py, FILE.py:NAME, module:NAME",
        metavar="FILE.py:NAME,...",
    )
    mcp_servers: Path | None = option(
        None, flag="--mcp-servers", help='file with {"mcpServers": {...}}', metavar="FILE"
    )
    format: str = option(
        "auto",
        flag="--tool-format",
        help="format of the model's calls; auto detects it from the chat template",
        choices=("auto", "hermes", "qwen_xml", "glm", "mistral", "deepseek", "kimi", "gpt_oss", "llama", "pythonic"),
    )
    prompt: str = option(
        "template",
        flag="--tool-prompt",
        help="who writes the schemas and results: the chat template, or this plugin as text in the system and user messages",
        choices=("template", "text"),
    )
    turns: int = option(8, flag="--tool-turns", help="answers of the model per sample", ge=1)
    calls_per_turn: int = option(8, flag="--tool-calls-per-turn", help="calls of one answer that are carried out", ge=1)
    calls_per_sample: int = option(
        32, flag="--tool-calls-per-sample", help="calls of a sample that are carried out", ge=1
    )
    seconds_per_call: float = option(
        30.0, flag="--tool-seconds-per-call", help="time limit of a call, in seconds", gt=0
    )
    seconds_per_sample: float = option(
        300.0, flag="--tool-seconds-per-sample", help="time limit of all calls of a sample, in seconds", gt=0
    )
    chars_per_call: int = option(
        8192, flag="--tool-chars-per-call", help="characters of a result that the model receives", ge=1
    )
    chars_per_sample: int = option(
        65536,
        flag="--tool-chars-per-sample",
        help="characters of all results of a sample that the model receives",
        ge=1,
    )
    workers: int = option(4, flag="--tool-workers", help="processes that call plain Python functions", ge=1)
    concurrency: int = option(
        64, flag="--tool-concurrency", help="calls of async functions, methods and MCP servers at once", ge=1
    )
