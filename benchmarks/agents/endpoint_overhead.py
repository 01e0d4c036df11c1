"""What the endpoint adds to a turn: microseconds of CPU per turn and bytes per session, with doubles as engine and agents.

``--part turns`` sends chat requests over HTTP from this process to a server in another one, whose engine answers at once: CPU seconds of the server's
process per turn, and the latency of a turn, at several numbers of concurrent sessions. All of them send without a pause, so the latency of
many is the time of all their requests together. ``--part sessions`` holds many sessions open at once in one new process, without sockets, and
reports CPU and memory per session, after all have had the same number of turns; the last of them have four times as many turns. ``--part
stall`` lets agents think for log-normal times (sigma 1, median 0.25 s) and reports how much longer each took than it thought.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import multiprocessing
import os
import random
import statistics
import time
from importlib.util import find_spec
from typing import Any

import psutil

from benchmarks.measure import finish, installed, options
from miles_core.data import Renderer, Sample
from miles_core.engine import Response, Sampling
from miles_core.plugin import GenerationClient
from miles_endpoint.answer import AnswerReader
from miles_endpoint.server import Server
from miles_endpoint.service import Models
from miles_endpoint.session import Limits, Session
from miles_endpoint.testing import CALL, CHATML, TOOLS, make_tokenizer

#: Turns that a number of sessions is measured with, at least.
TURNS = 4096


class Double:
    """An engine that always answers the same, at once."""

    def __init__(self) -> None:
        self.tokenizer = make_tokenizer(CHATML)
        self.renderer = Renderer(self.tokenizer)
        self.reader = AnswerReader(self.renderer)
        self.tokens = self.tokenizer.encode(CALL, add_special_tokens=False)
        self.log_probs = [-0.5] * len(self.tokens)

    async def generate(self, tokens: list[int], sampling: Sampling, policy: str) -> Response:
        return Response(list(self.tokens), list(self.log_probs), "stop", CALL, [(0, 1)])

    def session(self, number: int) -> Session:
        ask = GenerationClient(
            Sample(index=number, tokens=[1]),
            "policy",
            self.generate,
            Sampling(64),
            self.tokenizer,
            self.renderer,
            lambda ids: "",
        )
        return Session(ask, self.reader, Limits())


def next_messages(messages: list[dict[str, Any]], answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The history after an answer, with the results of its calls."""
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in answer.get("tool_calls", ())]
    return [*messages, answer, *results]


# ---- turns over HTTP


def serve(sessions: int, pipe: Any) -> None:
    """Serve ``sessions`` sessions until told to end."""

    async def main() -> None:
        double, server = Double(), Server(Models({"default": ""}), "127.0.0.1", 0, 2**25)
        await server.start()
        tokens = [server.open(double.session(i)) for i in range(sessions)]
        pipe.send((server.url, tokens, os.getpid()))
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        for token in tokens:
            await server.close(token)
        await server.stop()

    asyncio.run(main())


async def client(url: str, token: str, turns: int, latencies: list[float]) -> None:
    """One agent: a connection that is kept, and ``turns`` requests in succession."""
    host, port = url.removeprefix("http://").split("/")[0].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    messages = [{"role": "user", "content": "What is 1 + 2?"}]
    for _ in range(turns):
        body = json.dumps({"model": "default", "messages": messages, "tools": TOOLS}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(body)}\r\n\r\n"
        started = time.perf_counter()
        writer.write(head.encode() + body)
        status = await reader.readline()
        assert b"200" in status, status
        length = 0
        while (line := await reader.readline()) != b"\r\n":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        answer = json.loads(await reader.readexactly(length))
        latencies.append(time.perf_counter() - started)
        messages = next_messages(messages, answer["choices"][0]["message"])
    writer.close()


def measure_turns(sessions: int, turns: int) -> dict[str, float]:
    """Serve ``sessions`` conversations of ``turns`` turns at a time, one group after the other, at least ``TURNS`` turns in total."""
    groups = max(1, TURNS // (sessions * turns))
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(sessions * groups, theirs))
    process.start()
    url, tokens, pid = ours.recv()
    latencies: list[float] = []

    async def main() -> None:
        for first in range(0, len(tokens), sessions):
            await asyncio.gather(*(client(url, token, turns, latencies) for token in tokens[first : first + sessions]))

    def used() -> float:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)

    before = used()
    asyncio.run(main())
    spent = used() - before
    ours.send(None)
    process.join()
    return {
        "sessions": sessions,
        "turns": turns,
        "cpu_microseconds_per_turn": round(1e6 * spent / len(latencies), 1),
        "median_latency_ms": round(1e3 * statistics.median(latencies), 2),
    }


# ---- many sessions in one process


async def post(server: Server, token: str, body: bytes) -> dict[str, Any]:
    """Send a request to the application, without a socket."""
    head = [(b"authorization", b"Bearer " + token.encode()), (b"content-length", str(len(body)).encode())]
    scope = {"path": "/v1/chat/completions", "method": "POST", "headers": head}
    incoming, raw, forever = [{"type": "http.request", "body": body}], [], asyncio.get_running_loop().create_future()

    async def receive() -> Any:
        return incoming.pop() if incoming else await forever

    async def send(message: Any) -> None:
        raw.append(message.get("body", b""))

    await server._serve(scope, receive, send)
    forever.cancel()
    return dict(json.loads(b"".join(raw)))


def measure_sessions(sessions: int, turns: int) -> dict[str, float]:
    """Measure in a new process, whose memory holds nothing else."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(hold_sessions, (sessions, turns))


def hold_sessions(sessions: int, turns: int) -> dict[str, float]:
    """Hold sessions twice: the first ones, which are few, load what all sessions share."""
    asyncio.run(_hold_sessions(10, turns))
    return asyncio.run(_hold_sessions(sessions, turns))


async def _hold_sessions(sessions: int, turns: int) -> dict[str, float]:
    double, server = Double(), Server(Models({"default": ""}), "127.0.0.1", 0, 2**25)
    process = psutil.Process()
    gc.collect()
    resident = process.memory_info().rss
    tokens = [server.open(double.session(i)) for i in range(sessions)]
    spent = 0.0
    length = 0
    messages = [{"role": "user", "content": "What is 1 + 2?"}]
    for _ in range(turns):  # every session has the same history, so the clients' memory does not count
        body = json.dumps({"model": "default", "messages": messages, "tools": TOOLS}).encode()
        started = time.process_time()
        replies = [await post(server, token, body) for token in tokens]
        spent += time.process_time() - started
        length = replies[0]["usage"]["total_tokens"]
        messages = next_messages(messages, replies[0]["choices"][0]["message"])
        del replies
    gc.collect()
    grown = process.memory_info().rss - resident
    for token in list(server.sessions):
        await server.close(token)
    return {
        "sessions": sessions,
        "turns": turns,
        "tokens_per_session": length,
        "cpu_microseconds_per_turn": round(1e6 * spent / (sessions * turns), 1),
        "kilobytes_per_session": round(grown / sessions / 1e3, 2),
        "bytes_per_token": round(grown / sessions / length, 1),
    }


# ---- slow agents


async def measure_stall(sessions: int, turns: int) -> dict[str, float]:
    double, server, draw = Double(), Server(Models({"default": ""}), "127.0.0.1", 0, 2**25), random.Random(0)
    thinking = [[0.25 * math.exp(draw.gauss(0, 1)) for _ in range(turns)] for _ in range(sessions)]

    async def agent(token: str, pauses: list[float]) -> float:
        """Returns the seconds that were not spent thinking."""
        messages = [{"role": "user", "content": "What is 1 + 2?"}]
        started = time.perf_counter()
        for pause in pauses:
            body = json.dumps({"model": "default", "messages": messages, "tools": TOOLS}).encode()
            answer = await post(server, token, body)
            messages = next_messages(messages, answer["choices"][0]["message"])
            await asyncio.sleep(pause)
        return time.perf_counter() - started - sum(pauses)

    tokens = [server.open(double.session(i)) for i in range(sessions)]
    started, cpu = time.perf_counter(), time.process_time()
    waited = await asyncio.gather(*(agent(token, pauses) for token, pauses in zip(tokens, thinking, strict=True)))
    return {
        "sessions": sessions,
        "turns": turns,
        "seconds": round(time.perf_counter() - started, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "fastest_thinks": round(min(map(sum, thinking)), 2),
        "slowest_thinks": round(max(map(sum, thinking)), 2),
        "median_wait_seconds": round(statistics.median(waited), 3),
        "longest_wait_seconds": round(max(waited), 3),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--part", choices=("turns", "sessions", "stall", "all"), default="all")
    parser.add_argument("--concurrency", default="1,64,1024")
    parser.add_argument("--sessions", default="100,1000,10000")
    parser.add_argument("--stall-sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    given = parser.parse_args()
    result: dict[str, Any] = {}
    if given.part in ("turns", "all"):
        result["turns"] = [measure_turns(n, given.turns) for n in map(int, given.concurrency.split(","))]
        print(result["turns"], flush=True)
    if given.part in ("sessions", "all"):
        counts = [int(n) for n in given.sessions.split(",")]
        result["sessions"] = [measure_sessions(n, given.turns) for n in counts]
        result["sessions"].append(measure_sessions(max(1, counts[-1] // 10), 4 * given.turns))
        print(result["sessions"], flush=True)
    if given.part in ("stall", "all"):
        result["stall"] = asyncio.run(measure_stall(given.stall_sessions, given.turns))
        print(result["stall"], flush=True)
    parsers = [name for name in ("httptools", "h11") if find_spec(name)]  # uvicorn takes the first that is installed
    finish("endpoint_overhead", result, given.save, lambda: installed("miles-core", "uvicorn", *parsers))


if __name__ == "__main__":
    main()
