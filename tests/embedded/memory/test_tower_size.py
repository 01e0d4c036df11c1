"""Parameters of towers, compared with Transformers' models; bytes of a trained one, compared with a trainer's tensors."""

import pytest
import torch
import transformers
from packaging.version import Version

from miles_core.plugin.facts import Fact, Facts
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.manifest import IMAGES
from miles_embedded.memory.model_size import model_size
from miles_embedded.memory.tower_size import tower_size
from miles_embedded.memory.usage import size_of, trainer_parts, trainer_usage, training_of

CLASSES = {
    **{"gemma3": "Gemma3", "glm4v": "Glm4v", "internvl": "InternVL", "llava": "Llava", "llava_next": "LlavaNext"},
    **{"mistral3": "Mistral3", "qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"},
    **{"qwen3_vl_moe": "Qwen3VLMoe", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"},
}


@pytest.mark.parametrize("kind", IMAGES)
def test_parameters_are_those_of_transformers(kind):
    """With the default sizes of each family, those of a released model."""
    made = getattr(transformers, f"{CLASSES[kind]}Config")()
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(made)
    outside = [p for n, p in model.named_parameters() if "language_model" not in n and "lm_head" not in n]
    found = tower_size(made.to_dict())
    assert found.parameters == pytest.approx(sum(p.numel() for p in outside), rel=0.02)


def test_models_without_a_tower_have_none():
    assert tower_size({"hidden_size": 8}) is None
    assert (
        tower_size({"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}, "text_config": {"hidden_size": 8}})
        is None
    )


def facts_of(**values):
    return Facts([Fact(name.replace("__", "."), value, "test") for name, value in values.items()])


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="images need Transformers 5.24 or later"
)
@pytest.mark.parametrize("trained", [False, True])
def test_a_trainer_holds_what_the_plan_says(tmp_path, trained):
    """Weights, gradients and optimizer state of a tower that is large in comparison with its language model."""
    from miles_core.contracts.trainer import Callbacks
    from miles_core.data.batch import collate
    from miles_core.data.sample import Sample
    from miles_embedded.model.load import load_model
    from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig

    text = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    tower = {"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 64}
    ids = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(tmp_path)
    model = load_model(tmp_path, "float32", train_towers=trained)
    trainer = EmbeddedTrainer(model, TrainerConfig(OptimizerConfig()))
    trainer.bind(Callbacks(trainer.forward, None, trainer.optimizer_step))
    facts = facts_of(
        **{
            "data__media": True,
            "embedded__train_vision_tower": trained,
            "model__dtype": "float32",
            "train__max_tokens_per_gpu": 64,
        }
    )
    parts = trainer_parts(size_of(facts, config.to_dict()), training_of(facts))
    parameters = list(model.parameters())
    assert parts.weights == pytest.approx(sum(p.nbytes for p in parameters), rel=0.05)
    moving = sum(p.nbytes for p in parameters if p.requires_grad)
    assert parts.gradients == pytest.approx(moving, rel=0.05)
    ctx_batch = collate([Sample(tokens=[3, 4, 5, 6], response_length=2)])
    micro, ctx = trainer.prepare(ctx_batch, [0], "train", False)
    loss = trainer.forward(model, micro, ctx).log_probs.sum() + 0 * sum(p.sum() for p in parameters if p.requires_grad)
    loss.backward()
    trainer.optimizer_step()
    state = [x for s in trainer.optimizer._inner.state_dict()["state"].values() for x in s.values() if x.numel() > 1]
    assert parts.optimizer == pytest.approx(sum(x.nbytes for x in state), rel=0.05)


def test_images_are_counted_with_media_only():
    config = transformers.Qwen2_5_VLConfig().to_dict()
    size = size_of(facts_of(), config)
    assert size.tower == tower_size(config) and model_size(config, 0).parameters == size.parameters
    text, frozen, trained = (
        trainer_usage(facts_of(data__media=media, embedded__train_vision_tower=tower), size)
        for media, tower in ((False, False), (True, False), (True, True))
    )
    count = size.tower.parameters
    assert frozen.parts.weights - text.parts.weights == 2 * count and frozen.parts.gradients == text.parts.gradients
    assert (
        trained.parts.gradients - text.parts.gradients == 4 * count
        and trained.parts.optimizer - text.parts.optimizer == 12 * count
    )
    assert text.parts.activations < frozen.parts.activations < trained.parts.activations
    assert "tower of 3.08 billion parameters" in trained.note and "tower" not in text.note
