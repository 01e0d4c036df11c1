"""What can go wrong with running servers."""

from miles_core.errors import MilesError
from miles_workers.renewal import EngineLost


class ServerError(MilesError):
    """A server rejected a call, or cannot be used."""


class NotReachable(ServerError):
    """No server answers at the address, or it is still starting.

    Attributes:
        cause: the reason without advice.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class ServerLeft(ServerError):
    """The server that had a request left the pool. Another server can answer the request."""


class ServersLost(EngineLost, ServerError):
    """No server has the weights of the request, and others can receive them."""
