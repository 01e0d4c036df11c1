import os
import threading

import pytest
import torch
from safetensors.torch import load_file

from miles_core.checkpoint import digest as digests
from miles_core.checkpoint import tensor_file
from miles_core.checkpoint.digest import digest_files, hash_bytes
from miles_core.checkpoint.tensor_file import Saving, record_files, write_tensors
from miles_core.errors import CheckpointError


def tensors():
    """Tensors of several types, shapes and strides."""
    torch.manual_seed(0)
    large = torch.randn(40, 30)
    return {
        "float": large,
        "transposed": large.t(),
        "bfloat16": large.bfloat16(),
        "float8": large.to(torch.float8_e4m3fn),
        "bool": large > 0,
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "byte": torch.arange(5, dtype=torch.uint8),
    }


@pytest.mark.parametrize("chunk", [64, 1000, 1 << 20])
def test_safetensors_reads_what_was_written_and_the_digest_is_that_of_the_file(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(tensor_file, "CHUNK", chunk)
    monkeypatch.setattr(digests, "CHUNK", chunk)
    written, file = tensors(), tmp_path / "some" / "model.safetensors"
    file.parent.mkdir()
    with Saving(tmp_path) as saving:
        write_tensors(written, file)
    found = load_file(file)
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].float(), tensor.float())
    assert saving.digests() == {"some/model.safetensors": digest_files({file: chunk})[file]}
    data = file.read_bytes()
    parts = [hash_bytes(data[start : start + chunk]) for start in range(0, len(data), chunk)]
    assert saving.digests()["some/model.safetensors"].blake2b == hash_bytes(*parts).hex()


def test_tensors_are_copied_and_written_later(tmp_path, monkeypatch):
    go = threading.Event()
    write = tensor_file._write
    monkeypatch.setattr(tensor_file, "_write", lambda *args: (go.wait(), write(*args))[1])
    weight, file = torch.ones(100), tmp_path / "model.safetensors"
    (tmp_path / "other.bin").write_bytes(b"other")
    with Saving(tmp_path, later=True) as saving:
        write_tensors({"weight": weight}, file)
        record_files([tmp_path / "other.bin"])
    weight.zero_()  # training continues
    assert saving.digests() is None and not file.exists()
    go.set()
    while (found := saving.digests()) is None:
        pass
    assert sorted(found) == ["model.safetensors", "other.bin"]
    assert torch.equal(load_file(file)["weight"], torch.ones(100))


def test_a_file_that_cannot_be_written_raises_its_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_tensors(tensors(), tmp_path / "model.safetensors")
    with Saving(tmp_path, later=True) as saving:
        write_tensors(tensors(), tmp_path / "later.safetensors")
    with pytest.raises(OSError, match="No space left"):
        while saving.digests() is None:
            pass


def test_a_type_that_the_format_lacks_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"'a' has the type torch\.complex128"):
        write_tensors({"a": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "model.safetensors")
