import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_tools.demo.model import BENCHMARK, END, PAD, Size, make_checkpoint

TINY = Size(hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, experts=4, expert_hidden=8)


def test_checkpoint_loads_and_is_a_mixture_of_experts(tmp_path):
    count = make_checkpoint(tmp_path, size=TINY)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(p.numel() for p in model.parameters()) == count
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert model.config.num_experts == 4
    assert model.dtype == torch.float32


def test_seed_decides_the_weights_and_leaves_the_callers_random_state(tmp_path):
    state = torch.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_checkpoint(tmp_path / name, seed=seed, size=TINY)
    assert torch.equal(torch.get_rng_state(), state)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_stored_dtype(tmp_path):
    make_checkpoint(tmp_path, size=TINY, dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_tokenizer_reads_any_text_and_one_ascii_character_is_one_token(tmp_path):
    make_checkpoint(tmp_path, size=TINY)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer.encode("37+58=")) == 6
    text = "  a\n\té+=日本 x "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token == END
    assert tokenizer.pad_token == PAD
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.eos_token_id == tokenizer.eos_token_id


def test_chat_template_opens_the_assistants_turn(tmp_path):
    make_checkpoint(tmp_path, size=TINY)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": " 1+1 "}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|start|>user:  1+1 <|end|><|start|>assistant: "
    closed = tokenizer.apply_chat_template(chat, tokenize=False)
    assert closed == "<|start|>user:  1+1 <|end|>"


def test_benchmark_model_has_1_8_million_parameters(tmp_path):
    assert 1.75e6 < make_checkpoint(tmp_path, size=BENCHMARK) < 1.9e6
