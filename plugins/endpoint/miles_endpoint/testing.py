"""A session with a scripted engine, for tests and benchmarks. Its tokens are never those that a tokenizer would make of the text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from miles_core.data import Renderer, Sample
from miles_core.engine import Response, Sampling
from miles_core.plugin import GenerationClient
from miles_endpoint.answer import AnswerReader
from miles_endpoint.server import Server
from miles_endpoint.service import Models
from miles_endpoint.session import Limits, Session

SPECIAL = [
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<|return|>",
    "<|user|>",
    "<|observation|>",
    "<|assistant|>",
]
#: Like Qwen2.5: messages between control tokens, tools in the system message, calls as JSON between tags.
CHATML = (
    "{%- if tools -%}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif -%}"
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{%- for c in m.tool_calls or [] -%}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{%- endfor -%}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)
#: Like Qwen3: the reasoning of answers before the last user message is removed.
STRIPS = CHATML.replace(
    "{%- for m in messages -%}",
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}"
    "{%- endif -%}{%- endfor -%}{%- for m in messages -%}",
).replace(
    "{{ m.content }}",
    "{% set r = m.reasoning_content or (m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content) %}"
    "{% if r and loop.index0 > ns.last %}<think>\n{{ r.strip('\n') }}\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1].lstrip('\n') }}",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
#: A call of the tool, as the model writes it, and its result, as a client sends it back.
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
RESULT = {"role": "tool", "tool_call_id": "call00000", "content": "3"}


def make_tokenizer(template: str, end: str = "<|im_end|>") -> Any:
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL]
    merges = [("a", "b"), ("t", "o"), ("o", "o"), ("l", "s"), ("Ċ", "Ċ"), ("ab", "c")]
    vocabulary = {symbol: i for i, symbol in enumerate([*symbols, *("".join(m) for m in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end,
        pad_token="<|pad|>",
        additional_special_tokens=[s for s in SPECIAL[1:] if s != end],
    )
    tokenizer.chat_template = template
    return tokenizer


@dataclass
class Reply:
    """What a client receives."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes = b""

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def events(self) -> list[Any]:
        lines = self.raw.decode().split("\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    @property
    def message(self) -> Any:
        return self.body["choices"][0]["message"]


class Desk:
    """One sample's session behind the server, with an engine that answers from a script.

    ``script`` holds texts (with special tokens; every character is a token of its own), responses, exceptions, or events to wait for.
    """

    def __init__(self, script: Sequence[Any], template: str = CHATML, end: str = "<|im_end|>", **limits: Any) -> None:
        self.tokenizer = make_tokenizer(template, end)
        self.renderer = Renderer(self.tokenizer)
        self.script = list(script)
        self.requests: list[tuple[list[int], Sampling, str]] = []
        self.media: list[tuple[Any, ...]] = []
        self.sample = Sample(prompt="sum", tokens=[1], index=7, policy="policy")
        self.server = Server(
            Models({"default": "", "policy": "policy", "judge": "judge"}, frozenset({"judge"})), "127.0.0.1", 0, 100_000
        )
        self.session: Any = None
        self.token = ""
        self.limits = Limits(**limits)

    def encode(self, text: str) -> list[int]:
        """Every character and every special token is a token of its own."""
        ids: list[int] = []
        while text:
            special = next((s for s in SPECIAL if text.startswith(s)), text[0])
            ids += self.tokenizer.encode(special, add_special_tokens=False)
            text = text[len(special) :]
        return ids

    async def _generate(
        self, tokens: list[int], sampling: Sampling, policy: str, media: tuple[Any, ...] = ()
    ) -> Response:
        self.requests.append((tokens, sampling, policy))
        self.media.append(media)
        answer = self.script.pop(0)
        if isinstance(answer, tuple):
            waited, answer = answer
            await waited.wait()
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Response):
            return answer
        finish: Literal["length", "stop"] = "length" if answer.endswith("...") else "stop"
        ids = self.encode(answer)
        return Response(ids, [-0.5 - i / 100 for i in range(len(ids))], finish, answer, [(0, len(self.requests))])

    def open(self) -> None:
        ask = GenerationClient(
            self.sample, "policy", self._generate, Sampling(64), self.tokenizer, self.renderer,
            lambda ids: self.tokenizer.decode(ids, skip_special_tokens=True), lambda policy: policy == "policy",
        )  # fmt: skip
        self.session = Session(ask, AnswerReader(self.renderer), self.limits)
        self.token = self.server.open(self.session)

    async def post(
        self,
        body: Any,
        path: str = "/v1/chat/completions",
        gone: asyncio.Event | None = None,
        method: str = "POST",
        **headers: str,
    ) -> Reply:
        """Send one request; ``gone`` is set when the client disconnects."""
        if self.session is None:
            self.open()
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"authorization": f"Bearer {self.token}", **{k.replace("_", "-"): v for k, v in headers.items()}}
        scope = {"path": path, "method": method, "headers": [(k.encode(), v.encode()) for k, v in sent.items()]}
        incoming = [
            {"type": "http.request", "body": raw[i : i + 50_000], "more_body": i + 50_000 < len(raw)}
            for i in range(0, len(raw) or 1, 50_000)
        ]
        reply = Reply()

        async def receive() -> Any:
            if incoming:
                return incoming.pop(0)
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            reply.raw += message.get("body", b"")

        await self.server.serve(scope, receive, send)
        return reply

    async def chat(self, *messages: Any, **body: Any) -> Reply:
        """Send a chat request: texts are user messages."""
        given = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        return await self.post({"messages": given, **body})

    async def close(self) -> None:
        await self.server.close(self.token)

    @property
    def transcript(self) -> Any:
        return self.session.ask.transcript

    @property
    def branches(self) -> dict[str, int]:
        """Counted branches by reason."""
        return {k.removeprefix("branch_"): v for k, v in self.session.counts.items() if k.startswith("branch_") and v}

    def samples(self) -> list[Sample]:
        """The samples of all leaves, after the checks that a run makes."""
        made: list[Sample] = self.transcript.samples(self.sample)
        for one in made:
            self.transcript.fill(one, ())
            one.validate()
        return made

    def check(self) -> list[Sample]:
        """Check that exactly the engine's ids are trained, each once, with the engine's log-probs; returns the samples."""
        made = self.samples()
        trained: list[tuple[int, float]] = []
        for one in made:
            response = one.tokens[one.prompt_length :]
            trained += [(t, p) for t, p, m in zip(response, one.rollout_log_probs or (), one.mask, strict=True) if m]
            assert all(p == 0.0 for p, m in zip(one.rollout_log_probs or (), one.mask, strict=True) if not m)
        leaves = {id(turn) for leaf in self.transcript.leaves for turn in leaf.path}
        engine = [
            pair
            for turn in self.transcript.turns
            if id(turn) in leaves
            for pair in zip(turn.response.tokens, turn.response.log_probs, strict=True)
        ]
        assert sorted(trained) == sorted(engine)
        for turn in self.transcript.turns:  # the engine saw exactly what the sample holds
            assert turn.tokens[: turn.start] in [tokens for tokens, _, _ in self.requests]
        return made
