"""A toy run on a checkpoint whose tokenizer lacks the usual prompts."""

from miles_testing import tiny_checkpoint, toy_run


def test_a_tiny_checkpoint_gets_prompts_that_it_has_tokens_for(tmp_path):
    checkpoint = tiny_checkpoint("qwen3_moe", tmp_path / "model")
    run = toy_run(directory=tmp_path / "run", steps=1, hf_checkpoint=checkpoint)
    assert len(run.samples) == 8 and all(sample["response_length"] for sample in run.samples)
