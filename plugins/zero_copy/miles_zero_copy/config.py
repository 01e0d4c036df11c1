"""The options of the plugin."""

from dataclasses import dataclass

from miles_core.plugin import option


@dataclass(frozen=True, kw_only=True)
class ZeroCopyConfig:
    """Transport of weights from the trainer to the engine."""

    use: bool = option(False, flag="--use-zero-copy-sync", help="enable the plugin", enables=True)
    async_sync: bool = option(
        False,
        flag="--async-weight-sync",
        help="enable the plugin; send each new version to the engine during generation, next to the current one, and switch to it at a "
        "token boundary",
        enables=True,
    )
