"""An engine whose answers a test writes, and a model with a template for tools."""

import shutil

import pytest

from miles_core.engine import Response
from miles_embedded.engine.engine import EmbeddedEngine
from miles_testing import toy_files

#: Hermes: schemas in a system message, calls between tags, results in a user message like Qwen's template.
TEMPLATE = (
    "{%- if tools -%}<|start|>system\n{{ tools | tojson }}<|end|>\n{% endif -%}"
    "{%- for m in messages -%}<|start|>{{ ('user' if m.role == 'tool' else m.role) + '\n' }}"
    "{%- if m.role == 'tool' -%}<tool_response>{{ m.content }}</tool_response>{%- else -%}{{ m.content }}{%- endif -%}"
    '{%- for c in m.tool_calls or [] -%}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{%- endfor -%}<|end|>\n{% endfor -%}{%- if add_generation_prompt -%}<|start|>assistant\n{% endif -%}"
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The toy model with a longer context and a template that supports tools."""
    directory = tmp_path_factory.mktemp("with-tools") / "model"
    shutil.copytree(toy_files(max_position_embeddings=2048) / "model", directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture
def scripted(monkeypatch):
    """``scripted(function)``: the engine answers ``function(text of the prompt)``; it ends with "…" where the answer is cut off."""

    def use(answer):
        from miles_tools.demo.model import make_tokenizer

        tokenizer = make_tokenizer()

        async def generate(self, request):
            text = answer(tokenizer.decode(request.tokens))
            tokens = tokenizer.encode(text.removesuffix("…"), add_special_tokens=False)
            cut = text.endswith("…") or len(tokens) >= request.sampling.max_new_tokens
            tokens = tokens[: request.sampling.max_new_tokens] + ([] if cut else [tokenizer.eos_token_id])
            finish = "length" if cut else "stop"
            return Response(tokens, [-1.0] * len(tokens), finish, text, [(0, self.version)])

        monkeypatch.setattr(EmbeddedEngine, "generate", generate)

    return use
