"""Plugins change a checkpoint's weights on the way to a number format, as they change what leaves a trainer."""

import json

import pytest
import torch
from safetensors.torch import load_file

from miles_core.checkpoint.hf_files import CheckpointFiles
from miles_core.cli import main as cli
from miles_core.data.weight_unit import WeightUnit
from miles_core.errors import CheckpointError
from miles_formats.codec import FormatCodec
from miles_formats.convert import conversion, encode
from miles_testing.doubles.pair_format import PairFormat
from miles_testing.toy import toy_files
from miles_tools.commands import convert

GATE, UP, DOWN = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))


@pytest.fixture
def files(checkpoint, weight):
    """Two files; the couple of layer 0 is divided between them."""
    one = {GATE: weight(4, 8), DOWN: weight(8, 4), "draft.weight": weight(3, 4), "norm.weight": weight(1, 8)[0]}
    return CheckpointFiles(
        checkpoint({"a.safetensors": one, "b.safetensors": {UP: weight(4, 8), "old.weight": weight(2, 2)}})
    )


def shape(units):
    """Drops, renames, merges what two units hold, and keeps a unit back until a later one came."""

    def stream():
        back = None
        for unit in units():
            tensors = {
                name.replace("old", "new"): t for name, t in unit.tensors.items() if not name.startswith("draft")
            }
            if "norm.weight" in tensors:
                back = tensors.pop("norm.weight")
            if DOWN in tensors:
                tensors[DOWN] = tensors[DOWN] * 2
            if tensors:
                yield WeightUnit(tensors)
        yield WeightUnit({"norm.weight": back + 1})

    return stream


def changed(files):
    """The same by hand."""
    tensors = {name: files.read(name, None) for name in files.entries if not name.startswith("draft")}
    tensors["new.weight"] = tensors.pop("old.weight")
    tensors[DOWN] = tensors[DOWN] * 2
    tensors["norm.weight"] = tensors["norm.weight"] + 1
    return tensors


def loaded(directory):
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(("workers", "shard"), [(1, 10**9), (4, 40)])
def test_what_is_written_is_what_the_plugins_made(files, checkpoint, tmp_path, workers, shard):
    planned = encode.to_format(files, FormatCodec(PairFormat()), shape)
    conversion.run(planned, tmp_path / "shaped", workers, shard)
    by_hand = encode.to_format(
        CheckpointFiles(checkpoint({"model.safetensors": changed(files)}, "plain")), FormatCodec(PairFormat())
    )
    conversion.run(by_hand, tmp_path / "by_hand", 1)
    found, expected = loaded(tmp_path / "shaped"), loaded(tmp_path / "by_hand")
    assert found.keys() == expected.keys() and not any("draft" in name or "old" in name for name in found)
    assert all(torch.equal(found[name].view(torch.uint8), t.view(torch.uint8)) for name, t in expected.items())
    assert (len(list((tmp_path / "shaped").glob("*.safetensors"))) == 1) == (shard > 100)


def test_an_attempt_that_is_continued_reads_past_what_is_written(files, tmp_path, monkeypatch):
    made, calls = encode.to_format(files, FormatCodec(PairFormat()), shape), []
    monkeypatch.setattr(
        conversion, "_write", lambda *a, inner=conversion._write: calls.append(a) or _third(calls) or inner(*a)
    )
    with pytest.raises(KeyboardInterrupt):
        conversion.run(made, tmp_path / "out", 1, 40)
    again = encode.to_format(files, FormatCodec(PairFormat()), shape)
    monkeypatch.undo()
    outcome = conversion.run(again, tmp_path / "out", 1, 40)
    assert outcome.resumed > 0
    conversion.run(encode.to_format(files, FormatCodec(PairFormat()), shape), tmp_path / "whole", 1, 40)
    found, whole = loaded(tmp_path / "out"), loaded(tmp_path / "whole")
    assert all(torch.equal(found[n].view(torch.uint8), t.view(torch.uint8)) for n, t in whole.items())


def _third(calls):
    if len(calls) == 3:
        raise KeyboardInterrupt


def test_a_stream_that_depends_on_the_weights_is_refused(files, tmp_path):
    def moody(units):
        return lambda: (u for u in units() if u.tensors[next(iter(u.tensors))].is_meta or GATE not in u.tensors)

    planned = encode.to_format(files, FormatCodec(PairFormat()), moody)
    with pytest.raises(CheckpointError, match=f"where it yielded {GATE}, {UP} when the conversion was planned"):
        conversion.run(planned, tmp_path / "out", 1)


def test_a_couple_that_is_divided_is_refused_before_anything_is_read(files):
    def divided(units):
        return lambda: (WeightUnit({name: t}) for u in units() for name, t in u.tensors.items())

    with pytest.raises(CheckpointError, match="not in the same unit of the plugins' wrap_weights"):
        encode.to_format(files, FormatCodec(PairFormat()), divided)


def test_a_name_that_comes_twice_is_refused(files):
    with pytest.raises(CheckpointError, match=r"yields .* twice"):
        encode.to_format(files, FormatCodec(PairFormat()), lambda units: lambda: (u for _ in range(2) for u in units()))


PLUGIN = """
from miles_core.data import WeightUnit
from miles_core.plugin import hookimpl

@hookimpl
def wrap_weights(run, policy, purpose):
    assert purpose == "convert" and policy.hf_checkpoint == CHECKPOINT
    def wrap(inner):
        def weights():
            for unit in inner():
                yield WeightUnit({name: t * 2 if name.endswith("norm.weight") else t for name, t in unit.tensors.items()})
        return weights
    return wrap
"""


def test_the_command_asks_the_plugins_it_names(tmp_path, capsys):
    source = toy_files() / "model"
    (tmp_path / "twice.py").write_text(PLUGIN.replace("CHECKPOINT", repr(str(source))))
    words = ["convert", "--to", "int4", "--int4-group-size", "16", "--model-dir", str(source)]
    assert cli.main([*words, "--save-dir", str(tmp_path / "plain")]) == 0
    shaped = [*words, "--plugins", str(tmp_path / "twice.py")]
    assert cli.main([*shaped, "--dry-run", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert cli.main([*shaped, "--save-dir", str(tmp_path / "shaped")]) == 0
    assert made_with(shaped, tmp_path) != made_with(shaped, tmp_path, "* 3")
    plain, found = loaded(tmp_path / "plain"), loaded(tmp_path / "shaped")
    assert found.keys() == plain.keys() and {t["name"] for t in listed["tensors"]} >= {n for n in plain if "norm" in n}
    for name, tensor in plain.items():
        assert torch.equal(found[name], tensor * 2 if name.endswith("norm.weight") else tensor), name


def made_with(words, tmp_path, factor="* 2"):
    """What the finished files of an interrupted attempt are compared by."""
    file = tmp_path / "twice.py"
    file.write_text(file.read_text().replace("* 2", factor))
    return conversion._fingerprint(convert._plan(*convert._parser().parse_own(words[1:])), [])
