"""What of a GPU's memory is lent, as far as that shows without one."""

from __future__ import annotations

import torch

from miles_workers.transport import device_memory as module
from miles_workers.transport.checksum import BLOCK, Sum, checksum


class OnAGpu(torch.Tensor):
    """Says that it lies there."""

    is_cuda = True
    device = torch.device("cuda", 0)


class OnAnother(OnAGpu):
    device = torch.device("cuda", 1)


class PlainSum(Sum):
    def read(self, tensor):
        super().read(tensor.as_subclass(torch.Tensor))


def test_only_what_lies_on_one_gpu_is_lent(monkeypatch):
    asked, first = [], {"key": "k", "base": 0, "nbytes": 1 << 62}
    monkeypatch.setattr(module, "_region", lambda tensor: asked.append(tensor) or first)
    monkeypatch.setattr(module, "make_read_sum", lambda first: PlainSum())
    memory = torch.randint(0, 256, (4, BLOCK), dtype=torch.uint8)
    loan = module.Loan()
    kinds = [OnAGpu, OnAnother, OnAGpu]
    lent = [loan.add(f"w{i}", memory[i].as_subclass(kind)) for i, kind in enumerate(kinds)]
    assert len(asked) == 1  # the rest lies in the same allocation
    message = loan.message()
    assert lent == [True, False, True] and [unit[0] for unit in message["units"]] == ["w0", "w2"]
    assert message["checksum"] == checksum(memory[0], memory[2])
