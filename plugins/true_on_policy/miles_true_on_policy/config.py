"""The options of the plugin."""

from dataclasses import dataclass

from miles_core.plugin import option


@dataclass(frozen=True, kw_only=True)
class TrueOnPolicyConfig:
    """Exactly equal log-probabilities in engine and trainer."""

    use: bool = option(False, flag="--true-on-policy-mode", help="enable the plugin", enables=True)
