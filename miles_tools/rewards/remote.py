"""The ``remote`` reward: a user's HTTP service judges each response.

The service receives ``POST {"prompt", "response", "label", "metadata"}`` and returns a JSON number, or an object that is used as a dict
reward (``--reward-key``). Connection failures, truncated responses and HTTP 5xx, 408 and 429 are retried; all other errors stop the
run. Redirects also stop the run: the request would go to an address that the user did not choose, without its body.

Credentials come from the environment, so no file of the run holds them: ``MILES_RM_TOKEN`` is sent as ``Authorization: Bearer``,
and ``${NAME}`` in the address is replaced by that variable when a request is sent.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from miles_core.contracts.run import Run
from miles_core.data.sample import Sample
from miles_core.errors import ConfigError, DataError
from miles_core.redact import has_credentials, redact
from miles_tools.http_client import RETRIABLE, HttpError, check_header, check_url, exchange

ATTEMPTS = 4
FIRST_PAUSE_SECONDS = 0.5
#: Seconds for one request, from the connection to the last byte of the response.
TIMEOUT = 60.0
#: Maximum bytes of a response: a reward consists of one or a few numbers.
MAX_ANSWER = 1 << 20
TOKEN = "MILES_RM_TOKEN"
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class RemoteReward:
    """Blocking reward function ``reward(args, sample)``; call it in a thread.

    Args:
        url: an http or https address (``--rm-url``).
        pause: seconds before the first retry; doubles with each retry.

    Raises:
        ConfigError: the address or the token cannot be used, or the address holds a credential.
    """

    def __init__(self, url: str | None, pause: float = FIRST_PAUSE_SECONDS) -> None:
        if not url:
            raise ConfigError("--rm-type remote needs --rm-url, the address that answers POST requests")
        if has_credentials(url):
            raise ConfigError(
                f"--rm-url {redact(url, {})}: a name, password or key in the address would be kept in the run directory; put a token "
                f"into the environment variable {TOKEN}, or name a variable in the address, as in ?key=${{RM_KEY}}"
            )
        self.url, self.pause = url, pause
        self._address = _VARIABLE.sub(self._variable, url)
        check_url(self._address, "--rm-url")
        self._headers = {"Content-Type": "application/json"}
        if token := check_header(os.environ.get(TOKEN, ""), f"the environment variable {TOKEN}"):
            self._headers["Authorization"] = f"Bearer {token}"

    def _variable(self, found: re.Match[str]) -> str:
        value = os.environ.get(found[1])
        if not value:
            raise ConfigError(f"--rm-url {self.url}: the environment variable {found[1]} is not set")
        return check_header(value, f"the environment variable {found[1]} in --rm-url")

    def __call__(self, args: Any, sample: Any) -> Any:
        question = {name: getattr(sample, name, None) for name in ("prompt", "response", "label", "metadata")}
        body = self._post(json.dumps(question).encode())
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            excerpt = redact(body[:200].decode(errors="replace"))
            raise DataError(f"{self.url} answered {excerpt!r}, which is not JSON") from error

    def _post(self, data: bytes) -> bytes:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = exchange(self._address, data, self._headers, TIMEOUT, MAX_ANSWER)
            except HttpError as error:
                reason = str(error).replace(self._address, self.url)
                if not error.retriable:
                    raise DataError(reason) from None
            else:
                if 200 <= answer.status < 300:
                    return answer.body
                reason = f"HTTP {answer.status} {answer.reason}"
                if 300 <= answer.status < 400:
                    where = redact(answer.location)
                    raise DataError(
                        f"{self.url} answered {reason}: it moved to {where}; give that as --rm-url if it is right"
                    )
                if answer.status not in RETRIABLE and answer.status < 500:
                    raise DataError(f"{self.url} answered {reason}: {answer.excerpt()}")
            if attempt < ATTEMPTS:
                time.sleep(self.pause * 2 ** (attempt - 1))
        raise DataError(f"{self.url} failed {ATTEMPTS} times, last with: {reason}")


def make_reward(run: Run) -> Callable[[Any, Sample], Awaitable[Any]]:
    """The reward named ``remote``: what the service at ``--rm-url`` answers, ``--reward-concurrency`` requests at once."""
    options = run.config.reward
    service = RemoteReward(options.rm_url)
    threads = ThreadPoolExecutor(options.concurrency, thread_name_prefix="reward")

    async def reward(args: Any, sample: Sample) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads, service, args, sample)

    return reward
