import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from miles_core.errors import ConfigError, DataError
from miles_tools.rewards.remote import RemoteReward

SAMPLE = SimpleNamespace(prompt="p", response="r", label="l", metadata={"k": 1}, reward=None, index=0)


@pytest.fixture
def server():
    """A service that gives the answers put into ``answers`` one by one and records what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.server.tokens.append(self.headers["Authorization"])
            self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, body = self.server.answers.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if 300 <= status < 400:
                self.send_header("Location", self.server.url)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.answers, server.asked, server.tokens = [], [], []
    server.url = f"http://127.0.0.1:{server.server_port}/score"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_sends_the_sample_and_returns_the_answer(server):
    server.answers = [(200, b"0.5"), (200, b'{"acc": 1}')]
    reward = RemoteReward(server.url)
    assert reward(None, SAMPLE) == 0.5
    assert reward(None, SAMPLE) == {"acc": 1}
    assert server.asked[0] == {"prompt": "p", "response": "r", "label": "l", "metadata": {"k": 1}}


def test_retries_a_failing_service(server):
    server.answers = [(503, b""), (500, b""), (200, b"1")]
    assert RemoteReward(server.url, pause=0.0)(None, SAMPLE) == 1


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([(404, b"")], "HTTP 404"),
        ([(200, b"<html>")], "not JSON"),
        ([(500, b"")] * 4, "failed 4 times, last with: HTTP 500"),
    ],
)
def test_gives_up_with_a_sentence(server, answers, message):
    server.answers = list(answers)
    with pytest.raises(DataError, match=message) as error:
        RemoteReward(server.url, pause=0.0)(None, SAMPLE)
    assert server.url in str(error.value)
    assert server.answers == []


def test_an_address_must_be_http():
    with pytest.raises(ConfigError, match="ftp://x"):
        RemoteReward("ftp://x")
    with pytest.raises(ConfigError, match="--rm-url"):
        RemoteReward(None)


def test_does_not_go_where_the_service_sends_it(server):
    server.answers = [(302, b""), (200, b"1")]
    with pytest.raises(DataError, match=r"it moved to http://127.*give that as --rm-url"):
        RemoteReward(server.url)(None, SAMPLE)
    assert len(server.asked) == 1


def test_a_token_comes_from_the_environment_and_never_in_the_address(server, monkeypatch):
    with pytest.raises(ConfigError, match="MILES_RM_TOKEN") as caught:
        RemoteReward("https://me:secret@judge.example/score")
    assert "secret" not in str(caught.value)
    monkeypatch.setenv("MILES_RM_TOKEN", "abc")
    server.answers = [(200, b"1")]
    RemoteReward(server.url)(None, SAMPLE)
    assert server.tokens == ["Bearer abc"]


def test_a_token_with_a_line_break_at_its_end_is_sent_without_it(server, monkeypatch):
    monkeypatch.setenv("MILES_RM_TOKEN", "secret-of-mine\n")
    server.answers = [(200, b"1")]
    assert RemoteReward(server.url)(None, SAMPLE) == 1 and server.tokens == ["Bearer secret-of-mine"]
    monkeypatch.setenv("MILES_RM_TOKEN", "secret-of\nmine")
    with pytest.raises(ConfigError, match="MILES_RM_TOKEN") as found:
        RemoteReward(server.url)
    assert "secret" not in str(found.value)


def test_a_key_in_the_address_comes_from_the_environment(server, monkeypatch):
    with pytest.raises(ConfigError, match=r"key=<redacted>: a name, password or key .*RM_KEY") as found:
        RemoteReward(server.url + "?key=hidden123")
    assert "hidden123" not in str(found.value)
    with pytest.raises(ConfigError, match="the environment variable RM_KEY is not set"):
        RemoteReward(server.url + "?key=${RM_KEY}")
    monkeypatch.setenv("RM_KEY", "hidden123")
    server.answers = [(200, b"1"), (404, b"no such key: hidden123")]
    reward = RemoteReward(server.url + "?key=${RM_KEY}")
    assert reward(None, SAMPLE) == 1
    with pytest.raises(DataError, match=r"key=\$\{RM_KEY\} answered HTTP 404") as refused:
        reward(None, SAMPLE)
    assert "hidden123" not in str(refused.value)


@pytest.mark.parametrize("url", ["http://", "http://h:99999/", "http://h/a b", "https://h:port/"])
def test_addresses_that_cannot_be_are_refused_when_the_run_is_planned(url):
    with pytest.raises(ConfigError, match="--rm-url"):
        RemoteReward(url)


def test_an_answer_that_is_too_long_stops_the_run(server):
    server.answers = [(200, b" " * (2 << 20))]
    with pytest.raises(DataError, match="more than 1,048,576 bytes"):
        RemoteReward(server.url)(None, SAMPLE)
