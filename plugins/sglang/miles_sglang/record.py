"""A record of routed experts on its way from SGLang's scheduler to its detokenizer process."""

from __future__ import annotations


class Record:
    """The bytes of a record, with the methods of a tensor that the detokenizer calls before it encodes them as text.

    At the end of a rollout, hundreds of records are pickled and unpickled one process after the other. This takes several times as long
    for tensors as for bytes. The detokenizer process loads no plugin, so it receives objects that it can handle.
    """

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[type[Record], tuple[bytes]]:
        return Record, (self.data,)

    def numpy(self) -> Record:
        """Return this object."""
        return self

    def tobytes(self) -> bytes:
        """Return the bytes."""
        return self.data
