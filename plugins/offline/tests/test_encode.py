"""Rows to samples: what is trained, and the errors for rows that do not fit."""

from types import SimpleNamespace

import pytest

from miles_core.data import Renderer, Row
from miles_core.plugin import DataError
from miles_offline.encode import Encoder, encode_messages
from miles_tools.demo.model import make_tokenizer

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "no"},
]
#: Writes the thoughts of the last answer only, as the templates of several families do.
FORGETS = (
    "{% for m in messages %}<|start|>{{ m.role }}: {% if loop.last and m.role == 'assistant' %}<think>{% endif %}{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)


def encoder(context=128, chat=False, template=True, estimator="sft"):
    tokenizer = make_tokenizer()
    renderer = Renderer(tokenizer) if template else None

    class Template:
        def __init__(self):
            self.renderer = renderer

        def __call__(self, prompt):
            return tokenizer.encode(prompt)

    facts = {"model.context": context, "model.vocab_size": len(tokenizer)}
    data, rollout = SimpleNamespace(apply_chat_template=chat), SimpleNamespace(max_context_len=None)
    algorithm = SimpleNamespace(advantage_estimator=estimator)
    config = SimpleNamespace(data=data, rollout=rollout, algorithm=algorithm)
    return Encoder(
        SimpleNamespace(tokenizer=tokenizer, render=Template(), config=config, plan=SimpleNamespace(fact=facts.get))
    )


def trained(sample):
    tokenizer = make_tokenizer()
    chosen = [t for t, kept in zip(sample.tokens[sample.prompt_length :], sample.mask, strict=True) if kept]
    return tokenizer.decode(chosen)


def test_every_answer_of_a_conversation_is_trained_in_one_sample():
    (sample,) = encoder().encode(Row([], {"messages": TALK}), 3, 10)
    whole = (
        "<|start|>user: hi<|end|><|start|>assistant: yes<|end|><|start|>user: so<|end|><|start|>assistant: no<|end|>"
    )
    assert make_tokenizer().decode(sample.tokens) == whole
    assert trained(sample) == "yes<|end|>no<|end|>"
    assert (sample.index, sample.group_index, sample.rollout_id, sample.reward) == (10, 3, 10, 1.0)


def test_an_answer_after_which_the_template_changes_earlier_text_is_a_sibling():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = FORGETS
    first, second = encode_messages(Renderer(tokenizer), TALK, 0)
    assert [tokenizer.decode(each.tokens[each.prompt :]) for each in (first, second)] == [
        "<think>yes<|end|>",
        "<think>no<|end|>",
    ]


def test_a_conversation_ends_also_if_its_template_writes_no_end():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "")
    (found,) = encode_messages(Renderer(tokenizer), TALK, 0)
    assert tokenizer.decode(found.tokens).endswith("assistant: no<|end|>") and found.mask[-1] == 1


def test_messages_of_the_prompt_are_not_trained():
    (sample,) = encoder().encode(Row(TALK[:3], {"completion": TALK[3:]}), 0, 0)
    assert trained(sample) == "no<|end|>" and set(sample.mask) == {1}


@pytest.mark.parametrize("answer", [" a", " a<|end|>"])
def test_a_text_ends_once(answer):
    (sample,) = encoder().encode(Row("q", {"completion": answer}), 0, 0)
    assert make_tokenizer().decode(sample.tokens) == "q a<|end|>" and trained(sample) == " a<|end|>"


def test_a_text_answers_messages():
    (sample,) = encoder().encode(Row(TALK[:1], {"completion": "a"}), 0, 0)
    assert make_tokenizer().decode(sample.tokens) == "<|start|>user: hi<|end|><|start|>assistant: a<|end|>"


def test_texts_are_messages_with_the_chat_template():
    (sample,) = encoder(chat=True).encode(Row("q", {"completion": "a"}), 0, 0)
    assert make_tokenizer().decode(sample.tokens) == "<|start|>user: q<|end|><|start|>assistant: a<|end|>"


def test_the_two_sides_of_a_pair_are_one_rollout():
    chosen, rejected = encoder().encode(Row("q", {"chosen": "a", "rejected": "b"}), 2, 4)
    assert (chosen.reward, rejected.reward) == (1.0, 0.0)
    assert (chosen.index, rejected.index) == (4, 5) and chosen.rollout_id == rejected.rollout_id == 4


@pytest.mark.parametrize("label", [True, False])
def test_the_label_of_an_answer_is_its_reward(label):
    (sample,) = encoder().encode(Row("q", {"completion": "a"}, metadata={"label": label}), 0, 0)
    assert sample.reward == float(label)


def test_an_answer_with_a_label_is_one_text():
    made = encoder()
    made.renderer.tokenizer.chat_template = FORGETS
    with pytest.raises(DataError, match="it is not one text that can be preferred"):
        made.encode(Row(TALK[:1], {"completion": TALK[1:]}, metadata={"label": True}), 0, 0)


@pytest.mark.parametrize(
    ("options", "label", "message"),
    [
        (
            {"context": 8},
            {"completion": "answers"},
            "with the column 'completion' the row has 9 tokens (1 before the answer), and 8 fit (the model's context)",
        ),
        (
            {"template": False},
            {"messages": TALK},
            "column 'messages': it is a list of messages, and the tokenizer has no chat template",
        ),
    ],
)
def test_what_does_not_fit_is_described_with_its_row_and_column(options, label, message):
    with pytest.raises(DataError) as error:
        encoder(**options).encode(Row("q", label, place="rows.jsonl:7"), 0, 0)
    assert "rows.jsonl:7" in str(error.value) and message in str(error.value)


def test_a_side_without_an_answer_is_refused():
    sides = {"chosen": [TALK[1]], "rejected": [TALK[2]]}
    with pytest.raises(
        DataError, match="no message in the column 'rejected' after the prompt has the role 'assistant'"
    ):
        encoder().encode(Row(TALK[:1], sides), 0, 0)


def test_the_text_of_a_reward_model_is_followed_by_the_token_at_which_its_score_is_computed():
    row = Row("ab", {"chosen": "c", "rejected": "dd"}, metadata={"margin": 0.5})
    pair = encoder(), encoder(estimator="reward_model")
    for plain, scored in zip(*(each.encode(row, 3, 10) for each in pair), strict=True):
        assert scored.tokens[:-1] == plain.tokens and scored.mask == [0] * len(plain.mask) + [1]
        assert (scored.response, scored.fields["reward_margin"]) == (plain.response, 0.5)
        assert not plain.fields


@pytest.mark.parametrize("estimator", ["dpo", "reward_model"])
def test_sides_that_differ_in_text_only_express_no_preference(estimator):
    sides = {"chosen": "yes", "rejected": "yes<|end|>"}
    with pytest.raises(
        DataError, match=r"^f.jsonl:3: the columns 'chosen' and 'rejected' have the same tokens \('yes<.*remove it$"
    ):
        encoder(estimator=estimator).encode(Row("so", sides, place="f.jsonl:3"), 0, 0)
    assert len(encoder(estimator=estimator).encode(Row("so", {**sides, "rejected": "yesyes"}), 0, 0)) == 2
