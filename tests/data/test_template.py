import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from miles_core.data.prompts import PromptTemplate, parse_variables
from miles_core.errors import ConfigError, DataError

CHAT = "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
CHAT += "<{{ m.role }}> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
WORDS = ["<unk>", "<s>", "</s>", "<user>", "<assistant>", "add", "two", "think"]


def tokenizer(chat_template=None, post=None):
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if post:
        inner.post_processor = processors.TemplateProcessing(
            single=post, special_tokens=[("<s>", 1), ("</s>", 2), ("<user>", 3)]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    made.chat_template = chat_template
    return made


def ids(*words):
    return [WORDS.index(word) for word in words]


def test_a_chat_is_rendered_with_the_generation_prompt():
    template = PromptTemplate(tokenizer(CHAT, post="<s> $A </s>"), apply_chat_template=True)
    assert template.renderer.text([{"role": "user", "content": "add two"}]) == "<user> add two <assistant>"
    assert template("add two") == ids("<user>", "add", "two", "<assistant>")
    chat = [
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "add"},
        {"role": "user", "content": "two"},
    ]
    assert template(chat) == ids("<user>", "two", "<assistant>", "add", "<user>", "two", "<assistant>")


def test_a_chat_that_ends_with_an_assistant_message_is_continued():
    template = PromptTemplate(tokenizer(CHAT), apply_chat_template=True)
    chat = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "add"}]
    assert template(chat) == ids("<user>", "two", "<assistant>", "add")
    parts = [chat[0], {"role": "assistant", "content": [{"type": "text", "text": "add"}]}]
    of_parts = CHAT.replace("m.content", "(m.content if m.content is string else m.content[0].text)")
    assert PromptTemplate(tokenizer(of_parts), True)(parts) == ids("<user>", "two", "<assistant>", "add")
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    for last in ({"content": ""}, {"content": None}, {"content": []}, {"content": "add", "tool_calls": [call]}):
        with pytest.raises(DataError, match="ends with an assistant message that has tool calls or no text"):
            template([chat[0], {"role": "assistant", **last}])
    with pytest.raises(DataError, match="the chat template refuses the prompt"):  # it does not show the message
        PromptTemplate(tokenizer(CHAT.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}")), True)(chat)


@pytest.mark.parametrize("post", ["<s> $A", "<s> <user> $A", "<s> $A </s>"])
def test_a_text_that_begins_with_the_tokenizers_start_gets_no_second_one(post):
    template, start = PromptTemplate(tokenizer(post=post)), post.partition(" $A")[0].split()
    for text in ("add two", " ".join([*start, "add", "two"])):
        assert template(text) == template(text, template.encode_texts([text])[0]) == ids(*start, "add", "two")
    assert template(" ".join([*start, *start, "add"])) == ids(*start, *start, "add")
    assert template("<s> add </s>")[-2:] == ids("add", "</s>")


@pytest.mark.parametrize(
    ("chat", "text"),
    [
        (CHAT, "<user> two <assistant>"),
        ("<s>" + CHAT, "<s> <user> two <assistant>"),
        ("<s>" + CHAT, "\n<user> two"),
        (CHAT.replace("<{{ m.role }}>", "<s> {{ m.role }} :"), "<s> user : two"),
        (CHAT, "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"),
        (CHAT, "<s>[INST] two [/INST]"),
    ],
)
def test_text_that_a_template_rendered_is_refused(chat, text):
    template = PromptTemplate(tokenizer(chat), True)
    for prompt in (text, [{"role": "system", "content": text}, {"role": "user", "content": "add"}]):
        with pytest.raises(DataError, match=r"begins with .*, which chat templates write: it was rendered before"):
            template(prompt)
    assert PromptTemplate(tokenizer(chat))(text)
    assert template("what does <user> mean?") and template(
        [{"role": "user", "content": "two"}, {"role": "assistant", "content": text}]
    )


@pytest.mark.parametrize(
    ("post", "expected"),
    [(None, ["add", "two"]), ("<s> $A", ["<s>", "add", "two"]), ("<s> $A </s>", ["<s>", "add", "two"])],
)
def test_a_plain_text_keeps_the_tokenizers_start_but_not_its_end(post, expected):
    assert PromptTemplate(tokenizer(post=post))("add two") == ids(*expected)


def test_an_end_token_the_text_itself_has_stays():
    assert PromptTemplate(tokenizer())("add </s>") == ids("add", "</s>")


def test_what_cannot_be_rendered():
    with pytest.raises(ConfigError, match=r"--apply-chat-template: the tokenizer of .* has no chat template"):
        PromptTemplate(tokenizer(), apply_chat_template=True)
    with pytest.raises(DataError, match="give --apply-chat-template"):
        PromptTemplate(tokenizer(CHAT))([{"role": "user", "content": "two"}])
    with pytest.raises(DataError, match=r"refuses the prompt .*no such role"):
        PromptTemplate(tokenizer(CHAT), True)([{"role": "bad", "content": "two"}])
    with pytest.raises(DataError, match="has no token"):
        PromptTemplate(tokenizer())(" ")


def test_variables_of_the_template():
    chat = "{% for m in messages %}{{ m.content }} {% endfor %}{{ 'two' if thinking is false else three }}"
    chat += "{% if n is defined and text is defined %}{% endif %}"
    variables = parse_variables(["thinking=False", "three= add", "n=3", "text=a=b"])
    assert variables == {"thinking": False, "three": " add", "n": 3, "text": "a=b"}
    assert PromptTemplate(tokenizer(chat), True, variables)("add") == ids("add", "two")
    with pytest.raises(
        ConfigError, match="--chat-template-kwargs: 'thinking' must be NAME=VALUE, such as enable_thinking=false"
    ):
        parse_variables(["thinking"])


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"enable_thinkin": False}, r"--chat-template-kwargs enable_thinkin: the chat template of .* does not mention"),
        (
            {"add_generation_prompt": False},
            "--chat-template-kwargs add_generation_prompt: every call passes this variable",
        ),
    ],
)
def test_a_variable_that_has_no_effect_is_refused(variables, says):
    with pytest.raises(ConfigError, match=says):
        PromptTemplate(tokenizer(CHAT + "{{ enable_thinking }}"), True, variables)
    with pytest.raises(ConfigError, match=r"--chat-template-kwargs: the tokenizer of .* has no chat template"):
        PromptTemplate(tokenizer(), variables=variables)


def test_variables_of_the_template_as_an_option(toy_run):
    with pytest.raises(
        ConfigError, match=r"--chat-template-kwargs a: the chat template of .* does not mention this variable"
    ):
        toy_run(apply_chat_template=True, chat_template_kwargs="a=1,b=x")
    with pytest.raises(ConfigError, match="'a' must be NAME=VALUE"):
        toy_run(apply_chat_template=True, chat_template_kwargs="a")
    with pytest.raises(ConfigError, match=r"it needs data\.apply_chat_template or "):
        toy_run(chat_template_kwargs="a=1")
