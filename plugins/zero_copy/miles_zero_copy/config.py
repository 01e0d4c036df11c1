"""The options of zero_copy."""

from dataclasses import dataclass

from miles_core import option


@dataclass(frozen=True, kw_only=True)
class ZeroCopyConfig:
    """How weights get from the trainer to the engine."""

    use: bool = option(False, flag="--use-zero-copy-sync", help="enable the plugin", enables=True)
