"""Marks that models and chat templates of known families write: around reasoning, and where a conversation begins."""

from __future__ import annotations

import re

#: Texts with which the chat templates of known families begin a conversation.
OPENINGS = (
    "<|im_start|>", "<|im_user|>", "<|begin_of_text|>", "<|start_header_id|>", "<|startoftext|>", "<|user|>", "<|system|>", "<|start|>",
    "<start_of_turn>", "<bos><start_of_turn>", "[INST]", "<s>[INST]", "[SYSTEM_PROMPT]", "<s>[SYSTEM_PROMPT]", "[gMASK]",
    "<\uff5cUser\uff5c>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
#: Marks around reasoning: of model families, of common prompts, and gpt-oss's text without its special tokens.
_NAMES = "(?:seed:)?think|thinking|thought|reasoning"
_BEGIN = re.compile(rf"\s*(?:<(?:{_NAMES})>|\[THINK\])")
_END = re.compile(rf"</(?:{_NAMES})>|\[/THINK\]|(?<=\S)assistantfinal")


def strip_reasoning(text: str) -> str:
    """Return what an answer says after its reasoning: all of it if it has none, nothing if its reasoning does not end.

    For rewards: it knows more marks than ``split_reasoning``, which reads the format of chat templates.
    """
    # every end contains one of these, and this search takes a small part of the time of ``_END``; that for one character is the fastest
    if ("<" in text and "</" in text) or ("[" in text and "[/THINK]" in text) or "assistantfinal" in text:
        ends = [mark.end() for mark in _END.finditer(text)]
        if ends:
            return text[ends[-1] :]
    return "" if _BEGIN.match(text) else text
