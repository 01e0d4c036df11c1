"""The names that a refusal suggests."""

from miles_core.nearest import did_you_mean, find_nearest


def test_nearest_finds_misspellings_and_endings():
    names = ["--rollout-batch-size", "--lr", "--seed"]
    assert find_nearest("--rollout-batchsize", names) == ["--rollout-batch-size"]
    assert find_nearest("--batch-size", names) == ["--rollout-batch-size"]
    assert find_nearest("--completely-else", names) == []


def test_a_slip_means_one_name():
    names = ["--mem-fraction-static", "--mem-traction-status", "--mm-fraction"]
    assert find_nearest("--mem-fraction-statik", names) == ["--mem-fraction-static"]
    assert len(find_nearest("--memory-fraction-stat", names)) > 1


def test_a_short_name_may_have_one_wrong_letter():
    assert find_nearest("fq8", ["fp8", "int4"]) == ["fp8"]
    assert did_you_mean("fq8", ["fp8", "int4"], "; ") == "; did you mean fp8?"
    assert did_you_mean("none", ["fp8", "int4"], "; ") == ""
    assert find_nearest("0", ["auto", "1", "10"]) == find_nearest("-1.5", ["1", "15"]) == []
