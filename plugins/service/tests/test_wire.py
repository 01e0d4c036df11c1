"""Requests in protocol buffers that are damaged."""

import pytest

from miles_service.wire import decode_request
from miles_tools.http_server import ApiError


def field(number, content):
    """A field of the type 2: a length and as many bytes."""
    return bytes([number << 3 | 2, len(content)]) + content


HUGE = bytes([4 << 3]) + b"\xff" * 9 + b"\x7f"  # the shape of a tensor: one number above 2**63


@pytest.mark.parametrize(
    "body",
    [
        b"\x0a\xff",  # a length without its bytes
        bytes([3 << 3, 1]),  # a number in place of a message
        bytes([1 << 3, 1]),  # a number in place of a text
        field(3, field(2, field(1, b"weights") + field(2, bytes([3 << 3, 1]) + HUGE))),
        bytes([3 << 3 | 3]),  # a type that protocol buffers no longer use
    ],
)
def test_a_damaged_request_is_refused(body):
    with pytest.raises(ApiError, match="the protobuf body cannot be decoded") as error:
        decode_request(body)
    assert error.value.status == 400
