"""Exchanges with services that drip, end early, answer with too much or with something else."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from miles_core.errors import ConfigError
from miles_tools.http_client import HttpError, check_header, check_url, exchange


@pytest.fixture
def service():
    """``service(*pieces, pause)``: the address of a service that answers each connection with these bytes, piece by piece."""
    places = []

    def start(*pieces, pause=0.0):
        place = socket.create_server(("127.0.0.1", 0))
        places.append(place)

        def serve():
            while True:
                try:
                    connection, _ = place.accept()
                except OSError:
                    return
                try:
                    connection.recv(65536)
                    for piece in pieces:
                        connection.sendall(piece)
                        time.sleep(pause)
                except OSError:
                    pass
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{place.getsockname()[1]}/x"

    yield start
    for place in places:
        place.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n"


def test_a_whole_answer(service):
    assert exchange(service(OK, b"0.5"), b"{}").body == b"0.5"
    assert exchange(service(b"HTTP/1.1 404 No\r\n\r\n", b"gone", b"")).status == 404


def test_a_redirection_is_an_answer_and_is_not_followed(service):
    answer = exchange(
        service(b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n"), b"x"
    )
    assert (answer.status, answer.location) == (307, "http://127.0.0.1:9/")


@pytest.mark.parametrize(
    "pieces",
    [[OK[:-2], *[b"a: b\r\n"] * 90], [b"HTTP/1.1 200 OK\r\n\r\n", *[b" "] * 90], [OK, b"0", *[b""] * 90]],
    ids=["headers", "body", "silence"],
)
def test_dripped_bytes_do_not_prolong_the_deadline(service, pieces):
    start = time.monotonic()
    with pytest.raises(HttpError, match=r"did not answer completely within 0.5 s"):
        exchange(service(*pieces, pause=0.05), timeout=0.5)
    assert time.monotonic() - start < 2.0


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([OK, b"0"], "the answer ended after 1 bytes"),
        ([b"SSH-2.0-OpenSSH\r\n"], "the answer is not HTTP: .*SSH-2.0-OpenSSH"),
        ([], "the connection was closed without an answer"),
    ],
)
def test_answers_that_end_or_make_no_sense_may_be_asked_for_again(service, pieces, said):
    with pytest.raises(HttpError, match=said) as found:
        exchange(service(*pieces))
    assert found.value.retriable


def test_an_answer_has_a_limit(service):
    with pytest.raises(HttpError, match="answered with more than 10 bytes") as found:
        exchange(service(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 1000), max_bytes=10)
    assert not found.value.retriable


def test_a_header_that_cannot_be_sent_is_refused_without_its_value():
    assert check_header(" abc\n", "the variable X") == "abc"
    with pytest.raises(ConfigError, match="the variable X: the value has characters") as found:
        check_header("secret1\nsecret2", "the variable X")
    assert "secret" not in str(found.value)
    with pytest.raises(HttpError) as error:
        exchange("http://127.0.0.1:9/", b"", {"Authorization": "Bearer abcdefghi\nX: y"})
    assert "abcdefghi" not in str(error.value) and not error.value.retriable


@pytest.mark.parametrize(
    "url", ["h:80", "ftp://h", "http://", "http://h:0/", "http://h:99999/", "http://h/ x", "http://[::1", "http://h:x/"]
)
def test_addresses_are_checked_before_anything_is_sent(url):
    with pytest.raises(ConfigError, match="--rm-url"):
        check_url(url, "--rm-url")
