"""Temporarily free the device memory of tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Released:
    """Device memory of tensors that is freed and allocated again.

    The storages are resized to zero and back, so parameters, views and other references remain valid objects. While the memory is
    released, no tensor on it may be read or written. A storage that cannot be resized (a memory-mapped file) keeps its memory.

    Args:
        keep: save the contents in host memory, which is kept for the next release; otherwise the contents are lost.
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []
        self._aside: dict[int, Tensor] = {}

    def __bool__(self) -> bool:
        """Whether any memory is currently released."""
        return bool(self._sizes)

    @torch.no_grad()
    def release(self, tensors: Iterable[Tensor]) -> None:
        """Free the memory of ``tensors``, including memory that they share with other tensors."""
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
            torch.cuda.empty_cache()  # make the memory available to other processes

    @torch.no_grad()
    def restore(self) -> None:
        """Allocate the memory again, and restore the contents if they were kept."""
        for storage, size in self._sizes:
            storage.resize_(size)
            if self.keep:
                _bytes(storage).copy_(self._aside[storage._cdata], non_blocking=True)
        self._sizes = []
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
