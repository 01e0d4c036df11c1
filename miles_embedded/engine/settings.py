"""What the engine is told when it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from miles_core.precision.codec import Codec
from miles_core.precision.product import Products
from miles_embedded.engine.decoder import Decoder, PlainDecoder


@dataclass
class Settings:
    """Limits of the engine.

    Attributes:
        seed: the run's seed.
        max_running_requests: rows in the batch at most.
        max_context: longest sequence; 0 takes the model's own limit.
        eos: ids that end a response.
        detokenize: token ids to text.
        kv_cache_dtype: keys and values hold what this type can (``kv_dtype.KV_DTYPES``); "" is the model's own.
        codec: reads encoded weights, and rounds the inputs of layers where their format says so.
        codec_of: precision -> codec, for ``rebuild``.
        products: how quantised layers multiply.
        decoder: one scheduler step; core's emits one token a row.
        cuda_graphs: on a GPU, decode by replaying CUDA graphs where the model allows it.
    """

    detokenize: Callable[[list[int]], str]
    eos: Sequence[int] = ()
    seed: int = 0
    max_running_requests: int = 512
    max_context: int = 0
    kv_cache_dtype: str = ""
    codec: Codec = field(default_factory=Codec)
    codec_of: Callable[[str], Codec] | None = None
    products: Products = field(default_factory=Products)
    decoder: Decoder = field(default_factory=PlainDecoder)
    cuda_graphs: bool = True
