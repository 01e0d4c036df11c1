"""The server answers who knows the token and names this machine, with the page and the data of its runs and nothing else."""

import gzip
import json
import socket
import threading
from contextlib import contextmanager
from http.client import HTTPConnection
from urllib.parse import quote

import pytest

from miles_core.errors import MilesError
from miles_tools.commands.watch import run as command
from miles_tools.report.page import FILES
from miles_tools.samples.files import FILE
from miles_tools.watch import runs
from miles_tools.watch.server import WatchServer


def make_run(directory, steps=3, seed=1, lr=0.1, **more):
    directory.mkdir(parents=True, exist_ok=True)
    records = [{"step": s, "time": s, "reward/mean": s / 10 + seed, **more} for s in range(1, steps + 1)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (directory / "config.yaml").write_text(f"rollout: {{num_rollout: 9}}\ntrain: {{lr: {lr}, seed: {seed}}}\n")
    return directory


def add_samples(directory, step, rewards, **more):
    file = directory / FILE.format("train", step)
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"step": step, "index": i, "reward": r, "response": f"answer {i}", "pieces": ["a"] * (i + 1), **more}
        for i, r in enumerate(rewards)
    ]
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return file


class Client:
    def __init__(self, server):
        self.server, self.base = server, f"/{server.token}/"

    def raw(self, path, host="127.0.0.1", **headers):
        """The status, headers and body for a path as it is, without a client that normalises it."""
        connection = HTTPConnection("127.0.0.1", self.server.server_address[1], timeout=20)
        try:
            connection.putrequest("GET", path, skip_host=True, skip_accept_encoding=True)
            for name, value in ({} if host is None else {"Host": host} | headers).items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def get(self, path):
        status, _, body = self.raw(self.base + path)
        return status, json.loads(body) if body else None

    def overview(self):
        return self.get("overview")[1]


@contextmanager
def serve(*directories):
    with WatchServer(list(directories), port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Client(server)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def client(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "_PAUSE", 0)  # reads the files again immediately
    directory = make_run(tmp_path / "run")
    add_samples(directory, 2, [0.0, 1.0])
    (directory / "secret.txt").write_text("hidden")
    with serve(directory) as client:
        yield client


def test_the_page_and_its_files_have_types_and_a_policy(client):
    for name, kind in FILES.items():
        status, headers, body = client.raw(client.base + name)
        assert status == 200 and headers["Content-Type"] == kind and body
        assert "default-src 'none'" in headers["Content-Security-Policy"] and headers["Cache-Control"] == "no-store"
        assert "unsafe" not in headers["Content-Security-Policy"] and headers["Referrer-Policy"] == "no-referrer"
    status, headers, body = client.raw(client.base + "uPlot.js", **{"Accept-Encoding": "gzip"})
    assert headers["Content-Encoding"] == "gzip" and b"uPlot" in gzip.decompress(body)


def test_only_the_token_opens_the_page(client):
    token = client.server.token
    assert len(token) >= 24
    for path in (
        "/",
        "//",
        "/overview",
        f"/{token[:-1]}/",
        f"/{token}x/",
        f"/x/{token}/",
        "/%00/",
        "/%C3%A9/",
    ):
        status, _, body = client.raw(path)
        assert status == 403 and b"token" in body and token.encode() not in body, path
    status, headers, _ = client.raw(f"/{token}")
    assert status == 301 and headers["Location"] == f"{token}/"


def test_a_page_elsewhere_cannot_reach_it_under_another_name(client):
    for host in (
        "evil.example",
        "evil.example:8790",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "",
        None,
        "0.0.0.0",
    ):
        assert client.raw(client.base, host=host)[0] == 403, host
    for host in ("localhost", "localhost:9999", "127.0.0.1:1", "[::1]:8790", "[::1]"):
        assert client.raw(client.base, host=host)[0] == 200, host


@pytest.mark.parametrize(
    "path",
    [
        "secret.txt",
        "../secret.txt",
        "..%2fsecret.txt",
        "%2e%2e/metrics.jsonl",
        "metrics.jsonl",
        "x/style.css",
        "page.html",
        "/etc/passwd",
    ],
)
def test_no_other_file_is_reachable(client, path):
    status, _, body = client.raw(client.base + path)
    assert status == 404 and json.loads(body) == {"problem": "there is no such page"}


def test_only_gets_are_answered(client):
    connection = HTTPConnection("127.0.0.1", client.server.server_address[1], timeout=20)
    connection.request("POST", client.base + "overview", b"x")
    assert connection.getresponse().status == 501
    connection.close()


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("samples?run=0&kind=train&step=1", "samples of step 1 are not on disk"),
        ("samples?run=0&kind=..&step=2", "not on disk"),
        ("samples?run=1&kind=train&step=2", "run=1: this server has 1 runs"),
        ("samples?run=-1&kind=train&step=2", "run='-1': a number is needed"),
        ("samples?run=0&kind=train&step=%D9%A2", "a number is needed"),
        ("sample?run=0&kind=train&step=2&row=2", "step 2 has no sample 2: it has 2"),
        ("sample?run=0&kind=train&step=2", "row='': a number is needed"),
        ("image?run=0&kind=train&step=2&row=0&number=0", "has no image number 0"),
    ],
)
def test_bad_queries_are_one_sentence(client, query, problem):
    status, found = client.get(query)
    assert status == 404 and problem in found["problem"]


def test_samples_are_listed_searched_and_shown(client):
    _, entries = client.get("samples?run=0&kind=train&step=2")
    assert [(e["row"], e["reward"], e["length"]) for e in entries] == [(0, 0.0, 1), (1, 1.0, 2)]
    assert [e["row"] for e in client.get("samples?run=0&kind=train&step=2&text=" + quote("ANSWER 1"))[1]] == [1]
    assert client.get("sample?run=0&kind=train&step=2&row=1")[1]["pieces"] == ["a", "a"]


def test_a_run_is_followed_while_it_writes(client):
    directory = client.server.runs.runs[0].directory
    first = client.overview()
    assert first["runs"][0]["status"]["text"].startswith("Not running: 3 of 9 steps are complete")
    assert client.get(f"overview?have={first['version']}") == (204, None)
    line = json.dumps({"step": 4, "time": 4, "reward/mean": 7.5}) + "\n"
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(line[:20])  # the run is writing
    assert client.overview()["runs"][0]["rows"][0][2] == "1.3"
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(line[20:])
    add_samples(directory, 4, [1.0])
    found = client.overview()
    assert found["version"] != first["version"] and found["runs"][0]["rows"][0][2] == "7.5"
    assert found["runs"][0]["steps"]["train"] == [2, 4]
    make_run(directory, 2)  # it continues from step 2
    assert client.overview()["runs"][0]["rows"][0][2] == "1.2"


def test_damage_is_shown_and_the_rest_stays(client):
    directory = client.server.runs.runs[0].directory
    client.overview()
    with (directory / "metrics.jsonl").open("a") as file:
        file.write("no record\n")
    run = client.overview()["runs"][0]
    assert run["problem"].startswith("line 4 of ") and run["rows"][0][2] == "1.3"
    assert client.overview()["runs"][0]["problem"]
    make_run(directory)
    assert client.overview()["runs"][0]["problem"] == ""
    file = directory / FILE.format("train", 2)
    file.write_bytes(file.read_bytes()[:-5])
    status, found = client.get("samples?run=0&kind=train&step=2")
    assert status == 404 and "the samples of that step are damaged" in found["problem"]


def test_no_credential_leaves(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "Q7zSecretOfThisTest99")
    directory = make_run(tmp_path / "run")
    (directory / "config.yaml").write_text("run: {name: Q7zSecretOfThisTest99}\n")
    add_samples(directory, 1, [1.0], prompt='call "https://host/?token=abc\\"')
    with serve(directory) as client:
        assert b"Q7zSecret" not in client.raw(client.base + "overview")[2]
        assert client.get("sample?run=0&kind=train&step=1&row=0")[1]["prompt"].startswith(
            'call "https://host/?token=<redacted>'
        )


def test_seeds_share_a_band_and_experiments_have_lines(tmp_path):
    seeds = [make_run(tmp_path / f"s{seed}", seed=seed) for seed in (1, 2, 4)]
    with serve(*seeds) as client:
        found = client.overview()
    assert [group["label"] for group in found["groups"]] == ["3 seeds"]
    (line,), plot = found["sections"][0]["plots"][0]["lines"], found["sections"][0]["plots"][0]
    assert plot["x"] == [1, 2, 3] and line["low"] == [1.1, 1.2, 1.3] and line["high"] == [4.1, 4.2, 4.3]
    assert line["mid"] == pytest.approx([2.4333, 2.5333, 2.6333]) and [run["label"] for run in plot["each"]] == [
        "s1",
        "s2",
        "s4",
    ]
    with serve(*seeds, make_run(tmp_path / "other", lr=0.5)) as client:
        found = client.overview()
    assert [(g["label"], len(g["runs"])) for g in found["groups"]] == [("train.lr 0.1", 3), ("other", 1)]
    assert [line["label"] for line in found["sections"][0]["plots"][0]["lines"]] == ["train.lr 0.1", "other"]
    assert found["differences"] == [["train.lr", ["0.1"] * 3 + ["0.5"]], ["train.seed", ["1", "2", "4", "1"]]]


def test_long_runs_are_down_sampled_and_keep_their_extremes(tmp_path):
    directory = make_run(tmp_path / "run", 5000)
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    lines[3210] = json.dumps({"step": 3211, "time": 1, "reward/mean": 1e6})
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with serve(directory) as client:
        plot = client.overview()["sections"][0]["plots"][0]
    (line,) = plot["lines"]
    assert len(plot["x"]) == len(line["mid"]) <= 600 and max(line["high"]) == 1e6


def test_bad_starts_are_one_sentence(tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(MilesError, match="nowhere: no such directory"):
        command([str(tmp_path / "nowhere")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(MilesError, match="is not a run directory: it has neither"):
        command([str(tmp_path / "empty")])
    with pytest.raises(MilesError, match="this run is given twice"):
        command([str(run), str(run)])
    with pytest.raises(MilesError, match="a port is between 0 and 65535"):
        command([str(run), "--port", "70000"])
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(MilesError, match=f"port {port} is in use .*choose another one: --port {port + 1}"):
            command([str(run), "--port", str(port)])
    for version in ("99.1.0", "99rc1"):
        (run / "plan.json").write_text(json.dumps({"core": version}))
        with pytest.raises(
            MilesError, match=rf"was written by miles-core {version}, and this .*install miles-core {version}$"
        ):
            command([str(run)])


def test_the_names_of_the_files_are_those_of_core():
    from miles_core.mismatch import budget
    from miles_core.run import ending
    from miles_tools.report import reading

    assert (reading.BUDGET_FILE, reading.ENDING) == (budget.BUDGET_FILE, ending.ENDING)
