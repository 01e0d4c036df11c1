"""Running servers as one engine: the list of their addresses, which may change during a run, and the pool that distributes requests and weights.

A plugin with an engine that runs servers of another program implements ``Server`` (a connection to one of them) and uses ``ServerPool``.
"""

from typing import TYPE_CHECKING

from miles_core.lookup import make_lazy_exports

if TYPE_CHECKING:
    from miles_workers.servers.errors import NotReachable, ServerError, ServerLeft, ServersLost
    from miles_workers.servers.member import Member, Server
    from miles_workers.servers.metrics import PoolMetrics, PoolNews, report_news
    from miles_workers.servers.plan import check_servers, find_shared_servers, find_url_problems
    from miles_workers.servers.pool import ServerPool
    from miles_workers.servers.same_model import SameModel
    from miles_workers.servers.served_adapter import ADAPTER, ServedAdapter
    from miles_workers.servers.server_list import ServerList
    from miles_workers.servers.shared import Shared, Use, share

__all__ = [
    "ADAPTER",
    "Member",
    "NotReachable",
    "PoolMetrics",
    "PoolNews",
    "SameModel",
    "ServedAdapter",
    "Server",
    "ServerError",
    "ServerLeft",
    "ServerList",
    "ServerPool",
    "ServersLost",
    "Shared",
    "Use",
    "check_servers",
    "find_shared_servers",
    "find_url_problems",
    "report_news",
    "share",
]

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "miles_workers.servers.errors": "NotReachable ServerError ServerLeft ServersLost",
        "miles_workers.servers.member": "Member Server",
        "miles_workers.servers.metrics": "PoolMetrics PoolNews report_news",
        "miles_workers.servers.plan": "check_servers find_shared_servers find_url_problems",
        "miles_workers.servers.pool": "ServerPool",
        "miles_workers.servers.same_model": "SameModel",
        "miles_workers.servers.served_adapter": "ADAPTER ServedAdapter",
        "miles_workers.servers.server_list": "ServerList",
        "miles_workers.servers.shared": "Shared Use share",
    },
)
