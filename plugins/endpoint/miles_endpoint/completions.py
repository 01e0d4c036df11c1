"""``POST /v1/completions``: text or token ids, continued.

A prompt that begins with the text of an earlier turn (its prompt and its whole answer) continues that turn's tokens, and only the rest is
tokenized. Token ids continue the deepest turn that they begin with.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from miles_core.chat import tokenize
from miles_core.data import describe_error
from miles_endpoint.api_error import refuse
from miles_endpoint.call import Call, check_parameters, read_whole
from miles_endpoint.chat import event
from miles_endpoint.service import MAX_N, Models, Reply, read_sampling, usage_of
from miles_tools.http_server import ApiError

if TYPE_CHECKING:
    from miles_core.plugin import Turn
    from miles_endpoint.session import Session


def prepare(body: Mapping[str, Any], session: Session, models: Models) -> Reply:
    """Check a request and return how to answer it.

    Raises:
        ApiError: the request is invalid.
    """
    check_parameters({name: value for name, value in body.items() if name != "logprobs"})
    policy = models.policy_of(body)
    sampling = read_sampling(body, session, models, policy, ("max_tokens",))
    call = Call((), (), sampling, policy, read_whole(body, "n", 1, MAX_N) or 1)
    prompts = _read_prompts(body.get("prompt"))
    top = body.get("logprobs")
    if top not in (None, False, True, 0, 1):
        raise refuse(
            f"logprobs={top!r:.40} is not supported; 1 returns those of the sampled tokens", "unsupported_parameter"
        )

    async def work() -> list[Turn]:
        turns: list[Turn] = []
        for prompt in prompts:
            try:
                after, tokens = await _place(prompt, session)
            except ApiError:
                raise
            except Exception as error:  # tokenizers raise errors of any type
                raise refuse(f"the prompt cannot be tokenized ({describe_error(error)})") from error
            made = await session.generate(after, tokens, call)
            if isinstance(prompt, str):
                for turn in made:
                    session.texts[prompt + _whole_text(turn, session)] = turn
            turns += made
        return turns

    def reply(turns: list[Turn]) -> dict[str, Any]:
        return _body(turns, body, session, bool(top), call.sampling.stop)

    return Reply(work, reply, _events)


def _read_prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str) and prompt:
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            return [prompt]
        if all(_is_prompt(item) for item in prompt):
            return prompt
    raise refuse(f"prompt must be a text, a list of token ids, or a list of these, and not empty; got {prompt!r:.60}")


def _is_prompt(item: Any) -> bool:
    return bool(item) and (isinstance(item, str) or (isinstance(item, list) and all(isinstance(i, int) for i in item)))


async def _place(prompt: str | list[int], session: Session) -> tuple[Turn | None, list[int]]:
    vocabulary = len(session.ask.tokenizer)
    if not isinstance(prompt, str):
        if not all(0 <= token < vocabulary for token in prompt):
            raise refuse(f"prompt holds a token id outside of 0 to {vocabulary - 1}")
        return None, prompt
    for text in sorted((t for t in session.texts if prompt.startswith(t)), key=len, reverse=True):
        turn, rest = session.texts[text], prompt[len(text) :]
        if (
            rest
            and turn.response.finish == "stop"
            and turn.response.tokens[-1] not in session.ask.tokenizer.all_special_ids
        ):
            encode = partial(session.ask.tokenizer.encode, rest, add_special_tokens=False)
            return turn, await tokenize(encode, rest)
        session.counts["branch_stop_token" if rest else "branch_prefill"] += 1
        break
    else:
        session.counts["conversations"] += 1
    return None, await tokenize(lambda: session.ask.tokenizer.encode(prompt), prompt)


def _whole_text(turn: Turn, session: Session) -> str:
    """Return the whole text of an answer, a stop string at its end included."""
    return str(session.ask.tokenizer.decode(list(turn.response.tokens), skip_special_tokens=True))


def _body(
    turns: list[Turn], request: Mapping[str, Any], session: Session, logprobs: bool, stop: tuple[str, ...]
) -> dict[str, Any]:
    choices = []
    for index, turn in enumerate(turns):
        text = _whole_text(turn, session)
        choice: dict[str, Any] = {
            "index": index,
            "text": text[: min((text.index(s) for s in stop if s in text), default=len(text))],
            "logprobs": _logprobs(turn, session) if logprobs else None,
            "finish_reason": "length" if turn.response.finish == "length" else "stop",
        }
        if request.get("return_token_ids"):
            choice |= {"token_ids": list(turn.response.tokens), "prompt_token_ids": list(turn.tokens[: turn.start])}
        choices.append(choice)
    return {
        "id": f"cmpl-{session.next_id()}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.get("model", "default"),
        "choices": choices,
        "usage": usage_of(turns[0].start, sum(len(turn.response.tokens) for turn in turns)),
    }


def _logprobs(turn: Turn, session: Session) -> dict[str, Any]:
    texts = [session.ask.tokenizer.decode([token]) for token in turn.response.tokens]
    offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": list(turn.response.log_probs),
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _events(body: dict[str, Any]) -> Iterator[bytes]:
    for choice in body["choices"]:
        yield event({**body, "choices": [choice], "usage": None})
    yield event({**body, "choices": []})
    yield b"data: [DONE]\n\n"
