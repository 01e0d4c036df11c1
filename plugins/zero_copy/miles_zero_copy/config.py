"""The options of zero_copy."""

from dataclasses import dataclass

from miles_core import option


@dataclass(frozen=True, kw_only=True)
class ZeroCopyConfig:
    """How weights get from the trainer to the engine."""

    use: bool = option(False, flag="--use-zero-copy-sync", help="enable the plugin", enables=True)
    bucket_size: int = option(
        64 << 20,
        flag="--sync-bucket-size",
        help="bytes of a bucket of weights between two processes; there are two of them",
        metavar="BYTES",
        ge=1 << 16,
    )
