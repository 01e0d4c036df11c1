"""Supervised samples: what the engine would have produced."""

from __future__ import annotations

import json

import pytest

from miles_core.errors import DataError
from miles_core.rollout.queue import open_prompts
from miles_core.run.warm_start import supervised_samples


def test_prompt_and_response_are_tokenised_apart_with_an_end(toy_run, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in (("1+1=", "2"), ("2+2=", 4))))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "a"}\n')
    run = toy_run(
        steps=0, prompt_data=prompts, input_key="question", sft_data=pairs, sft_response_key="answer", sft_steps=1
    )
    samples = supervised_samples(
        run.run, open_prompts(run.run.config, run.run.config.sft.data, "--sft-data", label_key="answer")
    )
    tokenizer = run.run.tokenizer
    assert [tokenizer.decode(s.tokens, skip_special_tokens=True) for s in samples] == ["1+1=2", "2+2=4"]
    assert all(s.tokens[-1] == tokenizer.eos_token_id and s.response_length == 2 for s in samples)


def test_pairs_without_the_response_column(toy_run, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"input": "a", "answer": "b"}\n')
    with pytest.raises(DataError, match="no key 'response'"):
        toy_run(sft_data=pairs)


@pytest.mark.parametrize("answer", [["b"], [{"role": "assistant", "content": "b"}], {"text": "b"}])
def test_a_response_that_is_no_text(toy_run, tmp_path, answer):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"input": "a", "answer": answer}) + "\n")
    with pytest.raises(
        DataError, match=r"pairs\.jsonl:1: the response is .*; it must be a text \(--sft-response-key\)"
    ):
        toy_run(sft_data=pairs, sft_response_key="answer", sft_steps=1)
