import pytest

from miles_core.cli import plan
from miles_core.errors import MilesError


def test_a_plan_is_printed_with_facts_origins_and_chains(f6, moe, capsys):
    argv = ["--plugins", f6, "--rollout-precision", "f6", "--hf-checkpoint", moe, "--hardware", "B200"]
    assert plan.run(argv) == 0
    text = capsys.readouterr().out
    for line in (
        "  gpu.sm = 100 (--hardware B200)",
        "  model.moe = true (config.json: num_experts=8)",
        "  rollout.precision = f6 (--rollout-precision f6)",
        "  wrap_weights: core <- f6 (outermost)",
    ):
        assert line in text.splitlines(), (line, text)
    assert text.startswith("miles-core 0.1.0, plugins: f6 0.3, embedded 0.1.0 (plan ")


def test_json_is_the_plan_itself(f6, capsys):
    from miles_core.plugin.plan import Plan

    assert plan.run(["--json", "--plugins", f6]) == 0
    printed = Plan.from_json(capsys.readouterr().out)
    assert printed.order == ("f6", "embedded")
    assert printed.plugins[0].source.startswith(f"file:{f6} sha256:")


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_plan_shows_no_secret(f6, capsys, monkeypatch, words):
    monkeypatch.setenv("SOME_API_KEY", "Q7zSecretOfThisTest99")
    assert plan.run([*words, "--plugins", f6, "--no-use-wandb", "--wandb-group", "Q7zSecretOfThisTest99"]) == 0
    printed = capsys.readouterr().out
    assert "f6" in printed and "Q7zSecretOfThisTest99" not in printed


def test_all_reasons_come_at_once(f6, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    argv = ["--plugins", f6, "--rollout-precision", "f6", "--hf-checkpoint", str(tmp_path), "--hardware", "H200"]
    with pytest.raises(MilesError) as refused:
        plan.run(argv)
    text = str(refused.value)
    assert "this run cannot start (2 problems)" in text
    assert "because only experts are packed" in text and "because six bits need Blackwell" in text


def test_the_hint_to_emulate_works_when_followed(f6, moe, capsys):
    argv = ["--plugins", f6, "--rollout-precision", "f6", "--hf-checkpoint", moe, "--hardware", "none"]
    with pytest.raises(MilesError, match="    --emulate-precision"):
        plan.run(argv)
    assert plan.run([*argv, "--emulate-precision"]) == 0
    assert "emulated: f6 rollout x bf16 train needs gpu.sm >= 100" in capsys.readouterr().out


def test_a_wrong_fact_is_refused(f6):
    with pytest.raises(MilesError, match=r"there is no fact 'gpu\.smm'; did you mean gpu\.sm"):
        plan.run(["--fact", "gpu.smm=90"])
