"""Connects to a running inference server and reads log-probabilities from it: SGLang's ``/generate``, or ``/v1/completions``.

Token ids are sent and read, so the server's tokenizer has no influence. A server of the OpenAI interface may not know fields that only
some servers accept; they are left out if it refuses them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_core.contracts.engine import Sampling
from miles_core.errors import ConfigError, MilesError
from miles_core.redact import has_credentials, redact
from miles_tools.http_client import HttpError, check_header, check_url, exchange

#: Environment variable whose value is sent as ``Authorization: Bearer``.
TOKEN = "MILES_VERIFY_TOKEN"
FLAG = "--url"
#: Seconds for one request, from the connection to the last byte.
SECONDS = 300.0
#: Prefix of token ids that a server returns in place of text (``return_tokens_as_token_ids``).
_ID = "token_id:"
#: Statuses of a server that does not accept a field or a form of a request.
_REFUSED = (400, 422)


class ServerError(MilesError):
    """The server cannot be reached, refuses a request, or answers in another format."""


class _RefusedError(ServerError):
    """The server does not accept the request."""


@dataclass(frozen=True)
class Row:
    """A generated sequence: token ids after the prompt, and their reported log-probabilities in the same order."""

    tokens: list[int]
    log_probs: np.ndarray


class Server:
    """A server with log-probabilities. Subclasses implement a protocol.

    Args:
        url: the address without a path of the protocol.

    Attributes:
        added: tokens that the server puts before the given ones, according to its last score.
    """

    protocol: str

    def __init__(self, url: str) -> None:
        self.url = url
        self.added: list[int] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Row]:
        """Generate one response per prompt, all in one request; stop tokens are ignored."""
        raise NotImplementedError

    def score(self, row: Sequence[int]) -> np.ndarray:
        """Return the log-probabilities of a given sequence at temperature 1, [len(row) - 1]. ServerError if the server cannot score."""
        raise NotImplementedError

    def tokenize(self, text: str) -> list[int] | None:
        """Return the token ids that the server makes of a text prompt; None if it does not report them."""
        raise NotImplementedError

    def ask(self, path: str, body: Mapping[str, Any] | None = None, seconds: float = SECONDS) -> Any:
        """Send a request and return the JSON of the answer.

        Raises:
            ServerError: no answer, an HTTP error, or an answer that is not JSON.
        """
        headers = {"Content-Type": "application/json"}
        if token := check_header(os.environ.get(TOKEN, ""), f"the environment variable {TOKEN}"):
            headers["Authorization"] = f"Bearer {token}"
        place = f"{FLAG} {redact(self.url)}: {path}"
        try:
            answer = exchange(
                self.url + path, None if body is None else json.dumps(body).encode(), headers, seconds, 1 << 30
            )
        except HttpError as error:
            raise ServerError(f"{FLAG}: {error}; start the server, or correct the address") from error
        if answer.status in (401, 403):
            raise ServerError(
                f"{place} answered HTTP {answer.status}: put the server's key into the environment variable {TOKEN}"
            )
        if 300 <= answer.status < 400:
            raise ServerError(
                f"{place} answered HTTP {answer.status}: it moved to {redact(answer.location)}; give that address"
            )
        if answer.status >= 400:
            kind = _RefusedError if answer.status in (404, *_REFUSED) else ServerError
            raise kind(f"{place} answered HTTP {answer.status}: {answer.excerpt() or answer.reason}")
        try:
            return json.loads(answer.body)
        except (ValueError, RecursionError) as error:
            raise ServerError(
                f"{place} answered {answer.excerpt(80)!r}, which is not JSON; correct the address"
            ) from error

    def find_added(self, scored: Sequence[int], row: Sequence[int]) -> None:
        """Set ``added`` from the tokens that the server scored. ServerError unless they end with ``row``."""
        extra = len(scored) - len(row)
        if extra < 0 or list(scored[extra:]) != list(row):
            raise ServerError(
                f"{FLAG} {redact(self.url)}: the server scored other tokens than the given ones: {list(scored)[:6]} for {list(row)[:6]}"
            )
        self.added = list(scored[:extra])

    def malformed(self, path: str, why: object, answer: Any) -> ServerError:
        """Return the error for an answer in another format."""
        shown = redact(json.dumps(answer, default=repr))[:200]
        return ServerError(f"{FLAG} {redact(self.url)}: the answer of {path} has no {why}: {shown}")


class SglangServer(Server):
    """SGLang's own interface."""

    protocol = "SGLang /generate"

    def _generate(self, body: Mapping[str, Any]) -> list[Any]:
        answer = self.ask("/generate", {"return_logprob": True, "stream": False, **body})
        return answer if isinstance(answer, list) else [answer]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Row]:
        given = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "ignore_eos": True,
        }
        found = self._generate({"input_ids": [list(p) for p in prompts], "sampling_params": given})
        rows = [self._read(one, "output_token_logprobs") for one in found]
        return _check_count(
            self, "/generate", [Row([i for _, i in r], _array(p for p, _ in r)) for r in rows], len(prompts)
        )

    def score(self, row: Sequence[int]) -> np.ndarray:
        (one,) = self._generate(
            {
                "input_ids": [list(row)],
                "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
                "logprob_start_len": 0,
            }
        )
        entries = one.get("meta_info", {}).get("input_token_logprobs") if isinstance(one, dict) else None
        if not entries:
            raise ServerError(
                f"{FLAG} {redact(self.url)}: the server returns no log-probs of prompts (input_token_logprobs)"
            )
        try:
            self.find_added(restore_last([int(entry[1]) for entry in entries], row), row)
        except (TypeError, ValueError, IndexError) as error:
            raise self.malformed("/generate", "token ids in input_token_logprobs", one) from error
        return _array(p for p, _ in self._read(one, "input_token_logprobs", len(entries) - len(row) + 1))

    def tokenize(self, text: str) -> list[int] | None:
        body = {"text": [text], "sampling_params": {"max_new_tokens": 1}, "logprob_start_len": 0}
        try:
            (one,) = self._generate(body)
            return [int(entry[1]) for entry in one["meta_info"]["input_token_logprobs"]]
        except (ServerError, KeyError, TypeError, ValueError, IndexError):
            return None

    def _read(self, answer: Any, name: str, start: int = 0) -> list[tuple[float, int]]:
        try:
            return [(float(e[0]), int(e[1])) for e in answer["meta_info"][name][start:]]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self.malformed("/generate", f"list meta_info.{name} of log-probs and token ids", answer) from error


class OpenAiServer(Server):
    """The OpenAI interface of completions, as vLLM, SGLang and other servers have it."""

    protocol = "OpenAI /v1/completions"

    def __init__(self, url: str, model: str) -> None:
        super().__init__(url)
        self.model = model
        self._plain = False  # the server refuses fields that OpenAI's interface does not have

    def _complete(self, prompt: Any, options: Mapping[str, Any], more: Mapping[str, Any]) -> list[Any]:
        body = {"model": self.model, "prompt": prompt, "logprobs": 1, **options}
        extended = {**body, "return_tokens_as_token_ids": True, "return_token_ids": True, "ignore_eos": True, **more}
        try:
            answer = self.ask("/v1/completions", body if self._plain else extended)
        except _RefusedError:
            if self._plain:
                raise
            answer = self.ask("/v1/completions", body)
            self._plain = True
        try:
            return sorted(answer["choices"], key=lambda choice: int(choice.get("index", 0)))
        except (KeyError, TypeError, AttributeError) as error:
            raise self.malformed("/v1/completions", "list of choices", answer) from error

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Row]:
        options = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        more = {"top_k": sampling.top_k} if sampling.top_k > 0 else {}
        given = [list(p) for p in prompts]
        choices = self._complete(given if len(given) > 1 else given[0], options, more)
        rows = [Row(self._ids(c), self._log_probs(c)) for c in choices]
        for row, choice in zip(rows, choices, strict=True):
            if len(row.tokens) != len(row.log_probs):
                raise self.malformed("/v1/completions", "log-prob for each token", choice)
        return _check_count(self, "/v1/completions", rows, len(prompts))

    def score(self, row: Sequence[int]) -> np.ndarray:
        options = {"max_tokens": 1, "temperature": 1.0}
        if not self._plain:
            (choice,) = self._complete(list(row), options, {"prompt_logprobs": 0})
            entries = choice.get("prompt_logprobs")
            if isinstance(entries, list) and len(entries) >= len(row):
                if isinstance(ids := choice.get("prompt_token_ids"), list):
                    self.find_added(ids, row)
                try:
                    last = entries[len(entries) - len(row) + 1 :]
                    return _array(e[str(t)]["logprob"] for e, t in zip(last, row[1:], strict=True))
                except (KeyError, TypeError) as error:
                    raise self.malformed("/v1/completions", "prompt_logprobs of the given tokens", choice) from error
        (choice,) = self._complete(list(row), {**options, "echo": True}, {})
        found = self._log_probs(choice, start=1)
        if len(found) < len(row) - 1:
            raise ServerError(
                f"{FLAG} {redact(self.url)}: the server returns no log-probs of prompts (prompt_logprobs, echo)"
            )
        ids = choice.get("prompt_token_ids")  # SGLang lists the tokens of an echo as text only
        if not isinstance(ids, list):
            ids = self._ids({"logprobs": choice["logprobs"]})
            ids = ids[:-1] if len(ids) > len(row) else ids  # the last token is a generated one
        self.find_added(ids, row)
        return found[len(self.added) :][: len(row) - 1]

    def tokenize(self, text: str) -> list[int] | None:
        try:
            (choice,) = self._complete(text, {"max_tokens": 1, "temperature": 1.0}, {"prompt_logprobs": 0})
            if isinstance(found := choice.get("prompt_token_ids"), list):
                return [int(token) for token in found]
        except (ServerError, ValueError, TypeError):
            pass
        return None

    def _ids(self, choice: Any) -> list[int]:
        try:
            if isinstance(found := choice.get("token_ids"), list):
                return [int(token) for token in found]
            pairs = [text.partition(_ID) for text in choice["logprobs"]["tokens"]]
            return [int(number) for _, _, number in pairs]  # "" where the text is not an id
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self.malformed(
                "/v1/completions",
                "token ids (token_ids, or tokens as token_id:N; vLLM and SGLang return them)",
                choice,
            ) from error

    def _log_probs(self, choice: Any, start: int = 0) -> np.ndarray:
        try:
            return _array(choice["logprobs"]["token_logprobs"][start:])
        except (KeyError, TypeError, ValueError) as error:
            raise self.malformed("/v1/completions", "log-probs (logprobs.token_logprobs)", choice) from error


def connect(url: str, model: str | None = None) -> Server:
    """Connect to a server, with SGLang's own interface if it has one.

    Args:
        url: address of the server, with or without ``/v1``.
        model: name of the model; None if the server has a single one.

    Raises:
        ConfigError: the address or the model's name is wrong. ServerError: the server does not answer as either protocol does.
    """
    if has_credentials(url):
        raise ConfigError(
            f"{FLAG} {redact(url, {})}: put the key into the environment variable {TOKEN} and not into the address"
        )
    check_url(url, FLAG)
    base = url.rstrip("/").removesuffix("/v1").removesuffix("/generate").rstrip("/")
    if model is None and _is_sglang(base):
        return SglangServer(base)
    try:
        names = [str(entry["id"]) for entry in Server(base).ask("/v1/models", seconds=30.0)["data"]]
    except _RefusedError as error:
        raise ServerError(
            f"{error}; the server has neither SGLang's /get_model_info nor OpenAI's /v1/models"
        ) from error
    except (KeyError, TypeError) as error:
        raise ServerError(f"{FLAG} {redact(base)}: /v1/models lists no models; correct the address") from error
    if model is None and len(names) != 1:
        raise ConfigError(f"{FLAG} {redact(base)} serves {', '.join(names) or 'no model'}: choose one with --url-model")
    if model is not None and model not in names:
        raise ConfigError(f"--url-model {model}: {redact(base)} serves {', '.join(names) or 'no model'}")
    return OpenAiServer(base, model or names[0])


def _is_sglang(base: str) -> bool:
    for path in ("/get_model_info", "/model_info"):
        try:
            found = Server(base).ask(path, seconds=30.0)
        except _RefusedError:
            continue
        if isinstance(found, Mapping) and "model_path" in found:
            return True
    return False


def restore_last(ids: list[int], row: Sequence[int]) -> list[int]:
    """Return the ids that SGLang scored: in prompts it lists the last id of the vocabulary as 0, with the right log-probability."""
    tail = ids[-len(row) :]
    hidden = {given for given, listed in zip(row, tail, strict=False) if listed == 0 != given}
    if len(hidden) != 1 or len(tail) != len(row):
        return ids
    restored = [given if given in hidden and not listed else listed for given, listed in zip(row, tail, strict=True)]
    return ids[: -len(row)] + restored


def _array(values: Any) -> np.ndarray:
    return np.array([float(v) for v in values], np.float64)


def _check_count(server: Server, path: str, rows: list[Row], count: int) -> list[Row]:
    if len(rows) != count or not all(row.tokens for row in rows):
        raise ServerError(
            f"{FLAG} {redact(server.url)}: {path} answered {len(rows)} responses for {count} prompts, or an empty one"
        )
    return rows
