"""The options of the plugin."""

from dataclasses import dataclass

from miles_core.plugin import option


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Agents that speak the OpenAI protocol: one session per sample, in front of the run's engines."""

    agent: str | None = option(
        None,
        flag="--agent",
        help="agent to run for each sample: a command line, or MODULE:FUNCTION or FILE.py:FUNCTION",
        metavar="COMMAND",
    )
    timeout: float = option(
        1800.0,
        flag="--agent-timeout",
        help="seconds that an agent may take for a sample, without the time in which it waits for the engine; then the sample fails",
        gt=0,
    )
    max_turns: int | None = option(
        None, flag="--agent-max-turns", help="maximum answers per sample; further requests are refused", ge=1
    )
    models: tuple[str, ...] = option(
        (),
        flag="--agent-models",
        help="further model names that mean the sample's policy, such as gpt-4o; others are refused",
        metavar="NAME,...",
    )
    host: str = option("127.0.0.1", flag="--endpoint-host", help="address that the server listens on")
    port: int = option(
        0, flag="--endpoint-port", help="port that the server listens on; 0 takes a free one", ge=0, le=65535
    )
    url: str | None = option(
        None,
        flag="--endpoint-url",
        help="base URL that agents use, if it differs (a container, a tunnel)",
        metavar="URL",
    )
    max_body: int = option(
        32 * 2**20, flag="--endpoint-max-body", help="maximum bytes of a request; larger ones are refused", ge=1024
    )
