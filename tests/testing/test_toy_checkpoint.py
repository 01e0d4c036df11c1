"""Tiny checkpoints, and a toy run on one whose tokenizer lacks the usual prompts."""

from transformers import logging

from miles_testing import tiny_checkpoint, toy_run


def test_random_checkpoints_show_no_progress_bars(tmp_path, capfd):
    logging.enable_progress_bar()
    tiny_checkpoint("llama", tmp_path)
    assert (tmp_path / "model.safetensors").exists() and capfd.readouterr() == ("", "")


def test_a_tiny_checkpoint_gets_prompts_that_it_has_tokens_for(tmp_path):
    checkpoint = tiny_checkpoint("qwen3_moe", tmp_path / "model")
    run = toy_run(directory=tmp_path / "run", steps=1, hf_checkpoint=checkpoint)
    assert len(run.samples) == 8 and all(sample["response_length"] for sample in run.samples)
