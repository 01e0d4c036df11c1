"""A checkpoint without its weights, for starting an engine that receives the weights from a trainer.

It uses the plan of a conversion, so the engine reads the same configuration as ``miles convert`` would write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from miles_core.checkpoint.hf_files import CONFIG, CheckpointFiles
from miles_core.precision.codec import Codec
from miles_formats.codec import FormatCodec
from miles_formats.convert.encode import to_format
from miles_formats.convert.json_files import other_files, plain_files, quantization_block


@dataclass(frozen=True)
class Layout:
    """The contents of a checkpoint directory without its weights.

    Attributes:
        names: tensor names before quantisation (``Encoded.name``).
        texts: JSON files, name -> text.
        copies: unchanged files, name -> source path.
        stored: the source checkpoint already has this layout.
    """

    names: frozenset[str]
    texts: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    stored: bool = False

    def write(self, directory: Path) -> None:
        """Create ``directory`` with these files; unchanged files are links."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, file in self.copies.items():
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            target.symlink_to(file.resolve())
        for name, text in self.texts.items():
            (directory / name).write_text(text, encoding="utf-8")


def layout(checkpoint: str | Path, codec: Codec) -> Layout:
    """Return the layout of a checkpoint in the codec's format, from its headers.

    Args:
        checkpoint: a directory; for a quantised checkpoint ``names`` is empty, because its tensors are parts of encoded weights.
        codec: codec of the target format.

    Raises:
        CheckpointError: the checkpoint is damaged, or quantised in another format.
        ConfigError: the format cannot store a weight.
    """
    files = CheckpointFiles(checkpoint, "--hf-checkpoint")
    block = quantization_block(files.directory, files.config)
    if not isinstance(codec, FormatCodec):
        names = frozenset() if block else frozenset(files.entries)
        return Layout(names, plain_files(files.config), other_files(files.directory), stored=block is None)
    if block is not None and codec.format.recognises(block):
        same = {**other_files(files.directory), CONFIG: files.directory / CONFIG}
        return Layout(frozenset(), copies=same, stored=True)
    plan = to_format(files, codec)
    return Layout(frozenset(item.name for item in plan.items), plan.texts, plan.copies)
