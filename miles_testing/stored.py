"""Convert checkpoints to the messages of a weight sync."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from miles_core.data.weight_unit import Encoded
from miles_workers.transport.bucket import Bucket, room_of, round_to_blocks


def stored_units(checkpoint: Path) -> list[Encoded]:
    """Return a checkpoint's tensors as plain units."""
    from safetensors.torch import load_file

    tensors = load_file(checkpoint / "model.safetensors")
    return [Encoded(name, {name: tensor}) for name, tensor in tensors.items()]


def buckets(checkpoint: Path, file: Path | None = None) -> list[dict[str, Any]]:
    """Return a checkpoint as two messages of the transport ``buckets``, with the data in the messages or in files."""
    units, messages = stored_units(checkpoint), []
    for number, part in enumerate((units[::2], units[1::2])):
        bucket = Bucket(torch.zeros(round_to_blocks(sum(map(room_of, part))), dtype=torch.uint8))
        assert all(map(bucket.add, part))
        data, memory = bucket.filled.numpy().tobytes(), {}
        if file is None:
            memory = {"kind": "data", "data": data}
        else:
            path = file.with_suffix(f".{number}")
            path.write_bytes(data)
            memory = {"kind": "file", "key": str(path), "path": str(path)}
        messages.append({**bucket.header(), "memory": memory, "number": number, "sender": [0, 1]})
    return messages
