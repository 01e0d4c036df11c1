"""Resources servers of NeMo Gym: the protocol with a small server, and servers of the real package in a process of its own.

nemo-gym needs Python 3.12 and packages that conflict with other tests, so ``MILES_NEMO_GYM_PYTHON`` names an interpreter that has it.
"""

import json
import os
import subprocess
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from miles_core.plugin import ConfigError
from miles_environments.entry import read_entry
from miles_environments.environment import EnvironmentFault
from miles_environments.libraries import make_environment

PYTHON = os.environ.get("MILES_NEMO_GYM_PYTHON")
SERVE = """
import sys, uvicorn
from importlib import import_module
from unittest.mock import MagicMock
from nemo_gym.server_utils import ServerClient
module, server, config, port = sys.argv[1:]
app = import_module(f"resources_servers.{module}.app")
options = getattr(app, config, None)
if options is None:
    from nemo_gym.base_resources_server import BaseResourcesServerConfig as options
made = getattr(app, server)(
    config=options(host="127.0.0.1", port=int(port), entrypoint="", name=module), server_client=MagicMock(spec=ServerClient))
uvicorn.run(made.setup_webserver(), host="127.0.0.1", port=int(port), log_level="warning")
"""


class Server(BaseHTTPRequestHandler):
    """Counts to three with /step, or judges with /verify; a session is a cookie."""

    paths = ("/reset", "/step")
    sessions = 0

    def do_GET(self):
        self.reply({"paths": {path: {} for path in self.paths}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path in ("/reset", "/seed_session"):
            type(self).sessions += 1
            self.reply({"observation": "Count."}, f"session={self.sessions}:0")
        elif self.path == "/verify":
            text = body["response"]["output"][0]["content"][0]["text"]
            self.reply({"reward": float(text == body["answer"] and "session" in self.headers["Cookie"])})
        else:
            session, count = self.headers["Cookie"].removeprefix("session=").split(":")
            text = body["response"]["output"][0]["content"][0]["text"]
            if text == "crash":
                self.send_error(500)
                return
            ends = int(count) + 1 == 3
            self.reply({"observation": None if ends else "more", "reward": float(ends), "terminated": ends},
                       f"session={session}:{int(count) + 1}")  # fmt: skip

    def reply(self, body, cookie=""):
        self.send_response(200)
        if cookie:
            self.send_header("Set-Cookie", cookie)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(*paths):
        handler = type("Handler", (Server,), {"paths": paths or Server.paths})
        servers.append(HTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def make(url, path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return make_environment(read_entry(f"nemo_gym:{url}?rows={path}", "--environments"), 5)


def row(text, **more):
    return {"responses_create_params": {"input": [{"role": "developer", "content": text}]}} | more


def test_episodes_have_sessions(serve, tmp_path):
    made = make(serve(), tmp_path / "rows.jsonl", row("Rules."))
    assert made.several_turns and made.length == 1
    one, two = made.open(0, 0), made.open(0, 0)
    assert one.reset() == two.reset() == "Rules.\n\nCount."
    steps = [one.step("a"), two.step("a"), one.step("a"), one.step("a")]
    assert [(step.text, step.reward, step.done) for step in steps] == [("more", 0.0, False)] * 3 + [("", 1.0, True)]
    with pytest.raises(EnvironmentFault, match=r"/step answered 500"):
        two.step("crash")


def test_answers_are_verified(serve, tmp_path):
    made = make(serve("/verify", "/seed_session"), tmp_path / "rows.jsonl", row("1+1?", answer="2"))
    assert not made.several_turns
    assert made.task(0, 0).prompt == [{"role": "system", "content": "1+1?"}] and made.task(0, 0).label == "2"
    assert made.score(0, 0, ["2", "3", None]) == [1.0, 0.0, 0.0]


def test_errors_name_the_server_or_the_row(serve, tmp_path):
    path, url = tmp_path / "rows.jsonl", serve()
    tools = {"responses_create_params": {"input": "a", "tools": [{"name": "f"}]}}
    for rows, message in (
        ([{"question": "a"}], r"rows.jsonl:1 has no prompt"),
        ([row("a"), tools], r"rows.jsonl:2 has tools, and the answers here are texts"),
        ([], "has no rows"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(url, path, *rows)
    with pytest.raises(ConfigError, match="it is not a resources server"):
        make(serve("/other"), path, row("a"))
    with pytest.raises(ConfigError, match="it names no tasks; give the rows"):
        make_environment(read_entry(f"nemo_gym:{url}", "--environments"), 5)
    with pytest.raises(ConfigError, match=r"did not answer .*start the server before the run"):
        make("http://127.0.0.1:9", path, row("a"))


@pytest.fixture
def real(tmp_path):
    if PYTHON is None:
        pytest.skip("nemo-gym is not installed")
    processes = []

    def start(*words):
        port = str(20000 + os.getpid() % 10000 + len(processes))
        processes.append(subprocess.Popen([PYTHON, "-c", SERVE, *words, port], cwd=tmp_path))
        url = f"http://127.0.0.1:{port}"
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{url}/openapi.json").close()
                return url
            except OSError:
                assert processes[-1].poll() is None
                time.sleep(0.5)
        raise TimeoutError(url)

    yield start
    for process in processes:
        process.terminate()
        process.wait()


def test_blackjack_of_nemo_gym(real, tmp_path):
    made = make(real("blackjack", "BlackjackEnv", "-"), tmp_path / "rows.jsonl", row("You play Blackjack."))
    episode = made.open(0, 0)
    assert episode.reset().startswith("You play Blackjack.\n\nYour hand: [")
    step = episode.step("<action>stand</action>")
    assert step.done and step.reward in (-1.0, 0.0, 1.0)
    playing = made.open(0, 0)
    playing.reset()
    hits = [playing.step("<action>hit</action>")]
    while not hits[-1].done:
        hits.append(playing.step("<action>hit</action>"))
    assert hits[-1].reward == -1.0 and all("Your hand" in hit.text for hit in hits[:-1])


def test_multiple_choice_of_nemo_gym(real, tmp_path):
    url = real("mcqa", "MCQAResourcesServer", "MCQAResourcesServerConfig")
    question = row("A or B?", options=[{"A": "yes"}, {"B": "no"}], expected_answer="B")
    made = make(url, tmp_path / "rows.jsonl", question)
    assert made.score(0, 0, ["\\boxed{B}", "\\boxed{A}", None]) == [1.0, 0.0, 0.0]
