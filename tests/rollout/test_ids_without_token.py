"""Ids of the model that the tokenizer does not have are counted."""

from types import SimpleNamespace

import pytest

from miles_core.api import samples
from miles_core.rollout.requests import find_ids_without_token
from miles_testing.tiny import tiny_checkpoint
from miles_tools.demo.model import make_tokenizer


def tokenizer(*ids):
    return SimpleNamespace(get_vocab=lambda: {str(i): i for i in ids})


@pytest.mark.parametrize(
    ("ids", "vocabulary", "missing"),
    [
        ((0, 1, 2), 3, None),
        ((0, 1, 2, 7), 3, None),
        ((0, 1), 4, [False, False, True, True]),
        ((0, 2), 3, [False, True, False]),
    ],
)
def test_which_ids_have_no_token(ids, vocabulary, missing):
    found = find_ids_without_token(tokenizer(*ids), vocabulary)
    assert (None if found is None else found.tolist()) == missing


def test_a_run_counts_the_ids_without_a_token_that_it_sampled(toy_run, tmp_path):
    made = make_tokenizer()
    ids = {"eos_token_id": made.eos_token_id, "pad_token_id": made.pad_token_id}
    tiny_checkpoint("qwen3", tmp_path / "model", vocab_size=len(made) + 61, **ids)
    made.save_pretrained(tmp_path / "model")
    done = toy_run(steps=1, hf_checkpoint=tmp_path / "model", directory=tmp_path / "run")
    sampled = [
        token for sample in samples(tmp_path / "run") for token in sample["tokens"][-sample["response_length"] :]
    ]
    share = sum(token >= len(made) for token in sampled) / len(sampled)
    assert done.metrics[-1]["rollout/ids_without_token"] == pytest.approx(share) and 0 < share < 1
    assert "of the sampled ids have no token in the tokenizer" in (tmp_path / "run/run.log").read_text()


def test_a_run_with_a_token_for_each_id_does_not_count(toy_run):
    assert "rollout/ids_without_token" not in toy_run(steps=1).metrics[-1]
