"""Settings of the embedded engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from miles_core.precision.codec import Codec
from miles_core.precision.products import Products
from miles_embedded.model.image_processor import ImageProcessor


@dataclass
class Settings:
    """Settings of the embedded engine.

    Attributes:
        seed: the run's seed.
        max_running_requests: largest number of rows in the batch.
        max_context: largest sequence length; 0 uses the model's limit.
        eos: ids that end a response.
        detokenize: token ids -> text.
        kv_cache_dtype: type to round keys and values to (``kv_dtype.KV_DTYPES``); "" keeps the model's type.
        codec: decodes weights, and rounds the inputs of layers if their format requires it.
        codec_of: precision -> codec, for ``rebuild``.
        products: how quantised layers multiply.
        processor: the model's image processor, for requests with media; None refuses them.
        cuda_graphs: on a GPU, decode by replaying CUDA graphs if the model allows it.
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
    processor: ImageProcessor | None = None
    cuda_graphs: bool = True
