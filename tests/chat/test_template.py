"""What chat templates do with tools is examined before the run."""

import pytest

from miles_core.chat import find_dialect
from miles_core.data import Renderer
from miles_core.plugin import ConfigError
from miles_tools.demo.model import make_tokenizer

START = "{%- if tools -%}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif -%}"
LOOP = "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}CALLS<|im_end|>\n{% endfor -%}"
END = "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
HERMES = (
    "{%- for c in m.tool_calls or [] -%}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{%- endfor -%}'
)
GLM = (
    "{%- for c in m.tool_calls or [] -%}<tool_call>{{ c.function.name }}\n{%- for k, v in c.function.arguments.items() -%}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{%- endfor -%}</tool_call>{%- endfor -%}"
)
#: The arguments are joined to a text, so they must be one.
MISTRAL = '{%- for c in m.tool_calls or [] -%}{{ "[TOOL_CALLS]" + c.function.name + "[ARGS]" + c.function.arguments }}{%- endfor -%}'
OTHER = "{%- for c in m.tool_calls or [] -%}!!{{ c.function.name }}{%- endfor -%}"


def renderer(calls, start=START, loop=LOOP):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (start + loop + END).replace("CALLS", calls)
    return Renderer(tokenizer)


@pytest.mark.parametrize(
    ("calls", "name", "as_text"), [(HERMES, "hermes", False), (GLM, "glm", False), (MISTRAL, "mistral", True)]
)
def test_the_format_is_detected(calls, name, as_text):
    dialect = find_dialect(renderer(calls), "auto", "template")
    assert (dialect.name, dialect.as_text) == (name, as_text)
    assert find_dialect(renderer(calls), name, "template") == dialect


@pytest.mark.parametrize(
    ("render", "name", "message"),
    [
        (renderer(HERMES, start=""), "auto", "ignores tools: their schemas do not appear in the prompt; add a chat_template.jinja"),
        (renderer(""), "auto", "does not write the calls of an answer; add a chat_template.jinja"),
        (renderer(HERMES), "glm", "the tool-call format glm: a call that the chat template of .* is not read back in this format"),
        (renderer(OTHER), "auto", "the tool-call format auto: a call .*it writes '!!qzj_tool.*the formats are: hermes"),
        (
            renderer(HERMES, loop=LOOP.replace("{{ m.content }}", "{%- if m.role != 'tool' -%}{{ m.content }}{%- endif -%}")),
            "auto",
            "does not show the results of tools",
        ),
        (renderer(HERMES, start="{%- if tools -%}{{ raise_exception('no tools here') }}{%- endif -%}"), "auto", "refuses tools .*no tools here"),
    ],
    ids=["schemas", "calls", "other format", "unknown format", "results", "raises"],
)  # fmt: skip
def test_templates_that_are_refused(render, name, message):
    with pytest.raises(ConfigError, match=message):
        find_dialect(render, name, "template")
    assert find_dialect(render, "auto", "text").name == "hermes"  # text needs no support
