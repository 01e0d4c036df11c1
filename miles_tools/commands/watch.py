"""``miles watch RUN...``: serves a page that follows runs while they work, and opens finished ones."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from miles_core.config.command import CommandParser


def run(argv: Sequence[str]) -> int:
    """Run the command until it is interrupted; returns the exit code."""
    from miles_tools.watch.server import PORT, WatchServer

    parser = CommandParser(
        "watch",
        description="Serve a page on this machine that follows runs while they work, and opens finished ones: plots, samples with "
        "their tokens, workers, hints and the plan. With several runs, plots have a line per experiment with a band over its seeds. "
        "On another machine: forward the port with ssh -L, and open the printed address there.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run directory, the one --save named")
    parser.add_argument(
        "--port", type=int, default=PORT, help=f"port on the loopback address (default: {PORT}; 0: a free one)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    chosen = parser.parse_all(argv)
    if not 0 <= chosen.port < 65536:
        raise parser.refuse(f"--port {chosen.port}: a port is between 0 and 65535", [*chosen.runs, "--port", str(PORT)])
    with WatchServer([Path(path) for path in chosen.runs], chosen.port) as server:
        server.runs.overview()
        print(server.url, flush=True)
        print(
            f"Ctrl-C ends it. On another machine: ssh -L {server.server_address[1]}:127.0.0.1:{server.server_address[1]} HOST",
            flush=True,
        )
        if chosen.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
