"""Reading a checkpoint's files: every kind of damage is named before a weight is read."""

import json

import pytest
import torch

from miles_core.checkpoint.hf_files import CheckpointFiles, read_header, read_json
from miles_core.errors import CheckpointError


def test_tensors_are_read_whole_by_row_and_by_bytes(checkpoint, tensors):
    files = CheckpointFiles(checkpoint({"model.safetensors": tensors}))
    assert set(files.entries) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(files.read(name), tensor)
        assert torch.equal(files.read(name, 1), tensor[1])
    name = "lm_head.weight"
    assert torch.equal(files.read_bytes(name, 4, 12), tensors[name].reshape(-1).view(torch.uint8)[4:12])


def test_scalars_and_empty_tensors_are_tensors_too(checkpoint):
    files = CheckpointFiles(checkpoint({"model.safetensors": {"a": torch.tensor(3.0), "b": torch.zeros(0, 4)}}))
    assert files.read("a").item() == 3.0 and files.read("b").shape == (0, 4)


@pytest.mark.parametrize("cut", [4, 60, -1])
def test_a_truncated_file_is_named(checkpoint, tensors, cut):
    directory = checkpoint({"model.safetensors": tensors})
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model.safetensors.*truncated"):
        CheckpointFiles(directory)


def test_bytes_after_the_tensors_are_refused(checkpoint, tensors):
    path = checkpoint({"model.safetensors": tensors}) / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"appended")
    with pytest.raises(CheckpointError, match=r"model.safetensors has [\d,]+ bytes, and its tensors end after"):
        CheckpointFiles(path.parent)


def test_a_file_that_shrinks_while_it_is_read_is_named(checkpoint, tensors):
    directory = checkpoint({"model.safetensors": tensors})
    files = CheckpointFiles(directory)
    last = max(files.entries.values(), key=lambda e: e.offset)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[: last.offset])
    with pytest.raises(CheckpointError, match=f"ended inside {last.name}"):
        files.read(last.name)


def test_a_missing_file_of_the_index_is_named(checkpoint, tensors, weight):
    directory = checkpoint({"a.safetensors": tensors, "b.safetensors": {"x": weight(2)}})
    (directory / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b.safetensors is missing \(1 of the 2 weight files"):
        CheckpointFiles(directory)


def test_index_and_files_must_agree(checkpoint, tensors, weight):
    directory = checkpoint({"a.safetensors": tensors, "b.safetensors": {"x": weight(2)}})
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["y"] = "b.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lists y in b.safetensors, which does not hold it"):
        CheckpointFiles(directory)
    del index["weight_map"]["y"], index["weight_map"]["lm_head.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"holds lm_head.weight, which .* does not list"):
        CheckpointFiles(directory)
    index["weight_map"]["x"] = "../b.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"not the name of a file in that directory"):
        CheckpointFiles(directory)


def test_without_an_index_a_name_in_two_files_is_refused(checkpoint, tensors):
    directory = checkpoint({"a.safetensors": tensors, "b.safetensors": tensors})
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"is in both a.safetensors and b.safetensors"):
        CheckpointFiles(directory)


def test_a_damaged_header_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(CheckpointError, match=r"header is damaged.*a \[2\] F32 cannot be 4 bytes"):
        read_header(path)
    path.write_bytes((1 << 60).to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match=r"not a safetensors file"):
        read_header(path)


def test_what_is_no_checkpoint_is_refused(tmp_path, checkpoint, tensors):
    with pytest.raises(CheckpointError, match=r"--model-dir .*no such directory"):
        CheckpointFiles(tmp_path / "nowhere")
    directory = checkpoint({"model.safetensors": tensors})
    (directory / "model.safetensors").rename(directory / "weights.bin")
    with pytest.raises(CheckpointError, match=r"holds no \*.safetensors"):
        CheckpointFiles(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json cannot be read as JSON"):
        CheckpointFiles(directory)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"a": ([-2, -2], [0, 16])}, r"a has the shape \[-2, -2\]"),
        ({"a": ([2, 2.0], [0, 16])}, r"a has the shape \[2, 2.0\]"),
        ({"a": ([2, 2], [0, 16]), "b": ([4], [8, 24])}, "a and b share bytes"),
        ({"a": ([2, 2], [0, 16]), "b": ([4], [32, 48])}, "the bytes between a and b belong to no tensor"),
        ({"a": ([2, 2], [16, 32])}, "the bytes before a belong to no tensor"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, said, why):
    tensors = {name: {"dtype": "F32", "shape": shape, "data_offsets": span} for name, (shape, span) in said.items()}
    header = json.dumps(tensors).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(CheckpointError, match=why):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize("text", ["[]", '"a"', "[" * 100_000, "1" * 5000])
def test_json_that_is_no_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config.json (holds \w+, not an object|cannot be read as JSON)"):
        read_json(tmp_path / "config.json")
