"""Tokenizers that write a space before the first word, as those of SentencePiece: special tokens in messages gain no spaces."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from miles_core.chat.renderer import Renderer

CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def renderer(scheme):
    """A tokenizer of bytes and letters in the style of Llama 2; ``scheme``: where it writes the space."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdefghijklmnopqrstuvwxyz<>/[]",
        "▁a",
        "▁b",
        "▁<",
    ]
    vocabulary = {word: i for i, word in enumerate(words)}
    merges = [("▁", "a"), ("▁", "b"), ("▁", "<")]
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if scheme == "normalizer":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    made.chat_template = CHAT
    return Renderer(made)


@pytest.mark.parametrize("scheme", ["normalizer", "first", "always", "never"])
@pytest.mark.parametrize("content", ["a<unk>b", "a</s>b", "</s>b", "a</s> b", "a <s>", "a</s></s>b", "</s>"])
def test_a_special_token_in_a_message_gains_no_space(scheme, content):
    render = renderer(scheme)
    plain = render.tokenizer.decode(render.render([{"role": "user", "content": "qq"}]))
    tokens = render.render([{"role": "user", "content": content}])
    assert render.tokenizer.decode(tokens) == plain.replace("qq", content)
    assert sum(token in render.tokenizer.all_special_ids for token in tokens) == 2  # the template's


@pytest.mark.parametrize("scheme", ["normalizer", "first", "always", "never"])
def test_a_special_token_in_an_appended_message_gains_no_space(scheme):
    render = renderer(scheme)
    question = [{"role": "user", "content": "a"}]
    tokens = [*render.render(question), *render.tokenizer.encode("b", add_special_tokens=False)]
    tail = render.tokenizer.decode(render.extend(tokens, [{"role": "user", "content": "x</s>y"}])[len(tokens) :])
    whole = render.tokenizer.decode(
        render.render([*question, {"role": "assistant", "content": "b"}, {"role": "user", "content": "x</s>y"}])
    )
    assert whole.endswith(tail) and "x</s>y" in tail


@pytest.mark.parametrize("scheme", ["normalizer", "first", "always"])
def test_a_template_without_special_tokens_continues_without_a_space(scheme):
    render = renderer(scheme)
    render.tokenizer.chat_template = CHAT.replace("{{ eos_token }}", "/")
    tokens = [
        *render.render([{"role": "user", "content": "a"}]),
        *render.tokenizer.encode("b", add_special_tokens=False),
    ]
    extended = render.extend(tokens, [{"role": "user", "content": "x"}])
    assert render.tokenizer.decode(extended).endswith("b/[user] x/[assistant]")
