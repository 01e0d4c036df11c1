"""What plugins for conversations share: how models write reasoning and tool calls, with one parser per family and detection of the format from a
chat template; rows of recorded fields (``rows``); tokenizing of long texts (``tokenizing``); users' files and calls that may block
(``user_code``).

The tokens of an answer are never changed; ``Dialect.read`` reads their text.
"""

from typing import TYPE_CHECKING

from miles_core.lookup import make_lazy_exports

if TYPE_CHECKING:
    from miles_chat.call import Answer, Call, Malformed, split_reasoning
    from miles_chat.formats import FORMATS, Format
    from miles_chat.rows import drop_earlier_rows
    from miles_chat.template import Dialect, find_dialect
    from miles_chat.tokenizing import tokenize
    from miles_chat.user_code import call_in_thread, import_code

__all__ = [
    "FORMATS", "Answer", "Call", "Dialect", "Format", "Malformed", "call_in_thread", "drop_earlier_rows", "find_dialect", "import_code",
    "split_reasoning", "tokenize",
]  # fmt: skip

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "miles_chat.call": "Answer Call Malformed split_reasoning",
        "miles_chat.formats": "FORMATS Format",
        "miles_chat.rows": "drop_earlier_rows",
        "miles_chat.template": "Dialect find_dialect",
        "miles_chat.tokenizing": "tokenize",
        "miles_chat.user_code": "call_in_thread import_code",
    },
)
