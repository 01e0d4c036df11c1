"""A headless Chromium for tests of pages, driven through chromedriver's HTTP interface (WebDriver)."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

#: Why tests with a browser are skipped; "" if they are not.
MISSING = (
    "" if shutil.which("chromium") and shutil.which("chromedriver") else "chromium and chromedriver are not installed"
)
#: Key of an element in WebDriver's answers.
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """A window of a browser. Made by ``open_browser``."""

    def __init__(self, address: str, capabilities: Mapping[str, Any]) -> None:
        self._address = f"{address}/session"
        self._address += "/" + self._ask("POST", "", {"capabilities": {"alwaysMatch": capabilities}})["sessionId"]

    def _ask(self, method: str, path: str, data: Mapping[str, Any] | None = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = Request(self._address + path, body, {"Content-Type": "application/json"}, method=method)
        try:
            with urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from error

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what a function with this JavaScript body returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, expression: str, seconds: float = 15.0) -> Any:
        """Return the value of a JavaScript expression as soon as it is true."""
        end = time.monotonic() + seconds
        while not (found := self.run(f"return {expression}")):
            assert time.monotonic() < end, (
                f"{expression} is {found!r}; the page shows: {self.run('return document.body.innerText')[:800]}"
            )
            time.sleep(0.05)
        return found

    def press(self, keys: str) -> None:
        """Type keys into what has the focus."""
        down = [
            action for key in keys for action in ({"type": "keyDown", "value": key}, {"type": "keyUp", "value": key})
        ]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": down}]})

    def devtools(self, command: str, **options: Any) -> Any:
        """Send a command of the DevTools protocol."""
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": options})

    def screenshot(self, file: Path) -> None:
        """Write a picture of the window."""
        file.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def errors(self) -> list[str]:
        """Return the errors in the console since the last call: of scripts, and what the policy of the page refused."""
        return [
            entry["message"]
            for entry in self._ask("POST", "/se/log", {"type": "browser"})
            if entry["level"] == "SEVERE"
        ]

    def close(self) -> None:
        """Close the window."""
        self._ask("DELETE", "")


@contextmanager
def open_browser(width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """Yield a new headless window of this size in pixels; needs chromium and chromedriver."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert driver.stdout is not None
        port = next(line.split()[-1].rstrip(".") for line in driver.stdout if "started successfully on port" in line)
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        capabilities = {
            "goog:chromeOptions": {
                "binary": shutil.which("chromium"),
                "args": [*arguments, f"--window-size={width},{height}"],
            },
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        browser = Browser(f"http://127.0.0.1:{port}", capabilities)
        try:
            yield browser
        finally:
            with suppress(AssertionError, URLError, OSError):  # the browser may have ended
                browser.close()
    finally:
        driver.terminate()
        driver.wait(20)
