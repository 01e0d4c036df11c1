"""Device memory that tensors do without for a while."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Released:
    """The memory of some tensors, given back and taken again.

    Their storages shrink to nothing and grow again, so that parameters, views of them and whatever else refers to the same memory
    stay the objects they are. While it is released nobody may read or write any of them. A storage that cannot shrink (a file that
    is mapped) keeps its memory.

    Args:
        keep: put the contents aside in host memory, which is kept for the next time; otherwise they are lost.
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []
        self._aside: dict[int, Tensor] = {}

    def __bool__(self) -> bool:
        """Whether anything is released now."""
        return bool(self._sizes)

    @torch.no_grad()
    def release(self, tensors: Iterable[Tensor]) -> None:
        """Give the memory of ``tensors`` back, and all of it that they share with others."""
        storages = {s._cdata: s for t in tensors if (s := t.untyped_storage()).nbytes() and s.resizable()}
        aside, self._aside = self._aside, {}
        for key, storage in storages.items():
            self._sizes.append((storage, storage.nbytes()))
            if self.keep:
                host = aside.pop(key, None)
                if host is None or host.nbytes != storage.nbytes():
                    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
                self._aside[key] = host.copy_(_bytes(storage), non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for storage in storages.values():
            storage.resize_(0)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # other processes take what this one's allocator would keep

    @torch.no_grad()
    def restore(self) -> None:
        """Take the memory again, with its contents where they are kept."""
        for storage, size in self._sizes:
            storage.resize_(size)
            if self.keep:
                _bytes(storage).copy_(self._aside[storage._cdata], non_blocking=True)
        self._sizes = []
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
