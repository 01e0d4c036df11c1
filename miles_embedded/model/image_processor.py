"""The model's own image processor: decodes images, expands their placeholders in a prompt, and makes the inputs of the tower.

Driver, engine and trainer call the same processor with the same bytes. Each computes pixel values when it needs them, so samples do
not contain them; an image in a file is represented by its path and a digest. Images are processed one at a time, so that the result
does not depend on other images. The processor's Pillow backend is always used, because its results do not depend on installed packages.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from functools import lru_cache
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoImageProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from miles_core.data.media import Media
from miles_core.errors import CheckpointError, ConfigError, DataError, MilesError, first_line
from miles_embedded.model.load import FLAG, checkpoint_config

#: Largest image, in pixels; a compressed file of a few kilobytes can hold any number of equal ones.
MOST_PIXELS = 64_000_000
#: Formats that are decoded. Others run programs, or read more than one file.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
#: Images whose tower inputs are kept; a prompt is computed by the engine and soon after by the trainer.
_KEPT = 16
#: Images whose expansions are kept.
_SPANS = 4096
#: What a processor returns for the text.
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
#: Arguments for the text: report its expansion, and add nothing at its ends.
_OFFSETS = {"return_text_replacement_offsets": True, "add_special_tokens": False}


class ImageProcessor:
    """Calls a Transformers processor.

    Attributes:
        processor: the processor, without video.
        token: the text that marks the place of an image.
    """

    def __init__(self, processor: Any) -> None:
        self.processor, self.token = processor, str(processor.image_token)
        self._process = lru_cache(maxsize=_KEPT)(self._process_image)
        self._spans: dict[Media, np.ndarray] = {}

    def expand(self, text: str, media: Sequence[Media] = ()) -> str:
        """Return the text with every placeholder replaced by the tokens that the model reads in its place.

        Raises:
            DataError: an image cannot be decoded, or the numbers of placeholders and images differ.
        """
        parts = text.split(self.token)
        if len(parts) - 1 != len(media):
            raise DataError(
                f"the rendered prompt has {len(parts) - 1} placeholders ({self.token}) for {len(media)} images; mark the place of every image "
                'with a part {"type": "image"}'
            )
        replaced = (self._process(item)[0] for item in media)
        return "".join(piece for pair in zip_longest(parts, replaced, fillvalue="") for piece in pair)

    def span(self, media: Media, placeholder: int) -> np.ndarray:
        """Return the token ids of an image's expansion from the first ``placeholder`` to the last."""
        if media not in self._spans:
            if len(self._spans) >= _SPANS:
                self._spans.clear()
            text = self.expand(self.token, (media,))
            tokens = np.asarray(self.processor.tokenizer.encode(text, add_special_tokens=False), np.int64)
            filled = np.flatnonzero(tokens == placeholder)
            self._spans[media] = tokens[filled[0] : filled[-1] + 1] if len(filled) else tokens[:0]
        return self._spans[media]

    def find_places(self, tokens: np.ndarray, placeholder: int, media: Sequence[Media]) -> list[np.ndarray]:
        """Return the indices in ``tokens`` of the placeholders for the features of each of ``media``, whose expansions follow each other.

        Raises:
            MilesError: an expansion is missing.
        """
        filled, at, found = np.flatnonzero(tokens == placeholder), 0, []
        for item in media:
            span = self.span(item, placeholder)
            starts = filled[at:]
            match = next((i for i, s in enumerate(starts) if np.array_equal(tokens[s : s + len(span)], span)), None)
            if match is None:
                needed = sum(int((self.span(m, placeholder) == placeholder).sum()) for m in media)
                raise MilesError(
                    f"a sequence has {len(filled)} placeholder tokens ({placeholder}) for {len(media)} images, which need {needed} in the order "
                    "of their expansions; a rollout function must continue the tokens of the prompt, and pass the media of what it adds"
                )
            own = np.flatnonzero(span == placeholder)
            found.append(starts[match] + own)
            at += match + len(own)
        return found

    def inputs(self, media: Media) -> dict[str, Tensor]:
        """Return the inputs of the tower for one image, name -> [...], such as ``pixel_values`` and ``image_grid_thw``."""
        return self._process(media)[1]

    def _process_image(self, media: Media) -> tuple[str, dict[str, Tensor]]:
        image = decode_image(media)
        try:
            found = self.processor(text=[self.token], images=[image], text_kwargs=_OFFSETS)
        except ValueError as error:  # such as sides of very different lengths
            raise DataError(f"the processor of this model refuses {_name(media)} ({first_line(error)})") from error
        offsets = found.get("text_replacement_offsets")
        if offsets is None:  # before Transformers 5.24; the placeholder is a special token, so this is its expansion
            text = self.processor.tokenizer.decode(_to_tensor(found["input_ids"])[0].tolist())
        else:
            text = offsets[0][0]["replacement"]
        return text, {name: _to_tensor(value) for name, value in found.items() if name not in _OF_TEXT}


def _to_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))


def _name(media: Media) -> str:
    return f"the image {media.source}" if isinstance(media.source, str) else f"an image of {len(media.source):,} bytes"


def decode_image(media: Media) -> Any:
    """Decode an image to RGB, upright as its EXIF data says.

    Raises:
        ConfigError: Pillow is not installed.
        DataError: the content is not an image of one of ``FORMATS``, is damaged or animated, or has more than ``MOST_PIXELS``.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ConfigError(
            "--media: images are decoded with Pillow; install it (pip install 'miles-core[media]')"
        ) from error
    where = _name(media)
    if media.kind != "image":
        raise DataError(f"{where} is of kind {media.kind!r}; only images are passed to a model")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # checked below
            image: Any = Image.open(BytesIO(media.read()), formats=FORMATS)
        if image.width * image.height > MOST_PIXELS:
            raise DataError(
                f"{where} has {image.width} x {image.height} pixels, more than {MOST_PIXELS:,}; make it smaller"
            )
        if getattr(image, "is_animated", False):
            raise DataError(f"{where} is animated ({image.n_frames} frames); save one frame")
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{where} has more pixels than the {MOST_PIXELS:,} that are decoded; make it smaller"
        ) from error
    except (DataError, MemoryError):
        raise
    except Exception as error:  # decoders raise exceptions of many types for damaged files
        formats = ", ".join(FORMATS)
        raise DataError(
            f"{where} cannot be decoded ({first_line(error)}); it must be a complete file in one of: {formats}"
        ) from error


def make_expand(run: Any) -> Any:
    """Return ``expand`` for the prompts of a run (kind ``media``)."""
    options = run.config.model
    return make_processor(options.hf_checkpoint, run.tokenizer, options.trust_remote_code).expand


def find_processor(run: Any, policy: Any) -> ImageProcessor | None:
    """Return the processor of a policy's model; None without ``--media``."""
    options = run.config_of(policy).model
    if not run.config.data.media:
        return None
    return make_processor(policy.hf_checkpoint or options.hf_checkpoint, run.tokenizer, options.trust_remote_code)


_made: dict[str, ImageProcessor] = {}


def make_processor(
    path: str | Path, tokenizer: Any, trust_remote_code: bool = False, flag: str = FLAG
) -> ImageProcessor:
    """Make the processor of a checkpoint, once in this process.

    Raises:
        CheckpointError: the model reads no images, or files are missing.
        ConfigError: a package that the processor requires is not installed.
    """
    key = str(Path(path).resolve())
    if key not in _made:
        config = checkpoint_config(path, trust_remote_code, flag)
        kind = _processor_class(Path(path), config)
        try:
            if kind is None or "image_processor" not in kind.get_attributes():
                raise CheckpointError(f"{flag} {path}: --media: a model of type {config.model_type} reads no images")
            values, _ = kind.get_processor_dict(path)
            images = AutoImageProcessor.from_pretrained(path, backend="pil")
        except CheckpointError:
            raise
        except ImportError as error:
            raise ConfigError(f"{flag} {path}: --media: {' '.join(str(error).split())}") from error
        except Exception as error:
            raise CheckpointError(
                f"{flag} {path}: --media: its image processor cannot be loaded ({first_line(error)}); copy preprocessor_config.json and "
                "processor_config.json there"
            ) from error
        parts = {"image_processor": images, "tokenizer": tokenizer}
        made = _without_video(kind).from_args_and_dict([parts.get(n) for n in kind.get_attributes()], values)
        _made[key] = ImageProcessor(made)
    return _made[key]


def _processor_class(path: Path, config: Any) -> Any:
    """Return the class that a checkpoint's files name, as for LLaVA with Pixtral's tower, else that of its model type; None if there is
    none."""
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        file = path / name
        named = json.loads(file.read_text(encoding="utf-8")).get("processor_class") if file.is_file() else None
        if named and (found := getattr(transformers, named, None)) is not None:
            return found
    return PROCESSOR_MAPPING.get(type(config), None)


def _without_video(kind: type[Any]) -> type[Any]:
    """Return a subclass whose video processor may be None: Transformers' ones require torchvision."""

    def accept(self: Any, name: str, argument: Any) -> type[Any]:
        return type(argument)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": accept})
