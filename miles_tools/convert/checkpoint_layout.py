"""A checkpoint without its weights: what an engine is started from that gets them from a trainer.

The same plan as a conversion's, so that the engine reads the configuration which ``miles convert`` would write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from miles_core.checkpoint.hf_files import CONFIG, CheckpointFiles
from miles_core.precision.codec import Codec
from miles_tools.convert.encode import to_format
from miles_tools.convert.json_files import other_files, plain_files, quantization_block


@dataclass(frozen=True)
class Layout:
    """What is in a checkpoint directory beside weights.

    Attributes:
        names: the tensors of the model, before a number format stores them (``Encoded.name``).
        texts: JSON files, name -> text; copies: name -> file that goes along unchanged.
        stored: the weights of the checkpoint it was made of are in this layout already.
    """

    names: frozenset[str]
    texts: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    stored: bool = False

    def write(self, directory: Path) -> None:
        """Make ``directory`` with these files; the unchanged ones are links."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, file in self.copies.items():
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            target.symlink_to(file.resolve())
        for name, text in self.texts.items():
            (directory / name).write_text(text, encoding="utf-8")


def layout(checkpoint: str | Path, codec: Codec) -> Layout:
    """The layout of a checkpoint's model in the codec's format, read from its headers.

    Args:
        checkpoint: a directory; one that is quantised already gives no names, because its tensors are another format's parts.

    Raises:
        CheckpointError: the checkpoint is damaged, or quantised and wanted in another format.
        ConfigError: a weight that the format cannot store.
    """
    files = CheckpointFiles(checkpoint, "--hf-checkpoint")
    block = quantization_block(files.directory, files.config)
    if codec.format is None:
        names = frozenset() if block else frozenset(files.entries)
        return Layout(names, plain_files(files.config), other_files(files.directory), stored=block is None)
    if block is not None and codec.format.recognises(block):
        same = {**other_files(files.directory), CONFIG: files.directory / CONFIG}
        return Layout(frozenset(), copies=same, stored=True)
    plan = to_format(files, codec)
    return Layout(frozenset(item.name for item in plan.items), plan.texts, plan.copies)
