"""Resolves names of the Hugging Face hub: models as ``ORG/NAME``, files of data sets as ``hf://datasets/ORG/NAME/FILE``.

Files are downloaded once to the hub's cache on this machine. With ``HF_HUB_OFFLINE=1``, or without a network, only cached files can
be used.
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
    """Return whether ``name`` is a name of the hub: it has the form ``ORG/NAME`` and is not an existing path."""
    return _MODEL.fullmatch(name) is not None and not Path(name).exists() and not Path(name).parent.exists()


def model(name: str, flag: str, weights: bool = True) -> Path:
    """Download a model of the hub unless it is cached; return its local directory.

    Args:
        name: ``ORG/NAME``.
        flag: the option with the name, for messages.
        weights: include the safetensors weights; without them, the directory holds the files that a plan needs.

    Raises:
        CheckpointError: the hub has no such model, or the hub cannot be reached and the model is not in the cache.
    """
    from huggingface_hub import snapshot_download

    left_out = [p for p in _WEIGHTS if not (weights and p == "*.safetensors")]
    with _translate_errors(f"{flag} {name}", CheckpointError):
        return Path(snapshot_download(name, ignore_patterns=left_out))


def file(address: str) -> Path:
    """Download the file ``hf://datasets/ORG/NAME[@REVISION]/FILE`` unless it is cached; return its local path.

    Raises:
        DataError: the address does not have this form, the hub has no such file, or the hub cannot be reached.
    """
    found = FILE.fullmatch(address)
    if found is None:
        raise DataError(f"{address}: write hf://datasets/ORG/NAME/FILE, a file of a data set on the Hugging Face hub")
    from huggingface_hub import hf_hub_download

    with _translate_errors(address, DataError):
        return Path(
            hf_hub_download(found["repository"], found["file"], repo_type="dataset", revision=found["revision"])
        )


@contextmanager
def _translate_errors(what: str, kind: type[MilesError]) -> Iterator[None]:
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
