"""Whole conversions: what is written, what is resumed, and what a failure leaves behind."""

import errno
import json
import os
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from miles_core.checkpoint.hf_files import CheckpointFiles
from miles_core.data.weight_unit import WeightUnit
from miles_core.errors import CheckpointError, MilesError
from miles_formats.codec import FormatCodec
from miles_formats.convert import conversion as converting
from miles_formats.convert import decode as decoding
from miles_formats.convert import encode as encoding
from miles_formats.convert import writer
from miles_testing.doubles.pair_format import PairFormat

GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"


def encode(source, target, **options):
    return converting.run(encoding.to_format(CheckpointFiles(source), FormatCodec(PairFormat())), target, **options)


def decode(source, target, **options):
    opened = decoding.open_quantized(source)
    assert opened is not None
    return converting.run(decoding.to_bf16(opened), target, **options)


def everything(directory):
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def left_behind(parent):
    """Names in the hidden work directory."""
    return sorted(p.name for hidden in parent.glob(".*.converting") for p in hidden.iterdir())


def test_the_bytes_are_the_codecs_and_the_rest_is_copied(checkpoint, tensors, tmp_path):
    source = checkpoint({"model.safetensors": tensors})
    (source / "modeling_own.py").write_text("x = 1\n")
    (source / "inference").mkdir()
    (source / "inference" / "README.md").write_text("read me")
    (source / ".git").mkdir()
    (source / ".git" / "config").write_text("hidden")
    (source / "pytorch_model.bin").write_text("other weights")
    outcome = encode(source, tmp_path / "out")
    found = everything(tmp_path / "out")
    expected = {}
    units = [{GATE: tensors[GATE], UP: tensors[UP]}, *({n: t} for n, t in tensors.items() if n not in (GATE, UP))]
    for encoded in FormatCodec(PairFormat()).encode(map(WeightUnit, units)):
        expected |= encoded.parts
    assert set(found) == set(expected) and all(torch.equal(found[n], expected[n]) for n in expected)
    assert torch.equal(found[GATE.replace("weight", "weight_range")], found[UP.replace("weight", "weight_range")])
    names = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    others = {"config.json", "pair8.json", "tokenizer.json", "modeling_own.py", "inference/README.md"}
    assert names == {"model.safetensors", *others}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "pair8", "ignore": ["lm_head"]}
    assert config["dtype"] == "bfloat16" and config["model_type"] == "qwen3"
    assert outcome.after == sum(t.nbytes for t in found.values()) and outcome.before == sum(
        t.nbytes for t in tensors.values()
    )


def test_files_are_split_by_size_and_couples_from_two_files_come_together(checkpoint, tensors, tmp_path):
    first = {n: t for n, t in tensors.items() if n != UP}
    source = checkpoint({"a.safetensors": first, "b.safetensors": {UP: tensors[UP]}})
    outcome = encode(source, tmp_path / "out", shard_bytes=300, workers=3)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert outcome.shards == len(files) > 2 and min(files) == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            assert set(opened.keys()) == {n for n, f in index["weight_map"].items() if f == file}
    whole = checkpoint({"model.safetensors": tensors}, name="whole")
    encode(whole, tmp_path / "one")
    assert index["metadata"]["total_size"] == outcome.after
    split, single = everything(tmp_path / "out"), everything(tmp_path / "one")
    assert set(split) == set(single) and all(torch.equal(split[n], single[n]) for n in single)


@pytest.mark.usefixtures("pair8")
def test_back_to_bf16_gives_the_values_of_the_codes(checkpoint, tensors, tmp_path):
    source = checkpoint({"model.safetensors": tensors})
    encode(source, tmp_path / "out")
    decode(tmp_path / "out", tmp_path / "back", shard_bytes=400)
    found, stored, format = everything(tmp_path / "back"), everything(tmp_path / "out"), PairFormat()
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if f"{stem}.weight_codes" in stored:
            parts = {s: stored[f"{stem}.{s}"] for s in format.suffixes()}
            tensor = format.dequantize(parts).to(torch.bfloat16)
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], tensor), name
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config and not (tmp_path / "back" / "hf_quant_config.json").exists()


def test_weights_in_fp32_are_rounded_to_bf16_before_they_are_quantised(checkpoint, weight, tmp_path):
    tensors = {"a.q_proj.weight": weight(4, 8, dtype=torch.float32), "norm.weight": weight(8, dtype=torch.float32)}
    source = checkpoint({"model.safetensors": tensors})
    conversion = encoding.to_format(CheckpointFiles(source), FormatCodec(PairFormat()))
    assert "1 weights are not stored in BF16" in conversion.notes[0]
    converting.run(conversion, tmp_path / "out")
    found = everything(tmp_path / "out")
    rounded = PairFormat().quantize(tensors["a.q_proj.weight"].to(torch.bfloat16))
    assert torch.equal(found["a.q_proj.weight_codes"], rounded["weight_codes"])
    assert torch.equal(found["norm.weight"], tensors["norm.weight"])


def test_an_interrupted_conversion_continues_and_verifies_what_it_finds(checkpoint, tensors, tmp_path, monkeypatch):
    source, out = checkpoint({"model.safetensors": tensors}), tmp_path / "out"
    written, original = [], writer.Shard.put

    def put(self, descriptor, write):
        written.append(self.file)
        if len(set(written)) == 3:
            raise KeyboardInterrupt
        original(self, descriptor, write)

    monkeypatch.setattr(writer.Shard, "put", put)
    with pytest.raises(KeyboardInterrupt):
        encode(source, out, shard_bytes=200, workers=1)
    first, second, _ = dict.fromkeys(written)
    assert not out.exists() and left_behind(tmp_path) == ["conversion.json", first, second]
    hidden = next(tmp_path.glob(".*.converting"))
    damaged = bytearray((hidden / second).read_bytes())
    damaged[-1] ^= 1
    (hidden / second).write_bytes(damaged)

    written.clear()
    monkeypatch.setattr(writer.Shard, "put", lambda *a: (written.append(a[0].file), original(*a))[1])
    outcome = encode(source, out, shard_bytes=200, workers=1)
    assert first not in written and second in written  # kept as it was; written again
    assert 0 < outcome.resumed < outcome.before
    encode(source, tmp_path / "fresh", shard_bytes=200)
    for file in (tmp_path / "fresh").glob("*.safetensors"):
        assert (out / file.name).read_bytes() == file.read_bytes()
    assert not left_behind(tmp_path)


def test_an_unfinished_conversion_with_other_options_is_started_anew_and_said(checkpoint, tensors, tmp_path):
    source, out = checkpoint({"model.safetensors": tensors}), tmp_path / "out"
    hidden = tmp_path / ".out.converting"
    hidden.mkdir()
    (hidden / "conversion.json").write_text('{"fingerprint": "of another", "done": {}}')
    (hidden / "model.safetensors").write_text("old")
    outcome = encode(source, out)
    assert "starting anew" in outcome.notes[0] and len(everything(out)) > 3


def test_a_full_disk_stops_with_a_sentence_and_keeps_finished_files(checkpoint, tensors, tmp_path, monkeypatch):
    source, out, original, count = checkpoint({"model.safetensors": tensors}), tmp_path / "out", os.pwrite, []

    def pwrite(descriptor, data, offset):
        count.append(1)
        if len(count) > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(
        CheckpointError, match=r"disk of .*out is full .* 2 finished weight files are kept in .*same command"
    ):
        encode(source, out, shard_bytes=300, workers=1)
    assert not out.exists() and "config.json" not in left_behind(tmp_path)
    assert not [name for name in left_behind(tmp_path) if name.endswith(".part")]
    monkeypatch.setattr(os, "pwrite", original)
    assert encode(source, out, shard_bytes=300).resumed > 0


def test_a_disk_too_small_is_refused_before_the_first_weight(checkpoint, tensors, tmp_path, monkeypatch):
    source = checkpoint({"model.safetensors": tensors})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(CheckpointError, match=r"too small: [\d,]+ bytes are to be written and 1 are free"):
        encode(source, tmp_path / "out")
    assert not (tmp_path / "out").exists() and left_behind(tmp_path) == ["conversion.json"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"])
def test_nan_and_inf_are_named_and_nothing_is_left_that_looks_complete(checkpoint, tensors, tmp_path, value, name):
    tensors[name][1, 2] = value
    with pytest.raises(MilesError, match=rf"{name} holds .*NaN or Inf"):
        encode(checkpoint({"model.safetensors": tensors}), tmp_path / "out")
    assert not (tmp_path / "out").exists() and "config.json" not in left_behind(tmp_path)


def test_an_existing_directory_is_refused_unless_it_is_empty(checkpoint, tensors, tmp_path):
    source, out = checkpoint({"model.safetensors": tensors}), tmp_path / "out"
    out.mkdir()
    encode(source, out)
    before = everything(out)
    with pytest.raises(CheckpointError, match=r"already exists and is not empty"):
        encode(source, out)
    assert everything(out).keys() == before.keys()
    with pytest.raises(CheckpointError, match=r"already exists and is not empty"):
        encode(source, out / "config.json")


def test_a_directory_that_cannot_be_replaced_is_filled_from_within(checkpoint, tensors, tmp_path, monkeypatch):
    """A mount point: nothing can be renamed over it, and its parent is on another disk. A link to one means the same."""
    source, out, link = checkpoint({"model.safetensors": tensors}), tmp_path / "out", tmp_path / "link"
    (out / "lost+found").mkdir(parents=True)
    link.symlink_to(out)
    moved, replace = [], os.replace

    def busy(old, new):
        if os.path.realpath(new) == str(out):
            raise OSError(errno.EBUSY, "Device or resource busy")
        if len(moved) == 2:
            moved.append("interrupted")
            raise KeyboardInterrupt
        moved.append(os.path.basename(new))
        replace(old, new)

    monkeypatch.setattr(os, "replace", busy)
    with pytest.raises(KeyboardInterrupt):
        encode(source, link, shard_bytes=200)
    assert not (out / "config.json").exists()  # so no reader takes it for a checkpoint
    encode(source, link, shard_bytes=200)
    assert moved[-1] == "config.json" and link.is_symlink()
    encode(source, tmp_path / "plain", shard_bytes=200)
    assert {p.name for p in out.iterdir()} == {"lost+found", *(p.name for p in (tmp_path / "plain").iterdir())}
    with pytest.raises(CheckpointError, match=r"already exists and is not empty"):
        encode(source, link)


def test_a_rename_that_fails_keeps_the_work(checkpoint, tensors, tmp_path, monkeypatch):
    source, out = checkpoint({"model.safetensors": tensors}), tmp_path / "out"
    replace = os.replace

    def refuse(old, new):
        if os.fspath(new) == str(out):
            raise OSError(errno.EROFS, "Read-only file system")
        replace(old, new)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="out cannot be written: Read-only"):
        patch.setattr(os, "replace", refuse)
        encode(source, out, shard_bytes=200)
    again = encode(source, out, shard_bytes=200)
    assert again.resumed == again.before


def test_places_that_would_mix_or_leak_are_refused(checkpoint, tensors, tmp_path):
    source = checkpoint({"model.safetensors": tensors})
    with pytest.raises(CheckpointError, match=r"--save-dir .* lies inside of --model-dir"):
        encode(source, source / "fp8")
    (tmp_path / "private").write_text("a secret")
    (source / "notes.txt").symlink_to(tmp_path / "private")
    with pytest.raises(CheckpointError, match=r"notes.txt is a link to .*private, outside of the checkpoint"):
        encode(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    snapshot = tmp_path / "models--a--b" / "snapshots" / "main"  # a hub's cache is made of links
    shutil.copytree(source, snapshot, ignore=lambda *_: ["notes.txt"])
    (tmp_path / "models--a--b" / "blobs").mkdir()
    (tmp_path / "models--a--b" / "blobs" / "1f").write_text("read me")
    (snapshot / "README.md").symlink_to("../../blobs/1f")
    encode(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text() == "read me"


def test_two_conversions_to_one_place_exclude_each_other(checkpoint, tensors, tmp_path):
    source, out = checkpoint({"model.safetensors": tensors}), tmp_path / "out"
    with writer.WorkDirectory(out, "another"), pytest.raises(CheckpointError, match=r"another conversion"):
        encode(source, out)
    encode(source, out)


def test_memory_does_not_grow_with_the_model(checkpoint, weight, tmp_path):
    """At most ``workers`` jobs hold tensors at a time."""
    tensors = {f"layers.{i}.q_proj.weight": weight(64, 64) for i in range(12)}
    conversion = encoding.to_format(
        CheckpointFiles(checkpoint({"model.safetensors": tensors})), FormatCodec(PairFormat())
    )
    held, most = [0], []

    def counted(step):
        def run():
            held[0] += 1
            most.append(held[0])
            made = step()
            held[0] -= 1
            return made

        return run

    for job in conversion.jobs:
        job.pieces[:] = map(counted, job.pieces)
    converting.run(conversion, tmp_path / "out", workers=2)
    assert len(most) == 12 and max(most) <= 2


def test_progress_adds_up_to_the_bytes_of_the_source(checkpoint, tensors, tmp_path):
    seen = []
    outcome = encode(checkpoint({"model.safetensors": tensors}), tmp_path / "out", shard_bytes=300, advance=seen.append)
    assert sum(seen) == outcome.before == sum(t.nbytes for t in tensors.values())


def test_every_tensor_starts_at_a_multiple_of_its_element_size(checkpoint, weight, tmp_path):
    tensors = {"a.q_proj.weight": weight(3, 2), "b.mask": torch.ones(3, dtype=torch.uint8), "c.norm": weight(1)}
    encode(checkpoint({"model.safetensors": tensors}), tmp_path / "out")
    for entry in CheckpointFiles(tmp_path / "out").entries.values():
        assert entry.offset % entry.dtype.itemsize == 0, entry
    assert torch.equal(everything(tmp_path / "out")["b.mask"], tensors["b.mask"])
