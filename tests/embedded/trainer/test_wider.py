"""A pass in a wider type: the same weights, other arithmetic, and nothing changed afterwards."""

import pytest
import torch

from miles_core.contracts.emulation import Emulation
from miles_core.contracts.trainer import Callbacks
from miles_core.errors import MilesError
from miles_core.precision.codec import Codec
from miles_embedded.model.load import load_model
from miles_embedded.quantized.weights import install
from miles_embedded.testing.families import family_checkpoint, lacking
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_formats.codec import FormatCodec
from miles_testing.doubles.pair_format import PairFormat
from miles_testing.yardstick import make_batch

WIDER = Emulation(wider=True)
TRIED = [
    f for f in ("qwen3", "qwen3_moe", "gpt_oss", "deepseek_v32", "gemma2", "gemma3_text", "llama4") if not lacking(f)
]


def make(model):
    trainer = EmbeddedTrainer(model, TrainerConfig(trains=False))
    trainer.bind(Callbacks(trainer.forward, None, trainer.optimizer_step))
    return trainer


def scored(trainer, emulation=Emulation()):  # noqa: B008 - it is frozen
    with trainer.emulate(emulation, Codec()):
        return trainer.log_probs(make_batch(), "verify")["log_probs"]


@pytest.mark.parametrize("family", TRIED)
def test_a_pass_of_a_16_bit_model_is_one_in_float32(family, tmp_path):
    checkpoint = family_checkpoint(family, tmp_path)
    trainer = make(load_model(checkpoint, "bfloat16"))
    before, wide, after = scored(trainer), scored(trainer, WIDER), scored(trainer)
    assert torch.equal(before, after) and not any(p.dtype == torch.float64 for p in trainer.model.parameters())
    expected = scored(make(load_model(checkpoint, "bfloat16").float()))
    assert (before - expected).abs().max() > 1e-3 and (wide - expected).abs().max() < 0.1 * (
        before - expected
    ).abs().max()


def test_a_pass_of_a_float32_model_is_one_in_float64(tmp_path):
    checkpoint = family_checkpoint("qwen3", tmp_path)
    wide = scored(make(load_model(checkpoint, "float32")), WIDER)
    assert wide.dtype == torch.float64
    expected = scored(make(load_model(checkpoint, "float32").double()))
    torch.testing.assert_close(wide, expected, rtol=0, atol=1e-6)


def test_quantised_values_are_those_of_the_narrow_type(tmp_path):
    checkpoint = family_checkpoint("qwen3", tmp_path)
    model = load_model(checkpoint, "bfloat16")
    install(model, FormatCodec(PairFormat()))
    trainer = make(model)
    narrow, wide = scored(trainer), scored(trainer, WIDER)
    plain = scored(make(load_model(checkpoint, "bfloat16")), WIDER)
    assert (wide - narrow).abs().mean() < 0.5 * (wide - plain).abs().mean()
    assert torch.equal(scored(trainer), narrow)


def test_a_module_that_cannot_is_named(tmp_path):
    trainer = make(load_model(family_checkpoint("qwen3", tmp_path), "bfloat16"))
    trainer.model.lm_head.register_forward_hook(
        lambda module, args, output: output @ output.new_ones(64, 64, dtype=torch.bfloat16)
    )
    with pytest.raises(MilesError, match=r"Qwen3ForCausalLM does not compute in torch\.float32"):
        scored(trainer, WIDER)
    assert not any("weight" in module.__dict__ for module in trainer.model.modules())
