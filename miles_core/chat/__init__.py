"""Shared code of plugins for conversations: parsers of reasoning and tool calls, one per model family, and detection of the format from a
chat template; rows of recorded fields (``rows``); tokenizing of long texts (``tokenizing``); users' files and calls that may block
(``user_code``).

The tokens of an answer are never changed; ``Dialect.read`` reads their text.
"""

from typing import TYPE_CHECKING

from miles_core.lookup import make_lazy_exports

if TYPE_CHECKING:
    from miles_core.chat.call import Answer, Call, Malformed, split_reasoning
    from miles_core.chat.marks import strip_reasoning
    from miles_core.chat.media_parts import attach_media, take_media
    from miles_core.chat.template import Dialect, find_dialect
    from miles_core.rollout.rows import drop_earlier_rows
    from miles_core.rollout.tokenizing import tokenize
    from miles_core.rollout.user_code import call_in_thread, import_code

__all__ = [
    "Answer", "Call", "Dialect", "Malformed", "attach_media", "call_in_thread", "drop_earlier_rows", "find_dialect", "import_code",
    "split_reasoning", "strip_reasoning", "take_media", "tokenize",
]  # fmt: skip

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "miles_core.chat.call": "Answer Call Malformed split_reasoning",
        "miles_core.chat.marks": "strip_reasoning",
        "miles_core.chat.media_parts": "attach_media take_media",
        "miles_core.rollout.rows": "drop_earlier_rows",
        "miles_core.chat.template": "Dialect find_dialect",
        "miles_core.rollout.tokenizing": "tokenize",
        "miles_core.rollout.user_code": "call_in_thread import_code",
    },
)
