"""From a prompt to token ids, once: nothing is tokenised again afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.data.renderer import Renderer
from miles_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptTemplate:
    """``template(prompt) -> token ids``.

    With the chat template, a text becomes one user message and the special tokens are those the template writes.
    Without it, a text gets the special tokens the tokenizer adds by itself, except an end-of-sequence token after the
    text, which a prompt to be continued must not have.

    Attributes:
        renderer: the chat template, for rollout functions too; None where the tokenizer has none.

    Args:
        tokenizer: of the model that is trained.
        apply_chat_template: ``--apply-chat-template``.

    Raises:
        ConfigError: the chat template is asked for and the tokenizer has none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, apply_chat_template: bool = False) -> None:
        self.tokenizer, self.apply_chat_template = tokenizer, apply_chat_template
        if apply_chat_template and not tokenizer.chat_template:
            name = tokenizer.name_or_path or "this model"
            raise ConfigError(
                f"--apply-chat-template: the tokenizer of {name} has no chat template; leave the flag out (prompts are "
                "then taken as they are), or add chat_template.jinja to the checkpoint"
            )
        self.renderer = Renderer(tokenizer) if tokenizer.chat_template else None

    def __call__(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """Token ids of ``prompt``, never empty.

        Raises:
            DataError: a chat without the chat template, messages the template refuses, or no token at all.
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
