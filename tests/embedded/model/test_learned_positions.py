"""Decoder stacks that differ from Llama's: tables of positions, layers and heads in other places. Each kind is exact, or refused."""

import json
import re

import pytest
import torch
from transformers import CONFIG_MAPPING

from miles_core.cli import main as cli
from miles_core.contracts.trainer import Callbacks
from miles_core.data.batch import collate
from miles_core.errors import CheckpointError
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.model.examine import examine_checkpoint
from miles_embedded.model.learned_positions import table_length
from miles_embedded.model.load import context_limit, load_model
from miles_embedded.model.parts import decoder_layers, head, logits_module
from miles_embedded.testing.comparison import _reference, compare, expected_log_probs, small_groups
from miles_embedded.testing.families import lacking
from miles_embedded.testing.tiny_configuration import tiny_configuration
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_testing.tiny import random_checkpoint


def checkpoint_of(kind, directory, **changes):
    if lacking(kind):
        pytest.skip(lacking(kind))
    config = tiny_configuration(CONFIG_MAPPING[kind])
    config.update(changes)
    return random_checkpoint(config, directory / kind)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("gpt2", id="layers under another name"),
        pytest.param("opt", id="layers in the decoder of the stack"),
        pytest.param("bart", id="positions counted in the call"),
        pytest.param("roberta", id="positions after the padding id, layers in a part, layers before the output layer"),
        pytest.param("nemotron", id="a layer that does not pass the call on"),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_it_is_what_transformers_computes(kind, recompute, tmp_path):
    checkpoint = checkpoint_of(kind, tmp_path)
    examine_checkpoint(checkpoint)
    found = compare(checkpoint, recompute)
    assert found.score < 2e-5 and found.greedy < 2e-5 and found.gradient < 1e-3 and found.export, found
    assert _gap_after_two_steps(checkpoint, recompute) < 1e-4


def _gap_after_two_steps(checkpoint, recompute):
    """Largest difference of log-probs, in nats, after two steps of packed samples and of torch's AdamW on Transformers' model."""
    trainer = EmbeddedTrainer(
        load_model(checkpoint, "float32"),
        TrainerConfig(OptimizerConfig(lr=1e-3, weight_decay=0, clip_grad=0, eps=1e-4), recompute=recompute),
    )
    trainer.bind(Callbacks(trainer.forward, None, trainer.optimizer_step))
    reference = _reference(checkpoint)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0, betas=(0.9, 0.98), eps=1e-4)
    batch, before = collate(small_groups()), None
    for step in range(3):
        micro, ctx = trainer.prepare(batch, list(range(len(batch))), "train", False)
        found = trainer.forward(trainer.model, micro, ctx).log_probs[micro.mask != 0]
        tokens = [micro.tokens[a : a + n] for a, n in zip(micro.starts.tolist(), micro.lengths.tolist(), strict=True)]
        rows = [
            expected_log_probs(reference, t.tolist()).gather(1, t[1:, None])[p - 1 :, 0]
            for t, p in zip(tokens, micro.prompt_lengths.tolist(), strict=True)
        ]
        expected = torch.cat(rows)
        if step == 2:
            assert float((expected.detach() - before).abs().max()) > 1e-2  # two steps change the model
            return float((found - expected).detach().abs().max())
        before = expected.detach() if before is None else before
        for log_probs in (found, expected):
            log_probs.sum().backward()
        trainer.optimizer_step()
        plain.step()
        plain.zero_grad()


@pytest.mark.parametrize(
    ("kind", "layers", "child"),
    [("gpt2", "h", ""), ("whisper", "layers", ""), ("bert", "encoder.layer", "cls"), ("dbrx", "blocks", "")],
)
def test_layers_and_head_are_found_where_the_family_has_them(kind, layers, child, tmp_path):
    model = load_model(checkpoint_of(kind, tmp_path), "float32")
    name = next(name for name, module in model.named_modules() if module is decoder_layers(model))
    assert name.endswith(layers) and len(decoder_layers(model)) == 2
    assert logits_module(model) is (getattr(model, child) if child else head(model))


def test_the_decoder_runs_as_many_layers_as_the_configuration_gives_it(tmp_path):
    """``num_hidden_layers`` of BART's kind counts the layers of the encoder."""
    checkpoint = checkpoint_of("bart", tmp_path, encoder_layers=1, decoder_layers=3)
    assert len(decoder_layers(load_model(checkpoint, "float32"))) == 3


def test_a_model_that_attends_in_both_directions_is_refused(tmp_path):
    checkpoint = checkpoint_of("roberta", tmp_path)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"is_decoder": False}))
    with pytest.raises(CheckpointError, match="in both directions, because is_decoder"):
        examine_checkpoint(checkpoint)


def test_an_encoder_with_a_decoder_is_refused(tmp_path):
    checkpoint = checkpoint_of("bart", tmp_path)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"is_encoder_decoder": True}))
    with pytest.raises(
        CheckpointError, match=r"bart: it is an encoder with a decoder .* the embedded backend runs decoders only"
    ):
        examine_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("longest", "origin"), [(None, r"config\.json"), (128, "--rollout-max-context-len"), (127, "")]
)
def test_the_plan_refuses_sequences_beyond_the_table(longest, origin, tmp_path, capsys):
    command = ["plan", "--hf-checkpoint", str(checkpoint_of("roberta", tmp_path))]
    code = cli.main(command + (["--rollout-max-context-len", str(longest)] if longest else []))
    printed = "".join(capsys.readouterr())
    refused = re.search(rf"has learned positions for 127 tokens, and {origin} allows sequences of 128; use", printed)
    assert bool(refused) == bool(origin) and (not origin or code != 0)


@pytest.mark.parametrize(
    ("kind", "rows"), [("gpt2", 128), ("opt", 128), ("roberta", 127), ("gptj", 128), ("nemotron", None)]
)
def test_sequences_are_no_longer_than_the_table_of_positions(kind, rows, tmp_path):
    """RoBERTa's table has rows for the padding id and the ids below it, which are part of ``max_position_embeddings``."""
    model = load_model(checkpoint_of(kind, tmp_path), "float32")
    assert table_length(model) == rows and context_limit(model, 96) == 96
    if rows is None:
        assert context_limit(model, 500) == 500
        return
    with pytest.raises(CheckpointError, match=f"positions for {rows} tokens.* use --rollout-max-context-len {rows}$"):
        context_limit(model, rows + 1)
    if rows == 128:
        assert context_limit(model) == 128


@pytest.mark.parametrize(("kind", "longest"), [("whisper", None), ("opt", None), ("roberta", 127)])
def test_a_run_checks_both_sides_and_they_agree(toy_run, kind, longest, tmp_path):
    """The first check computes in a wider type, where tables of positions are copied whole."""
    run = toy_run(
        directory=tmp_path / "run",
        steps=1,
        hf_checkpoint=checkpoint_of(kind, tmp_path),
        rollout_max_context_len=longest,
        self_check=True,
        recompute_activations=True,
        dtype="float32",
    )
    assert [record["mismatch/abs_log_prob_max"] < 1e-4 for record in run.metrics] == [True]
