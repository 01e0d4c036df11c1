"""Names of the Hugging Face hub where a path could stand: models as ``ORG/NAME``, files of data sets as ``hf://datasets/ORG/NAME/FILE``.

What is named is downloaded into the hub's cache on this machine, once, and used from there. With ``HF_HUB_OFFLINE=1``, or without a
network, only what is in the cache can be used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from miles_core.errors import CheckpointError, DataError, MilesError

FILE = re.compile(r"hf://datasets/(?P<repository>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?/(?P<file>.+)")
_MODEL = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.onnx_data", "*.ckpt")


def is_model(name: str) -> bool:
    """Whether this is a name of the hub, and no path: nothing is there, and it is two words with a slash between them."""
    return _MODEL.fullmatch(name) is not None and not Path(name).exists() and not Path(name).parent.exists()


def model(name: str, flag: str, weights: bool = True) -> Path:
    """The directory of a model of the hub on this machine.

    Args:
        name: ``ORG/NAME``.
        flag: what named it, for messages.
        weights: also its safetensors weights; without them it says what a plan asks for.

    Raises:
        CheckpointError: the hub has no such model, or cannot be reached and the model is not in the cache.
    """
    from huggingface_hub import snapshot_download

    left_out = [p for p in _WEIGHTS if not (weights and p == "*.safetensors")]
    with _told(f"{flag} {name}", CheckpointError):
        return Path(snapshot_download(name, ignore_patterns=left_out))


def file(address: str) -> Path:
    """The file on this machine that ``hf://datasets/ORG/NAME[@REVISION]/FILE`` names.

    Raises:
        DataError: it is not an address of that form, the hub does not have it, or it cannot be reached.
    """
    found = FILE.fullmatch(address)
    if found is None:
        raise DataError(f"{address}: write hf://datasets/ORG/NAME/FILE, a file of a data set on the Hugging Face hub")
    from huggingface_hub import hf_hub_download

    with _told(address, DataError):
        return Path(
            hf_hub_download(found["repository"], found["file"], repo_type="dataset", revision=found["revision"])
        )


@contextmanager
def _told(what: str, kind: type[MilesError]) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        yield
    except LocalEntryNotFoundError as error:
        raise kind(
            f"{what}: it is not in the hub's cache on this machine, and the hub cannot be reached (or HF_HUB_OFFLINE is set); "
            "download it where there is a network (hf download), or give a path"
        ) from error
    except HfHubHTTPError as error:
        first = str(error).strip().splitlines()[0]
        raise kind(
            f"{what}: the hub refuses it ({first}); check the name, or log in (hf auth login) where it is not public"
        ) from error
    except (OSError, ValueError) as error:
        raise kind(f"{what}: it cannot be downloaded ({str(error).strip().splitlines()[0]})") from error
