"""What the chat templates of model families do with earlier answers: short templates with the property of each family."""

from __future__ import annotations

import re

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from miles_core.chat.renderer import CannotExtend, Renderer

HEAD = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}"
    "{%- endif -%}{%- endfor -%}"
)
LOOP = HEAD + "{%- for m in messages -%}{%- set after = loop.index0 > ns.last -%}"
ROLE = "<|im_start|>{{ m.role + '\n' }}"
CALLS = (
    '{%- for c in m.tool_calls or [] -%}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</tool_call>{%- endfor -%}"
)
END = "<|im_end|>\n{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
SPLIT = (
    "{%- set r = m.reasoning_content or (m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '') -%}"
    "{%- set t = m.content.split('</think>')[-1].lstrip('\n') -%}"
)
#: Qwen3: an empty reasoning block is written before the last answer only; reasoning before the last user message is removed.
QWEN3 = (
    LOOP + ROLE + SPLIT + "{%- if m.role == 'assistant' and after and (loop.last or r) -%}<think>\n{{ r }}\n</think>\n\n{% endif -%}"
    "{{ t }}" + CALLS + END
)  # fmt: skip
#: The same with reasoning switched off: the generation prompt writes an empty block, which the history of a tool's result lacks.
QWEN3_OFF = QWEN3.removesuffix("{% endif -%}") + "<think>\n\n</think>\n\n{% endif -%}"
#: GLM-4.5: every answer has a block, which is empty for earlier answers; the next role's token ends an answer.
GLM = (
    LOOP + "<|{{ {'tool': 'observation'}.get(m.role, m.role) }}|>" + SPLIT + "{%- if m.role == 'assistant' -%}"
    "{{ '\n<think>' + (r if after else '') + '</think>' }}{%- endif -%}{{ '\n' + t }}" + CALLS + "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)  # fmt: skip
#: gpt-oss: channels; reasoning is a field, and is shown until the final answer.
GPT_OSS = (
    LOOP
    + "{%- if m.role == 'assistant' -%}{%- if m.tool_calls -%}{%- if m.content and m.thinking -%}{{ raise_exception('both') }}{%- endif -%}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking or m.content }}<|end|>"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>{}<|call|>{%- else -%}"
    "{%- if m.thinking and after -%}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{%- endif -%}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{%- endif -%}{%- else -%}<|start|>{{ 'functions.' + m.name if m.role == 'tool' else m.role }}<|message|>{{ m.content }}<|end|>{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)
#: Llama 3.1: an answer with a call shows the call alone.
LLAMA = (
    LOOP + "<|im_start|>{{ m.role }}\n{% if m.tool_calls -%}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{%- else -%}{{ m.content }}{%- endif -%}" + END
)
#: DeepSeek-V3: arguments are text; reasoning is never shown in a final answer.
DEEPSEEK = (
    LOOP + "<|{{ m.role }}|>{%- if m.tool_calls -%}{{ m.content + '<|call|>' + m.tool_calls[0].function.name + m.tool_calls[0].function.arguments }}"
    "{%- else -%}{{ m.content.split('</think>')[-1] }}{%- endif -%}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|><think>\n{% endif -%}"
)  # fmt: skip
#: Phi-3: the end of the text is written after the last answer, and nowhere else.
PHI = LOOP + ROLE + "{{ m.content }}" + END + "{%- if not add_generation_prompt -%}<|return|>{%- endif -%}"
#: Gemma 4: a tool's result comes before the content of the answer that called it.
GEMMA = (
    LOOP
    + "{%- if m.role != 'tool' -%}<|im_start|>{{ m.role }}\n{% if m.tool_calls -%}<tool_call>{{ m.tool_calls[0].function.name }}</tool_call>"
    "<|observation|>{%- if not loop.last -%}{{ messages[loop.index].content }}<|return|>{{ m.content }}{%- endif -%}"
    "{%- else -%}{{ m.content }}<|im_end|>\n{% endif -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt and messages[-1].role != 'tool' -%}<|im_start|>assistant\n{% endif -%}"
)
#: The role of tools is ignored.
SILENT = LOOP + "{%- if m.role != 'tool' -%}" + ROLE + "{{ m.content }}<|im_end|>\n{% endif -%}{%- endfor -%}"


def renderer(template: str) -> Renderer:
    special = sorted(
        set(re.findall(r"<\|[a-z_]+\|>|</?think>", template)) | {"<|im_start|>", "<|im_end|>", "<|observation|>"}
    )
    vocabulary = {symbol: i for i, symbol in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *special])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        additional_special_tokens=[s for s in special if s != "<|im_end|>"],
    )
    tokenizer.chat_template = template
    return Renderer(tokenizer)


QUESTION = {"role": "user", "content": "sum"}
TOOL = {"role": "tool", "content": "4", "name": "add", "tool_call_id": "call00000"}
THOUGHT = '<think>\nhm\n</think>\n\nabc<tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>'
CHANNELS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.add<|channel|>commentary json<|message|>{}<|call|>"
NEXT = "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "user", "tool"),
    [
        (QWEN3, "drops reasoning", "appends"),
        (QWEN3_OFF, "drops reasoning", "appends"),
        (GLM, "drops reasoning", "appends"),
        (GPT_OSS, "drops reasoning", "appends"),
        (LLAMA, "appends", "drops reasoning"),
        (DEEPSEEK, "drops reasoning", "appends"),
        (PHI, "appends", "rewrites"),
        (GEMMA, "appends", "appends"),
        (SILENT, "appends", "refuses"),
    ],
    ids=["qwen3", "qwen3 off", "glm", "gpt-oss", "llama", "deepseek", "phi", "gemma", "silent"],
)  # fmt: skip
def test_what_a_message_does_to_the_answer_before_it(template, user, tool):
    render = renderer(template)
    assert (render.examine("user"), render.examine("tool")) == (user, tool)


@pytest.mark.parametrize(
    ("template", "answer", "following"),
    [
        (QWEN3, THOUGHT, NEXT),
        (QWEN3_OFF, THOUGHT.partition("\n\n")[2], NEXT + "<think>\n\n</think>\n\n"),
        (GLM, "\n<think>hm</think>\nabc<tool_call>{}</tool_call><|observation|>", "\n4<|assistant|>"),
        (GPT_OSS, CHANNELS, "<|start|>functions.add<|message|>4<|end|><|start|>assistant"),
        (LLAMA, '{"name": "add", "parameters": {}}<|im_end|>', NEXT),
        (DEEPSEEK, "abc<|call|>add{}<|im_end|>", "<|tool|>4<|im_end|><|assistant|><think>\n"),
        (GEMMA, "<tool_call>add</tool_call><|observation|>", "4<|return|>"),
    ],
    ids=["qwen3", "qwen3 off", "glm", "gpt-oss", "llama", "deepseek", "gemma"],
)
def test_a_tools_result_continues_the_tokens(template, answer, following):
    """The answer's tokens stay, and the template's text after them follows once."""
    render = renderer(template)
    tokens = [*render.render([QUESTION]), *render.tokenizer.encode(answer, add_special_tokens=False)]
    extended = render.extend(tokens, [TOOL])
    assert extended[: len(tokens)] == tokens
    assert render.tokenizer.decode(extended[len(tokens) :]) == following


@pytest.mark.parametrize(
    ("template", "thought", "plain"),
    [
        (QWEN3, "<think>\nhm\n</think>\n\nabc<|im_end|>", "abc<|im_end|>"),
        (QWEN3_OFF, "<think>\nhm\n</think>\n\nabc<|im_end|>", "abc<|im_end|>"),
        (GLM, "\n<think>hm</think>\nabc", "\n<think></think>\nabc"),
        (
            GPT_OSS,
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>abc<|return|>",
            "<|channel|>final<|message|>abc<|end|>",
        ),
    ],
    ids=["qwen3", "qwen3 off", "glm", "gpt-oss"],
)
def test_a_user_message_continues_answers_without_reasoning_only(template, thought, plain):
    render = renderer(template)
    start = render.render([QUESTION])
    tokens = [*start, *render.tokenizer.encode(plain, add_special_tokens=False)]
    assert render.extend(tokens, [QUESTION])[: len(tokens)] == tokens
    with pytest.raises(CannotExtend) as caught:
        render.extend([*start, *render.tokenizer.encode(thought, add_special_tokens=False)], [QUESTION])
    assert caught.value.reason == "reasoning"
