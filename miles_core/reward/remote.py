"""The ``remote`` reward: a user's HTTP service judges each response.

The service gets ``POST {"prompt", "response", "label", "metadata"}`` and answers with a JSON number, or an object that
is used as a dict reward (``--reward-key``). Connection failures and HTTP 5xx are retried; anything else stops the run, a
redirection too: the request would arrive without its body, at an address that somebody else chose.
A token for the service is taken from the environment (``MILES_RM_TOKEN``, sent as ``Authorization: Bearer``), so that no file of
the run holds it.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from miles_core.errors import ConfigError, DataError

ATTEMPTS = 4
FIRST_PAUSE_SECONDS = 0.5
TOKEN = "MILES_RM_TOKEN"


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        """Nowhere else: the 3xx answer is raised as an HTTPError."""


class RemoteReward:
    """``reward(args, sample)``, blocking; call it in a thread.

    Args:
        url: an http or https address (``--rm-url``).
        timeout: seconds for one request.
        pause: seconds before the first retry; doubles each time.
    """

    def __init__(self, url: str | None, timeout: float = 60.0, pause: float = FIRST_PAUSE_SECONDS) -> None:
        if not url:
            raise ConfigError("--rm-type remote needs --rm-url, the address that answers POST requests")
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise ConfigError(f"--rm-url {url}: the address must start with http:// or https://")
        if parts.username or parts.password:
            raise ConfigError(
                f"--rm-url {parts.scheme}://...@{parts.hostname}: a name or password in the address would be kept in the run "
                f"directory; put a token into the environment variable {TOKEN}"
            )
        self._open = urllib.request.build_opener(_NoRedirection).open
        self.url, self.timeout, self.pause = url, timeout, pause

    def __call__(self, args: Any, sample: Any) -> Any:
        question = {name: getattr(sample, name, None) for name in ("prompt", "response", "label", "metadata")}
        body = self._post(json.dumps(question).encode())
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.url} answered {body[:200]!r}, which is not JSON") from error

    def _post(self, data: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(TOKEN):
            headers["Authorization"] = f"Bearer {token}"
        request = urllib.request.Request(self.url, data, headers)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with self._open(request, timeout=self.timeout) as reply:
                    body: bytes = reply.read()
                    return body
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code} {error.reason}"
                if 300 <= error.code < 400:
                    where = error.headers.get("Location")
                    raise DataError(
                        f"{self.url} answered {reason}: it moved to {where}; give that as --rm-url if it is right"
                    ) from error
                if error.code < 500:
                    raise DataError(f"{self.url} answered {reason}") from error
            except OSError as error:  # URLError and TimeoutError are
                reason = str(error)
            if attempt < ATTEMPTS:
                time.sleep(self.pause * 2 ** (attempt - 1))
        raise DataError(f"{self.url} failed {ATTEMPTS} times, last with: {reason}")
