"""SGLang's process and a running server, without SGLang: a package of that name that does what a start can come to."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from miles_core.data import Encoded
from miles_core.engine import Request, Sampling
from miles_core.plugin import MilesError
from miles_sglang.answers import Answer
from miles_sglang.link import SglangError
from miles_sglang.process import ProcessLink
from miles_sglang.responses import Translator
from miles_sglang.server import ServerLink
from miles_workers.servers import ServerError
from miles_workers.transport import WeightNames

#: What ``import sglang`` finds in the spawned process; ``model_path`` says what becomes of the start.
PACKAGE = """
import asyncio, os, sys, time, types
__version__ = "0.5.17"

class Engine:
    def __init__(self, model_path, **arguments):
        print("Load weight begin", file=sys.stderr, flush=True)
        print("Ignore import error when loading a model", file=sys.stderr, flush=True)
        if model_path == "unknown":
            raise ValueError("Model architectures ['Nobody'] are not supported")
        if model_path == "large":
            print("torch.OutOfMemoryError: CUDA out of memory.", file=sys.stderr, flush=True)
            os.kill(os.getpid(), 9)
        if model_path == "small":
            print("ValueError: no memory is left; Raise --mem-fraction-static above 0.4", file=sys.stderr, flush=True)
            os.kill(os.getpid(), 9)
        if model_path == "taken":
            print("DistNetworkError: port: 58951, name: EADDRINUSE", file=sys.stderr, flush=True)
            print("[server] server_args=ServerArgs(mem_fraction_static=0.4)", file=sys.stderr, flush=True)
            os.kill(os.getpid(), 9)
        if model_path == "slow":
            time.sleep(60)
        self.server_args = types.SimpleNamespace(tp_size=2, enable_dp_attention=False)
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = self

    def auto_create_handle_loop(self):
        pass

    async def freeze_gc(self):
        print("frozen", flush=True)

    def _dispatch_to_scheduler(self, message):
        pass

    def shutdown(self):
        print("shut down", flush=True)

    def abort_request(self, rid):
        if rid == "die":
            print("Scheduler hit an exception: the last words", file=sys.stderr, flush=True)
            os._exit(3)
        if rid == "lose":
            print("Subprocess scheduler_0 (pid=7) crashed with exit code -9.", file=sys.stderr, flush=True)
            os._exit(3)
        raise ValueError("no such request")
"""


def link(tmp_path: Path, model: str, **options: Any) -> ProcessLink:
    package = tmp_path / "packages" / "sglang"
    engine = package / "srt" / "entrypoints" / "engine.py"
    engine.parent.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    engine.write_text('print("imported", flush=True)')
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    return ProcessLink({"model_path": model}, tmp_path / "sglang.log", environment={"PYTHONPATH": path}, **options)


def test_a_process_comes_up_answers_and_ends(tmp_path: Path) -> None:
    async def used() -> None:
        one = link(tmp_path, "good")
        info = await one.start()
        assert (info["version"], info["tp_size"]) == ("0.5.17", 2)
        with pytest.raises(SglangError, match="SGLang refused abort_request: no such request"):
            await one.call("abort_request", {"rid": "x"})
        pid = one._process.pid  # type: ignore[union-attr]
        await one.stop()
        await one.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(SglangError, match="was stopped"):
            await one.call("abort_request", {"rid": "x"})

    asyncio.run(used())
    said = (tmp_path / "sglang.log").read_text()
    assert 0 < said.index("frozen") < said.index("shut down")


def test_a_process_that_dies_is_named_with_its_last_words(tmp_path: Path) -> None:
    async def killed() -> tuple[str, float, str]:
        one = link(tmp_path, "good")
        await one.start()
        started = time.monotonic()
        with pytest.raises(SglangError) as under_way:
            await one.call("abort_request", {"rid": "die"})
        took = time.monotonic() - started
        with pytest.raises(SglangError, match="exit status 3"):
            await one.call("flush_cache", {})
        await one.restart({})
        with pytest.raises(SglangError) as again:
            await one.call("abort_request", {"rid": "lose"})
        await one.stop()
        return str(under_way.value), took, str(again.value)

    said, seconds, again = asyncio.run(killed())
    assert "exit status 3" in said and "the last words" in said and "sglang.log" in said and seconds < 5
    assert "ends (Subprocess scheduler_0 (pid=7) crashed with exit code -9)" in again and "the last words" not in again


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("unknown", r"SGLang did not start: ValueError: Model architectures \['Nobody'\].*does not support the model"),
        ("large", r"signal SIGKILL.*out of memory.*--sglang-mem-fraction-static"),
        ("small", r"signal SIGKILL.*do not fit into its share of the GPU: raise --sglang-mem-fraction-static"),
        ("taken", r"signal SIGKILL.*EADDRINUSE.*a port is already in use: choose others with --sglang-port"),
        ("slow", r"was not ready within 1 s \(--sglang-startup-timeout\)"),
    ],
)
def test_a_start_that_fails_says_why(tmp_path: Path, model: str, said: str) -> None:
    async def started() -> None:
        await link(tmp_path, model, startup_timeout=1.0 if model == "slow" else 60.0).start()

    with pytest.raises(SglangError, match=f"(?s){said}"):
        asyncio.run(started())


class _Handler(BaseHTTPRequestHandler):
    info: ClassVar[dict[str, Any]] = {"tp_size": 1, "model_path": "policy", "speculative_draft_model_path": None}

    def do_GET(self) -> None:
        known = self.path in ("/server_info", "/model_info")
        self.answer(self.info) if known else self.answer({}, 404, b"not\nhere")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/generate":
            self.answer({"error": {"message": "too long"}}, 400) if body.get("bad") else self.answer(
                {
                    "output_ids": [*body["input_ids"], 2],
                    "meta_info": {"finish_reason": {"type": "stop"}, "weight_version": "0"},
                }
            )
        else:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nCache flushed.")

    def answer(self, content: dict[str, Any], status: int = 200, text: bytes = b"") -> None:
        text = text or json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_running_server_is_asked_over_http(url: str) -> None:
    async def used() -> None:
        one = ServerLink(url + "/")
        assert (await one.start())["tp_size"] == 1
        assert (await one.generate({"input_ids": [1]})).columns["tokens"].tolist() == [1, 2]
        assert (await one.call("flush_cache", {}))["success"]
        with pytest.raises(ServerError, match=r"answered 400.*too long"):
            await one.generate({"bad": True})
        await one.stop()

    asyncio.run(used())


def test_a_server_that_is_not_there_or_another_one_is_named(url: str, monkeypatch: Any) -> None:
    def refused(said: str, url: str, **arguments: Any) -> None:
        with pytest.raises(ServerError, match=said):
            asyncio.run(ServerLink(url, 0.1, arguments).start())

    refused(r"--sglang-url http://127.0.0.1:9: no SGLang server answers there .*\[Errno 111\]", "http://127.0.0.1:9")
    refused(
        "server_info answered 404: not here; another program .*: give the address of an SGLang server",
        url + "/elsewhere",
    )
    refused(r"the server runs with tp_size = 1, and --sglang-tp-size of this run is 2", url, tp_size=2)
    monkeypatch.setattr(_Handler, "info", {"models": []})
    refused(f"--sglang-url {url}: the answer of server_info has no tp_size.*give the address of an SGLang server", url)


def test_a_server_must_have_room_for_the_adapters(url: str, monkeypatch: Any) -> None:
    has = {
        "enable_lora": True,
        "max_lora_rank": 16,
        "max_loaded_loras": None,
        "lora_target_modules": ["q_proj", "v_proj"],
    }
    monkeypatch.setattr(_Handler, "info", {**_Handler.info, **has})

    async def check(**needed: Any) -> None:
        link = ServerLink(url, arguments=needed)
        await link.start()
        await link.stop()

    asyncio.run(check(enable_lora=True, max_lora_rank=8, max_loaded_loras=5, lora_target_modules=["v_proj"]))
    for needed, flag in (
        ({"max_lora_rank": 32}, "--max-lora-rank 32"),
        ({"lora_target_modules": ["o_proj", "q_proj"]}, "--lora-target-modules o_proj q_proj"),
    ):
        with pytest.raises(ServerError, match=f"too little for the adapters of this run; start it with {flag}$"):
            asyncio.run(check(**needed))
    monkeypatch.setattr(_Handler, "info", {**_Handler.info, "enable_lora": False})
    with pytest.raises(ServerError, match=r"enable_lora = False, .*start it with --enable-lora$"):
        asyncio.run(check(enable_lora=True))


def test_a_server_with_a_draft_of_its_own_is_refused(url: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(_Handler, "info", {**_Handler.info, "speculative_draft_model_path": "small"})
    with pytest.raises(ServerError, match="drafts with small, and would load every weight update"):
        asyncio.run(ServerLink(url).start())


def test_an_mtp_layer_comes_whole_or_not_at_all() -> None:
    policy, draft = ["model.layers.0.w", "model.layers.1.w"], ["model.layers.2.eh_proj.weight", "model.layers.2.w"]
    copies = ["model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"]
    names = WeightNames("SGLang", [*policy, *draft, *copies], layers=2)

    def sent(*which: str) -> int:
        return len(list(names.check_all(Encoded(name, {}) for name in which)))

    assert (sent(*policy), sent(*policy, *draft), sent(*policy, *draft, *copies)) == (2, 4, 6)
    with pytest.raises(MilesError, match=r"model.layers.2.w did not arrive"):
        sent(*policy, draft[0])


def test_a_draft_of_its_own_has_the_weights_of_the_first_update() -> None:
    policy, draft = ["model.layers.0.w", "lm_head.weight"], ["draft.fc.weight", "draft.layers.0.w"]

    def sent(names: WeightNames, *which: str) -> int:
        return len(list(names.check_all(Encoded(name, {}) for name in which)))

    names = WeightNames("SGLang", policy, draft=True)
    assert sent(names, *policy, *draft) == sent(names, *policy, *draft) == 4
    with pytest.raises(MilesError, match=r"draft\.layers\.0\.w did not arrive"):
        sent(names, *policy, draft[0])
    with pytest.raises(MilesError, match=r"contains draft\.other, which"):
        sent(names, *policy, *draft, "draft.other")
    with pytest.raises(MilesError, match=r"contains draft\.fc\.weight, which"):
        sent(WeightNames("SGLang", policy), *policy, *draft)


def test_what_became_of_drafts_is_in_the_metrics() -> None:
    meta = {"finish_reason": {"type": "length"}, "weight_version": "3", "completion_tokens": 9}
    meta |= {"spec_verify_ct": 4, "spec_num_correct_drafts": 5, "spec_num_proposed_drafts": 8}
    answer = Answer.from_sglang({"output_ids": [7], "meta_info": {**meta, "spec_correct_drafts_histogram": [1, 1, 2]}})
    found = Translator(str, 8, 8).response(Request([5], Sampling(1)), answer, 1).metrics
    assert {k: found[k] for k in ("draft_steps", "drafted", "drafts_kept")} == {
        "draft_steps": 4,
        "drafted": 8,
        "drafts_kept": 5,
    }
    assert (found["accept_rate"], found["accept_length"]) == (5 / 8, 9 / 4)
    assert (found["accepted_to_1"], found["accepted_to_2"]) == (3 / 4, 2 / 4)
