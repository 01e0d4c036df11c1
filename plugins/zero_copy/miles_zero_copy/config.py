"""The options of zero_copy."""

from dataclasses import dataclass

from miles_core.plugin import option


@dataclass(frozen=True, kw_only=True)
class ZeroCopyConfig:
    """How weights get from the trainer to the engine."""

    use: bool = option(False, flag="--use-zero-copy-sync", help="enable the plugin", enables=True)
    async_sync: bool = option(
        False,
        flag="--async-weight-sync",
        help="enable the plugin; a new version goes to the engine while it generates, beside the old one, and takes its place at a "
        "token boundary",
        enables=True,
    )
