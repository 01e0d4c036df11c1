import json

import pytest

from miles_core.cli.main import main
from miles_core.precision.quantizer import FormatItself, bounded
from miles_embedded.engine.engine import EmbeddedEngine
from miles_testing.toy import toy_files

FP8 = ("--plugins", "fp8", "--rollout-precision", "fp8", "--emulate-precision")


@pytest.fixture
def verify(tmp_path, capsys):
    def call(*words, family="qwen3"):
        model = toy_files(family) / "model"
        code = main(["verify", "--hf-checkpoint", str(model), "--save", str(tmp_path / "out"), *words])
        return code, capsys.readouterr()

    return call


def test_a_sound_pair_is_within_the_tolerance_and_leaves_a_page(verify, tmp_path):
    code, said = verify()
    assert code == 0
    assert "is within the tolerance of 0.1" in said.out
    assert "Worst tokens" in said.out and "Mismatch budget" not in said.out
    assert "engine - trainer, tokens" in said.out and "…" not in said.out  # too wide for a table on a narrow terminal
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"verify.html", "verify.json", "gap.png"}
    assert "within the tolerance" in (tmp_path / "out" / "verify.html").read_text()


def test_beyond_the_tolerance_the_exit_code_says_so(verify):
    code, said = verify(*FP8, "--verify-logprobs-tolerance", "0.001")
    assert code == 1
    assert "is beyond the tolerance of 0.001" in said.out


def test_parity_of_both_sides_is_measured_and_shown(verify, tmp_path):
    both = (*FP8, "--train-precision", "fp8")
    code, said = verify(*both, "--json")
    (policy,) = json.loads(said.out)["policies"]
    assert code == 0 and [side["backend"] for side in policy["parity"]] == ["engine embedded", "trainer embedded"]
    for side in policy["parity"]:
        assert side["format"] == "fp8" and len(side["probes"]) == 4 and side["probes"][0] == "random"
        for what in ("weights", "activations"):
            assert side[what] == {"declared": "bytes", "measured": "bytes", "differing": 0, "worst_probe": "random"}
    page = (tmp_path / "out" / "verify.html").read_text()
    assert "Quantisers against the format, on the probes: random, a tile of zeros, heavy tails, model.layers.0" in page


@pytest.mark.parametrize("declared", [0.05, 1e-6])
def test_an_engine_with_activations_of_its_own(verify, monkeypatch, tmp_path, declared):
    class Plain(FormatItself):
        activations = bounded(declared)

        def activation(self, x):
            return x

    monkeypatch.setattr(EmbeddedEngine, "quantizer", lambda self, format: Plain(format))
    code, said = verify(*FP8, "--verify-logprobs-tolerance", "5")
    if declared < 0.01:
        assert code not in (0, 1)
        assert "quantises fp8 activations differently than it declares: bounded(1e-06)" in " ".join(said.err.split())
    else:
        page = (tmp_path / "out" / "verify.html").read_text()
        assert code == 0 and "bounded(0.05)" in page and "bounded(0.0257)" in page


def test_the_budget_as_json(verify, tmp_path):
    code, said = verify(*FP8, "--budget", "--json", "--verify-logprobs-tolerance", "5")
    content = json.loads(said.out)
    assert (code, content["ok"]) == (0, True)
    causes = {c["name"]: c["share"] for c in content["policies"][0]["budget"]["causes"]}
    assert causes["weight quantisation"] > 0.1
    assert causes["weight quantisation"] + causes["activation quantisation"] == pytest.approx(1, abs=0.05)
    page = (tmp_path / "out" / "verify.html").read_text()
    assert "weight quantisation" in page and page.count("data:image/png") == 2
    assert (tmp_path / "out" / "budget.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_of_the_data_are_used(verify, tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"input": "abc"}\n')
    code, said = verify("--prompt-data", str(prompts), "--rollout-max-response-len", "3", "--json")
    assert code == 0
    assert json.loads(said.out)["policies"][0]["gap"]["tokens"] <= 24


def test_the_weights_of_a_run(verify, toy_run, tmp_path):
    run = toy_run(family="qwen3", steps=1, directory=tmp_path / "run")
    code, said = verify("--load", str(run.directory), "--json")
    assert code == 0
    assert json.loads(said.out)["policies"][0]["gap"]["mean_abs"] < 1e-5


def test_no_model_is_a_sentence(capsys):
    assert main(["verify"]) == 2
    assert "--hf-checkpoint" in capsys.readouterr().err
