"""Converts a prompt to token ids. This happens once per prompt; nothing is re-tokenised later."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from miles_core.data.renderer import Renderer
from miles_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptTemplate:
    """``template(prompt) -> token ids``.

    With the chat template, a text becomes one user message, and the template writes the special tokens. Without it, the tokenizer
    adds its default special tokens, except a final end-of-sequence token, because the model must continue the prompt.

    Attributes:
        renderer: the chat template, also used by rollout functions; None if the tokenizer has none.

    Args:
        tokenizer: tokenizer of the trained model.
        apply_chat_template: ``--apply-chat-template``.
        variables: variables for the chat template.

    Raises:
        ConfigError: ``apply_chat_template`` is set but the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        apply_chat_template: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.apply_chat_template = tokenizer, apply_chat_template
        if apply_chat_template and not tokenizer.chat_template:
            name = tokenizer.name_or_path or "this model"
            raise ConfigError(
                f"--apply-chat-template: the tokenizer of {name} has no chat template; leave the flag out (prompts are "
                "then taken as they are), or add chat_template.jinja to the checkpoint"
            )
        self.renderer = Renderer(tokenizer, variables) if tokenizer.chat_template else None

    def __call__(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """Convert ``prompt`` to token ids; the result is never empty.

        Raises:
            DataError: chat messages without a chat template, messages that the template rejects, or an empty result.
        """
        if self.apply_chat_template:
            assert self.renderer is not None  # checked
            return self.renderer.render([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        if not isinstance(prompt, str):
            raise DataError(
                f"the prompt {prompt!r:.80} is a list of chat messages; give --apply-chat-template to render it"
            )
        tokens = self._plain(prompt)
        if not tokens:
            raise DataError(f"the prompt {prompt!r:.80} has no token; remove it from the data")
        return tokens

    def _plain(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text)
        end = self.tokenizer.eos_token_id
        if end is not None and tokens and tokens[-1] == end and not text.endswith(self.tokenizer.eos_token):
            return tokens[:-1]
        return tokens


def parse_variables(items: Iterable[str]) -> dict[str, Any]:
    """Parse the values of ``--chat-template-kwargs``: ``NAME=VALUE``, where VALUE is JSON (also True and False) or else text.

    Raises:
        ConfigError: an item has no name or no value.
    """
    variables: dict[str, Any] = {}
    for item in items:
        name, separator, text = item.partition("=")
        if not separator or not name.strip().isidentifier():
            raise ConfigError(f"--chat-template-kwargs: {item!r} must be NAME=VALUE, such as enable_thinking=false")
        try:
            variables[name.strip()] = json.loads({"True": "true", "False": "false"}.get(text, text))
        except json.JSONDecodeError:
            variables[name.strip()] = text
    return variables
