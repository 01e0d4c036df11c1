"""Converts chat messages to token ids, and continues token ids with further messages.

``extend`` never re-tokenizes text that a model generated: it keeps the tokens and appends the text that the chat template writes
between the end of an assistant turn and the next generation. It determines this text by rendering a placeholder conversation with
and without the new messages, so it does not depend on the model's output.

A template may also change earlier text when messages are appended: several families remove the reasoning of earlier turns when a
user message follows. Then no continuation of the tokens equals the rendered conversation. In this case ``extend`` raises
``CannotExtend``, and the whole conversation must be rendered, as a new branch. ``examine`` determines from the template which
roles cause this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from miles_core.chat.marks import OPENINGS
from miles_core.chat.media_parts import take_media
from miles_core.errors import ConfigError, DataError
from miles_core.text import valid_data, valid_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
#: Effect of appending a message of a role on earlier text: none; removal of reasoning; other changes; or the template raises an
#: error.
Effect = Literal["appends", "drops reasoning", "rewrites", "refuses"]

#: Placeholders in conversations that are rendered to examine the template.
_ANSWER, _REASONING, _NEW = "qzjAnswerqzj", "qzjReasonqzj", "qzjNewqzj"
_QUESTION = {"role": "user", "content": "question"}
#: Delimiters of the placeholder for a special token written in a message: private-use characters, which no template treats specially.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
#: Arguments of ``apply_chat_template`` that ``Renderer`` passes itself.
_PASSED = ("messages", "conversation", "tools", "tokenize", "add_generation_prompt", "continue_final_message")


class CannotExtend(DataError):
    """Raised if messages cannot be appended to tokens; render the whole conversation instead, as a new branch.

    Attributes:
        reason: ``reasoning``, ``rewrites`` or ``stop token``, for statistics.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Renderer:
    """The chat template of a tokenizer.

    Special tokens written in a message are encoded as ordinary text, so that a tool's output cannot end a turn.

    Args:
        tokenizer: the model's tokenizer.
        variables: variables for the chat template (``--chat-template-kwargs``), such as ``enable_thinking``.

    Raises:
        ConfigError: the tokenizer has no chat template, or it does not mention a variable.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            name = tokenizer.name_or_path or "this model"
            raise ConfigError(
                f"the tokenizer of {name} has no chat template; add chat_template.jinja to the checkpoint, or use no chat messages"
            )
        self.tokenizer, self.variables = tokenizer, dict(variables or {})
        self._check_variables()
        #: ``f(text, media=media)``: the text with the placeholders of media expanded; None refuses messages with media.
        self.expand: Callable[..., str] | None = None
        self._special = sorted(map(str, tokenizer.all_special_tokens), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._special)) or "(?!)")
        self._effects: dict[str, Effect] = {}

    def _check_variables(self) -> None:
        """Raise ConfigError for a variable that the template does not mention, or that every call passes."""
        template = str(self.tokenizer.chat_template)
        for name in self.variables:
            if name in _PASSED:
                raise ConfigError(
                    f"--chat-template-kwargs {name}: every call passes this variable already; leave it out"
                )
            if not re.search(rf"\b{re.escape(name)}\b", template):
                of = self.tokenizer.name_or_path or "this model"
                raise ConfigError(
                    f"--chat-template-kwargs {name}: the chat template of {of} does not mention this variable, so it would have no effect; "
                    "correct its name, or leave it out"
                )

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        generate: bool = True,
        resume: bool = False,
    ) -> str:
        """Render ``messages`` to text; with ``generate``, including the generation prompt; with ``resume``, without the end of the last
        message.

        Raises:
            DataError: the template rejects the messages.
        """
        try:
            rendered = self.tokenizer.apply_chat_template(
                valid_data(messages),
                tools=valid_data(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=generate,
                continue_final_message=resume,
                **self.variables,
            )
        except MemoryError:
            raise
        except Exception as error:  # a template evaluates expressions of the messages, which raise errors of any type
            raise DataError(f"the chat template refuses the prompt {messages!r:.200}: {error}") from error
        return valid_text(str(rendered))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        expand: Callable[[str], str] | None = None,
    ) -> list[int]:
        """Render a conversation to token ids, including the generation prompt. If the last message is an assistant's, the tokens end
        within it, and the model continues it. Media in content parts (``media_parts``) are expanded by ``self.expand``. ``expand`` replaces
        it, for messages without media; it changes the rendered text, in which special tokens written in messages do not occur.

        Raises:
            DataError: the template rejects the conversation or leaves out media, the last message is an assistant's without text or with
                tool calls, or the result has no token.
        """
        messages, expand = self._take_media(messages, expand)
        literals: list[str] = []
        clean, resume = (
            self._without_control(messages, literals),
            bool(messages) and messages[-1].get("role") == "assistant",
        )
        if resume and (messages[-1].get("tool_calls") or is_blank(messages[-1].get("content"))):
            raise DataError(
                f"the prompt {messages!r:.80} ends with an assistant message that has tool calls or no text, which a model cannot "
                "continue; remove the message"
            )
        text = self.text(clean, tools, not resume, resume)
        tokens = self._encode(text if expand is None else expand(text), literals)
        if not tokens:
            raise DataError(f"the prompt {messages!r:.80} has no token; remove it from the data")
        return tokens

    def answer(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> tuple[list[int], list[int]]:
        """Render a conversation that ends with an assistant message: the tokens of the generation prompt before it, and of the message.

        Raises:
            DataError: the template rejects the conversation, or does not write the message after the generation prompt.
        """
        messages, _ = self._take_media(messages, None)
        before, within = list[str](), list[str]()
        clean = self._without_control(messages[:-1], before)
        head = self.text(clean, tools)
        whole = self.text([*clean, *self._without_control(messages[-1:], within)], tools, generate=False)
        if not whole.startswith(head):
            raise DataError(f"the chat template does not write {messages[-1]!r:.60} after its generation prompt")
        return self._encode(head, before), self._encode(whole[len(head) :], within, inside=True)

    def extend(
        self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> list[int]:
        """Append ``messages`` and a generation prompt to ``tokens``, which end with the model's answer.

        Args:
            tokens: prompt and answer as returned by the engine, with or without the end-of-turn token.
            messages: the messages to append, without assistant messages. If a template needs the names of called functions, they
                come from ``name`` and ``tool_call_id`` of tool messages.
            tools: the same tool schemas as at the beginning of the conversation.

        Returns:
            token ids that start with ``tokens``.

        Raises:
            CannotExtend: the template changes earlier text when these messages follow, or the answer ended with another token
                than the template's.
            DataError: the template rejects the messages or leaves out media, or ``messages`` is empty.
        """
        roles = [str(message.get("role")) for message in messages]
        if not messages or "assistant" in roles:
            raise DataError(f"extend takes at least one message and no assistant messages, got the roles {roles}")
        dropping = next((role for role in roles if self.examine(role) == "drops reasoning"), None)
        if dropping and self._has_reasoning(tokens):
            raise CannotExtend(
                "the chat template removes the reasoning of earlier answers when a message of the role "
                f"{dropping} follows; render the whole conversation",
                "reasoning",
            )
        messages, expand = self._take_media(messages, None)
        literals: list[str] = []
        tail = self._tail(self._without_control(messages, literals), tools)
        following = self._encode(tail if expand is None else expand(tail), literals, inside=True)
        if tokens[-1] == following[0]:
            return [*tokens, *following[1:]]
        if tokens[-1] in self.tokenizer.all_special_ids:
            last, wanted = (self.tokenizer.convert_ids_to_tokens(int(t)) for t in (tokens[-1], following[0]))
            raise CannotExtend(
                f"the answer ends with {last!r}, and the chat template continues with {wanted!r} before a message of the role "
                f"{roles[0]}; render the whole conversation",
                "stop token",
            )
        return [*tokens, *following]

    def _take_media(
        self, messages: Sequence[Message], expand: Callable[[str], str] | None
    ) -> tuple[Sequence[Message], Callable[[str], str] | None]:
        """Return the messages with bare parts for their media, and what expands the rendered text."""
        messages, media = take_media(messages)
        if media and self.expand is None:
            raise DataError(
                "the messages have images, but this run passes only text to the model; --media passes images"
            )
        if expand is None and self.expand is not None:
            expand = partial(self.expand, media=media)
        return messages, expand

    def examine(self, role: str) -> Effect:
        """Determine how appending a message of ``role`` after an answer affects what the model wrote in this answer.

        Text that only the template writes may differ, such as an empty reasoning block of the generation prompt.
        """
        return self._effects.get(role) or self._effects.setdefault(role, self._determine_effect(role))

    def _determine_effect(self, role: str) -> Effect:
        new = [_probe(role)]
        try:
            tail, history = self._tail(new, None), self._history(new, _FIELDS if self._reasoning_mark else _INLINE)
        except CannotExtend:
            return "rewrites"
        except DataError:
            return "refuses"
        return "refuses" if _NEW not in tail else "appends" if _REASONING in history else "drops reasoning"

    def find_rendered(self, text: str) -> str:
        """Return the mark of this or another chat template with which ``text`` begins, so that it was rendered before; "" if it has none."""
        return next((mark for mark in (*self._openings, *OPENINGS) if text.lstrip().startswith(mark)), "")

    @cached_property
    def _openings(self) -> list[str]:
        """Texts with which a rendered conversation begins: special tokens that the template writes, and its text before a question."""
        with suppress(DataError):
            text = self.text([{"role": "user", "content": _NEW}])
            head = text.partition(_NEW)[0]
            marks = [*self._pattern.findall(text), head.strip(), self._pattern.sub("", head).strip()]
            return [mark for mark in dict.fromkeys(marks) if mark]
        return []

    @cached_property
    def _reasoning_mark(self) -> str:
        """The text that opens the reasoning in a message; "" if the template takes reasoning as a part of the content only."""
        for following in ([], [_probe("tool")]):
            with suppress(DataError):
                before, shown, _ = self._history(following, _FIELDS, whole=False).partition(_REASONING)
                if shown:
                    return before[len(os.path.commonprefix([before, self.text([_QUESTION])])) :].strip() or "<think>"  # noqa: RUF071
        return ""

    def _has_reasoning(self, tokens: Sequence[int]) -> bool:
        """Return whether ``tokens`` hold reasoning, complete or cut off before its end."""
        marks = (self._reasoning_mark or "<think>", "</think>")
        ids = [self.tokenizer.encode(mark, add_special_tokens=False) for mark in marks]
        if all(len(one) == 1 and one[0] not in tokens for one in ids):
            return False
        text = re.sub(r"<think>\s*</think>", "", str(self.tokenizer.decode(list(tokens))))
        return any(mark in text for mark in marks)

    @cached_property
    def _closing(self) -> str:
        """The text that the template writes after an answer."""
        return self._history([], {"content": _ANSWER}, whole=False).partition(_ANSWER)[2]

    def _closing_in(self, text: str) -> str:
        """Return the part of ``text`` that closes an answer. ``text`` holds the answer's calls and its end; a call may also end with a
        special token."""
        if text.endswith(self._closing):
            return self._closing
        return text[max((text.rfind(special) for special in self._special if special in text), default=len(text)) :]

    def _tail(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        """Return the text that the template writes after an answer with its calls: the end, and ``messages`` up to the next answer."""
        calls = any(message.get("role") == "tool" for message in messages)
        for content in (_ANSWER, "")[: 1 + calls]:  # some templates omit or move the content of an answer with calls
            base, whole = (self._history(messages, {"content": content}, tools, all_) for all_ in (False, True))
            if content and content in base and content in whole:
                base, whole = (text.partition(content)[2] for text in (base, whole))
                if not calls:
                    return whole
            if calls and whole.startswith(base) and _ANSWER not in whole[len(base) :]:
                return self._closing_in(base) + whole[len(base) :]
        roles = ", ".join(dict.fromkeys(str(message.get("role")) for message in messages))
        raise CannotExtend(
            f"the chat template changes earlier text when a message of the role {roles} follows; render the whole conversation",
            "rewrites",
        )

    def _history(self, new: Sequence[Message], answer: Message, tools: Any = None, whole: bool = True) -> str:
        """Render a question, ``answer`` with the calls to which the tool messages in ``new`` respond, and if ``whole``, ``new``."""
        following = new if whole else ()
        with suppress(DataError):
            return self.text([_QUESTION, _assistant(answer, new, {}), *following], tools, whole)
        return self.text([_QUESTION, _assistant(answer, new, "{}"), *following], tools, whole)  # arguments as text

    def _without_control(self, messages: Sequence[Message], literals: list[str]) -> list[Message]:
        """Replace special tokens in the texts of ``messages`` with placeholders; append the originals to ``literals``."""

        def placeholder(found: re.Match[str]) -> str:
            literals.append(found[0])
            return f"{_OPEN}{len(literals) - 1}{_CLOSE}"

        def clean(value: Any) -> Any:
            if isinstance(value, str):
                return self._pattern.sub(placeholder, value)
            if isinstance(value, Mapping):
                return {key: clean(item) for key, item in value.items()}
            return [clean(item) for item in value] if isinstance(value, (list, tuple)) else value

        return [
            {key: value if key == "role" else clean(value) for key, value in message.items()} for message in messages
        ]

    def _encode(self, text: str, literals: Sequence[str], inside: bool = False) -> list[int]:
        """Encode rendered text to token ids, with placeholders encoded as the ordinary text of their originals. ``inside``: the text
        follows other text."""
        tokens: list[int] = []
        rest = text
        for number, literal in enumerate(literals):
            head, found, rest = rest.partition(f"{_OPEN}{number}{_CLOSE}")
            tokens += self._encode_part(head, inside)
            if not found:
                raise DataError(
                    f"the chat template leaves out or moves {literal!r}, which is written in a message; remove it there"
                )
            after_special = any(head.endswith(special) for special in self._special)
            inside = self._bare_after_special if after_special else inside or bool(head)
            tokens += self._encode_part(literal, inside, split_special_tokens=True)
            inside = True
        return tokens + self._encode_part(rest, inside)

    def _encode_part(self, text: str, inside: bool, **options: Any) -> list[int]:
        """Encode a part of a text. SentencePiece tokenizers write a space before the first word; ``inside`` leaves it out."""
        if not text or not (inside and self._adds_space):
            return list(self.tokenizer.encode(text, add_special_tokens=False, **options)) if text else []
        before = self.tokenizer.encode("\n", add_special_tokens=False)
        return list(self.tokenizer.encode("\n" + text, add_special_tokens=False, **options)[len(before) :])

    @cached_property
    def _adds_space(self) -> bool:
        """Whether the tokenizer encodes a text differently at the start and after a line break."""
        start, before, inner = (self.tokenizer.encode(text, add_special_tokens=False) for text in ("a", "\n", "\na"))
        return bool(inner != [*before, *start] and inner[: len(before)] == before)

    @cached_property
    def _bare_after_special(self) -> bool:
        """Whether the tokenizer writes no space after a special token."""
        special = self._special[0] if self._special else ""
        text = self.tokenizer.encode(special + "a", add_special_tokens=False)
        return bool(text[1:] != self.tokenizer.encode("a", add_special_tokens=False))


#: An answer with reasoning: in the message fields that different templates read, and inside the content.
_FIELDS = {"content": "", "reasoning_content": _REASONING, "thinking": _REASONING}
_INLINE = {"content": f"<think>\n{_REASONING}\n</think>\n\n{_ANSWER}"}


def is_blank(content: Any) -> bool:
    """Return whether the content of a message, a text or typed parts, has no text."""
    if isinstance(content, str):
        return not content.strip()
    return not any(str(part.get("text") or "").strip() for part in content or () if isinstance(part, Mapping))


def _assistant(answer: Message, following: Sequence[Message], arguments: Any) -> Message:
    """Make an assistant message with the content of ``answer``, and the calls to which the tool messages in ``following`` respond."""
    calls = [
        {
            "id": str(message.get("tool_call_id", "call00000")),
            "type": "function",
            "function": {"name": str(message.get("name", "function")), "arguments": arguments},
        }
        for message in following
        if message.get("role") == "tool"
    ]
    return {"role": "assistant", **answer} | ({"tool_calls": calls} if calls else {})


def _probe(role: str) -> Message:
    named = {"name": "function", "tool_call_id": "call00000"} if role == "tool" else {}
    return {"role": role, "content": _NEW, **named}
