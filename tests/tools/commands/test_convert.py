"""``miles convert`` from the command line: every mistake is one sentence and exit code 2."""

import errno
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_core.cli import main as cli
from miles_core.config import candidates
from miles_formats.convert import installed
from miles_testing.doubles.pair_format import PLUGIN


@pytest.fixture(autouse=True)
def pair8(monkeypatch):
    """The double is the only format that is installed."""
    monkeypatch.setattr(candidates, "discover", lambda: _Catalogue({PLUGIN.name: PLUGIN}))
    monkeypatch.setattr(installed, "discover", lambda: {PLUGIN.name: PLUGIN})


class _Catalogue(dict):
    def request(self, wanted):
        return wanted


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "bf16"
    directory.mkdir()
    generator = torch.Generator().manual_seed(0)
    names = [f"model.layers.{i}.mlp.{p}_proj.weight" for i in range(2) for p in ("gate", "up", "down")]
    tensors = {n: torch.randn(64, 64, generator=generator).to(torch.bfloat16) for n in names}
    save_file({**tensors, "lm_head.weight": tensors[names[0]] * 2}, directory / "model.safetensors")
    (directory / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2, "dtype": "bfloat16"}')
    return directory


def refused(capsys, *words):
    """The one sentence on standard error."""
    assert cli.main(["convert", *map(str, words)]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("error:") == 1 and "Traceback" not in text
    return text


def test_there_and_back(source, tmp_path, capsys):
    out, back = tmp_path / "out", tmp_path / "back"
    assert cli.main(["convert", "--to", "pair8", "--model-dir", str(source), "--save-dir", str(out)]) == 0
    text = capsys.readouterr().out
    assert "6 of 7 tensors become pair8; weights 56.0 KiB -> 32.0 KiB (1.75 to 1)" in text
    assert re.search(rf"wrote {out} \(1 weight files, [\d.]+ s, \d+ MB/s\)", text)
    assert cli.main(["convert", "--to", "bf16", "--model-dir", str(out), "--save-dir", str(back), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["directory"] == str(back) and said["bytes_after"] == 57344 and said["notes"] == []
    before, after = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    assert all((after[n].float() - t.float()).abs().max() < 0.05 for n, t in before.items())
    assert torch.equal(before["lm_head.weight"], after["lm_head.weight"])


def test_a_dry_run_reads_headers_only_and_writes_nothing(source, tmp_path, capsys):
    path = source / "model.safetensors"
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    size = path.stat().st_size
    with path.open("r+b") as file:  # the same size, but no weight in it
        file.truncate(header)
        file.truncate(size)
    assert cli.main(["convert", "--to", "pair8", "--model-dir", str(source), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"model\.layers\.\*\.mlp\.gate_proj\.weight +2 x \[64, 64\] +pair8  16\.0 KiB -> 8\.0 KiB", text)
    assert re.search(r"lm_head\.weight +1 x \[64, 64\] +kept: never quantised: lm_head", text)
    assert cli.main(["convert", "--to", "pair8", "--model-dir", str(source), "--dry-run", "--verbose"]) == 0
    assert "model.layers.1.mlp.down_proj.weight" in capsys.readouterr().out
    assert cli.main(["convert", "--to", "pair8", "--model-dir", str(source), "--dry-run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["bytes_before"] == 57344 and len(said["tensors"]) == 7
    assert said["files"]["config.json"]["quantization_config"] == {"quant_method": "pair8", "ignore": ["lm_head"]}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bf16"]


def test_layers_and_globs_are_left_alone_as_in_a_run(source, tmp_path, capsys):
    words = ["convert", "--to", "pair8", "--model-dir", str(source), "--dry-run", "--json"]
    assert cli.main([*words, "--num-layers-at-start-in-bf16", "1"]) == 0
    kept = {t["name"]: t["kept_because"] for t in json.loads(capsys.readouterr().out)["tensors"]}
    assert "--num-layers-at-start-in-bf16" in kept["model.layers.0.mlp.up_proj.weight"]
    assert not kept["model.layers.1.mlp.up_proj.weight"]
    assert cli.main([*words, "--extra-high-precision-layers-hf", "down_proj"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert "model.layers.1.mlp.down_proj" in said["files"]["config.json"]["quantization_config"]["ignore"]
    assert "leave none of the model's 2 layers" in refused(capsys, *words[1:], "--num-layers-at-end-in-bf16", "2")


def test_converting_imports_no_transformers(source):
    code = (
        "import sys, miles_formats.convert.encode, miles_formats.convert.decode, miles_formats.options\n"
        "assert not {'transformers', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_missing_is_asked_for(source, capsys):
    assert "needs --to FORMAT and --model-dir DIR and --save-dir DIR" in refused(capsys)
    assert "needs --save-dir DIR" in refused(capsys, "--to", "pair8", "--model-dir", source)


def test_an_unknown_format_gets_the_nearest_name(source, capsys):
    text = refused(capsys, "--to", "pair9", "--model-dir", source, "--dry-run")
    assert "no number format 'pair9' (installed: pair8); did you mean pair8?" in text
    assert "pip" not in text  # somebody else may own a package of that name


def test_an_already_quantised_checkpoint_is_sent_to_bf16_first(source, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["convert", "--to", "pair8", "--model-dir", str(source), "--save-dir", str(out)]) == 0
    capsys.readouterr()
    text = refused(capsys, "--to", "pair8", "--model-dir", out, "--save-dir", tmp_path / "twice")
    assert "already quantised (quant_method 'pair8'" in text and "--to bf16 first" in text
    assert not (tmp_path / "twice").exists()


def test_a_plain_checkpoint_cannot_be_dequantised(source, tmp_path, capsys):
    text = refused(capsys, "--to", "bf16", "--model-dir", source, "--save-dir", tmp_path / "out")
    assert "is not quantised" in text and "nothing to dequantise" in text
    text = refused(capsys, "--to", "bf16", "--model-dir", source, "--save-dir", tmp_path / "out", "--lr", "1")
    assert "dequantising takes no options" in text


def test_options_without_effect_are_refused(source, capsys):
    assert "--lr 1e-3: it has no effect" in refused(
        capsys, "--to", "pair8", "--model-dir", source, "--dry-run", "--lr", "1e-3"
    )
    assert "--wrokers" in refused(capsys, "--to", "pair8", "--model-dir", source, "--dry-run", "--wrokers", "3")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--workers", "0"), "'0' is not a number from 1 to 256"),
        (("--workers", "many"), "'many' is not a number"),
        (("--shard-size", "5x"), "'5x' is not a size; write 5GB or 500MB"),
        (("--shard-size", "0"), "'0' is not a size"),
        (("--shard-size",), "--shard-size needs a value"),
    ],
)
def test_numbers_are_checked(source, capsys, words, says):
    assert says in refused(capsys, "--to", "pair8", "--model-dir", source, "--dry-run", *words)


def test_a_directory_that_is_not_there_or_not_empty(source, tmp_path, capsys):
    assert "no such directory" in refused(capsys, "--to", "pair8", "--model-dir", tmp_path / "no", "--dry-run")
    text = refused(capsys, "--to", "pair8", "--model-dir", source, "--save-dir", source)
    assert "lies inside of --model-dir" in text


def test_nan_is_named_and_nothing_is_left_that_looks_complete(source, tmp_path, capsys):
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, source / "model.safetensors")
    text = refused(capsys, "--to", "pair8", "--model-dir", source, "--save-dir", tmp_path / "out")
    assert "model.layers.1.mlp.up_proj.weight holds 1 values that are NaN or Inf" in text
    assert not (tmp_path / "out").exists()


def test_a_truncated_and_a_missing_file(source, tmp_path, capsys):
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    text = refused(capsys, "--to", "pair8", "--model-dir", source, "--save-dir", tmp_path / "out")
    assert "model.safetensors is truncated" in text
    path.unlink()
    (source / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    text = refused(capsys, "--to", "pair8", "--model-dir", source, "--save-dir", tmp_path / "out")
    assert "model-1.safetensors is missing" in text and not (tmp_path / "out").exists()


def test_a_full_disk(source, tmp_path, capsys, monkeypatch):
    def pwrite(descriptor, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    text = refused(capsys, "--to", "pair8", "--model-dir", source, "--save-dir", tmp_path / "out")
    assert "is full" in text and "nothing was finished" in text and not (tmp_path / "out").exists()


def test_help_shows_the_options_of_every_installed_format(capsys, monkeypatch):
    monkeypatch.undo()
    assert cli.main(["convert", "--help"]) == 0
    text = capsys.readouterr().out
    for name, plugin in installed.providers().items():
        assert f"--to {name}" in text and (plugin.config is None or "-skip-layers" in text)


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys):
    from miles_tools.commands.convert import _Lines

    lines = _Lines(total=100, every=0.0)
    lines(40)
    assert re.search(r"converted 40 B of 100 B, \d+ MB/s, \d+ s left", capsys.readouterr().err)
