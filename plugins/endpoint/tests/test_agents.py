"""Agents: processes and functions, their results, and every way in which they fail: it costs their sample only."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from miles_core.plugin import ConfigError
from miles_endpoint import plugin
from miles_endpoint.agent import AgentFailed, FunctionAgent, ProcessAgent, Task, make_agent
from miles_speculative.checkpoint import with_mtp
from miles_testing.toy import toy_files

TASK = Task({"prompt": "a", "label": "b", "metadata": {"m": 1}, "sample": 3}, "http://127.0.0.1:9/v1", "sk-x", "policy")


def run(agent, timeout=20.0):
    async def main():
        async with asyncio.timeout(timeout):
            return await agent.run(TASK)

    return asyncio.run(main())


def python(code):
    return ProcessAgent([sys.executable, "-S", "-E", "-c", code])


def test_a_process_receives_its_row_and_its_key(monkeypatch):
    monkeypatch.setenv("MILES_RM_TOKEN", "secret")
    code = "import json, os, sys; row = json.loads(sys.stdin.read()); print('log'); print(json.dumps({'row': row, 'env': dict(os.environ)}))"
    result = run(python(code))
    assert result["row"] == TASK.row and "MILES_RM_TOKEN" not in result["env"]
    assert (result["env"]["OPENAI_BASE_URL"], result["env"]["OPENAI_API_KEY"]) == ("http://127.0.0.1:9/v1", "sk-x")
    assert result["env"]["OPENAI_MODEL"] == "policy" and "127.0.0.1" in result["env"]["NO_PROXY"]


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("print(0.5)", 0.5),
        ("print('no json')", None),
        ("", None),
        ("print([1])", None),
        ("print('x' * 10**7); print(1)", 1),
    ],
)
def test_the_result_is_the_last_line(code, result):
    assert run(python(code)) == result


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ValueError('bo\\nom')", "its process ended with status 1: om"),
        ("import sys; sys.exit(3)", "its process ended with status 3: no message"),
        ("import os; os.kill(os.getpid(), 9)", "its process ended with signal SIGKILL"),
    ],
)
def test_a_process_that_crashes(code, words):
    with pytest.raises(AgentFailed, match=words):
        run(python(code))


def test_a_process_that_hangs_ends_with_all_that_it_started(tmp_path):
    child = "import time; time.sleep(60)"
    code = (
        f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-S', '-c', {child!r}]); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )

    async def main():
        task = asyncio.ensure_future(python(code).run(TASK))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(main())
    _wait_until_gone(int((tmp_path / "pid").read_text()))


def test_a_process_that_leaves_another_behind(tmp_path):
    child = "import time; time.sleep(60)"
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-S', '-c', {child!r}]).pid)"
    _wait_until_gone(run(python(code)))


def _wait_until_gone(pid):
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return
        except OSError:
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} still runs")


def test_functions():
    async def slow(task):
        await asyncio.sleep(0)
        return threading.current_thread().name, task.row["sample"]

    assert run(FunctionAgent(lambda task: (threading.current_thread().name, task.api_key))) == ("agent", "sk-x")
    agent = FunctionAgent(slow)
    assert run(agent) == ("agents", 3)
    agent.stop()

    def broken(task):
        raise KeyError("k")

    async def left(task):
        sys.exit(2)

    with pytest.raises(AgentFailed, match="it raised KeyError: 'k'"):
        run(FunctionAgent(broken))
    for leaving in (left, lambda task: sys.exit(2)):
        with pytest.raises(AgentFailed, match="it raised SystemExit: 2"):
            run(FunctionAgent(leaving))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "--agent is empty"),
        ("'", '--agent "\'": No closing quotation'),
        ("no-such-program --x", "there is no program 'no-such-program' on the PATH"),
        ("no_such_module:run", "there is no module 'no_such_module'"),
        ("FILE:other", "has no function other; it has: agent"),
        ("missing.py:agent", "there is no file missing.py"),
    ],
)
def test_agents_that_do_not_exist(tmp_path, command, words):
    (tmp_path / "mine.py").write_text("def agent(task):\n    return 1\n\ndef _own():\n    pass\n")
    with pytest.raises(ConfigError, match=words):
        make_agent(command.replace("FILE", str(tmp_path / "mine.py")))


def test_agents_by_name(tmp_path, monkeypatch):
    (tmp_path / "my_agents.py").write_text("def agent(task):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert run(make_agent("my_agents:agent")) == run(make_agent("my_agents.py:agent")) == 1
    assert make_agent("python -c 'print(1)'").command == ["python", "-c", "print(1)"]


# ---- in a run


def post(task, path, body):
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(task.base_url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.loads(reply.read())


AGENT = """
import json, os, threading, time, urllib.request, urllib.error

def post(task, messages, **body):
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    data = json.dumps({"messages": messages, **body}).encode()
    request = urllib.request.Request(task.base_url + "/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.loads(reply.read())["choices"][0]["message"]

def agent(task):
    messages = [{"role": "user", "content": task.row["prompt"]}]
    BODY
"""
TURNS = """for turn in range(TIMES):
        messages += [post(task, messages, max_tokens=LENGTH), {"role": "user", "content": "on"}]
    return {"reward": task.row["sample"] % 4, "turn_rewards": [0, 1], "note": "ok"}"""


@pytest.fixture
def train(toy_run, tmp_path):
    """``train(body, **options)``: a toy run whose agent has this body."""

    def call(body=TURNS, plugins=("endpoint",), times=2, length=300, **options):
        code = AGENT.replace("BODY", body).replace("TIMES", str(times)).replace("LENGTH", str(length))
        (tmp_path / "mine.py").write_text(code)
        stops = ",".join(str(i) for i in range(100, 200))  # a random model ends its answers soon
        given = {
            "steps": 1, "generate": "endpoint", "agent": f"{tmp_path / 'mine.py'}:agent", "custom_rm_path": None, "rm_type": "agent",
            "rollout_max_response_len": 300, "rollout_stop_token_ids": stops, "rollout_max_context_len": 400, **options,
        }  # fmt: skip
        return toy_run(list(plugins), sizes={"max_position_embeddings": 512}, **given)

    return call


COUNTED = """note = "all"
    for turn in range(3):
        try:
            messages += [post(task, messages, max_tokens=LENGTH), {"role": "user", "content": "on"}]
        except urllib.error.HTTPError as error:
            note = json.loads(error.read())["error"]["message"]
            break
    return {"reward": task.row["sample"] % 4, "note": note}"""


@pytest.mark.parametrize("most", [1, 2, None])
def test_a_sample_has_at_most_the_answers_of_the_option(train, most):
    done = train(COUNTED, agent_max_turns=most, length=20)
    for sample in done.samples:
        assert len(sample["metadata"]["turns"]) == (most or 3)
        note = sample["metadata"]["agent"]["note"]
        assert note == "all" if most is None else f"it has had {most} answers, and --agent-max-turns is {most}" in note


def test_a_run_trains_what_the_agents_saw(train):
    done = train()
    metrics = done.metrics[0]
    assert (
        metrics["rollout/turns"] == 2.0 and metrics["mismatch/abs_log_prob"] < 1e-4 and metrics["endpoint/branches"] < 1
    )
    assert metrics["reward/mean"] == 1.5 and metrics["endpoint/crashed"] == 0 and metrics["endpoint/agent_seconds"] > 0
    assert {name for panel in plugin.panels for name in panel.lines if "*" not in name} <= metrics.keys()
    whole = [sample for sample in done.samples if len(sample["metadata"]["turns"]) == 2]
    assert whole
    for sample in whole:
        turns, mask = sample["metadata"]["turns"], sample["loss_mask"]
        assert [t["reward"] for t in turns] == [0.0, 1.0] and sample["metadata"]["agent"]["note"] == "ok"
        assert (
            sum(mask) == sum(t["end"] - t["start"] for t in turns)
            and mask[turns[0]["end"] : turns[1]["start"]].count(1) == 0
        )


def test_what_fails_costs_its_sample_only(train):
    body = """n = task.row["sample"]
    if n == 0:
        raise ValueError("lost")
    if n == 1:
        return {"reward": 1.0}
    post(task, messages, max_tokens=4)
    if n == 2:
        return {"reward": float("nan")}
    if n == 3:
        time.sleep(60)
    if n == 4:
        def late():
            try:
                post(task, messages)
            except urllib.error.HTTPError as error:
                assert error.code == 410
        threading.Thread(target=late, daemon=True).start()  # a request in flight at the end
    return n"""
    done = train(body, agent_timeout=1.5, reward_key=None)
    metrics = done.metrics[0]
    assert {s["index"] for s in done.samples} >= {4, 5, 6, 7} and not {s["index"] for s in done.samples} & {0, 1, 2, 3}
    for name, count in {"crashed": 1, "silent": 1, "no_reward": 1, "timed_out": 1}.items():
        assert metrics[f"endpoint/{name}"] == pytest.approx(
            count / (12 if metrics["rollout/samples"] == 8 else 8), rel=0.6
        ), name
    assert metrics["rollout/failed"] > 0.2 and not done.engine.rows


@pytest.fixture(scope="session")
def drafting_model(tmp_path_factory):
    """The model of ``train`` with an MTP layer, which drafts."""
    return with_mtp(toy_files(max_position_embeddings=512) / "model", tmp_path_factory.mktemp("drafting") / "model")


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param({"schedule": "async"}, marks=pytest.mark.thorough),
        {"partial_rollout": True, "over_sampling_batch_size": 3},
    ],
    ids=["async", "partial"],
)
def test_sessions_across_updates_with_routing_replay_drafts_and_importance_weights(train, drafting_model, schedule):
    """The policy hardly moves and its draft does: whichever update came in the middle of a session, of an answer even, the log-probs and the
    routing that the engine recorded are those that the trainer computes."""
    body = TURNS.replace('"on"}]', '"on"}]\n        time.sleep(0.02 * task.row["sample"])')
    done = train(
        body, times=3, steps=3, length=20, plugins=("endpoint", "r3", "tis", "speculative"), hf_checkpoint=drafting_model,
        max_concurrent_samples=6, lr=1e-9, draft_lr=1e-2, online_sft_interval=1,
        rollout_stop_token_ids=",".join(map(str, range(100, 120))), **schedule,
    )  # fmt: skip
    for metrics in done.metrics:
        assert metrics["mismatch/abs_log_prob"] < 1e-4 and metrics["r3/tokens_differing"] < 0.02
        assert metrics["tis/ess"] == pytest.approx(1.0, abs=1e-3) and metrics["rollout/failed"] == 0
    assert max(metrics.get("speculative/accept_rate", 0) for metrics in done.metrics) > 0
    assert any(metrics["rollout/stale_tokens"] > 0 for metrics in done.metrics)
    versions = [{version for _, version in sample["weight_versions"]} for sample in done.samples]
    assert max(map(len, versions)) > 1  # one session, several weight versions


def test_a_process_in_a_run(train, tmp_path):
    train(times=1, n_samples_per_prompt=2, rollout_batch_size=1)  # writes mine.py
    (tmp_path / "program.py").write_text(
        "import json, os, sys, types\nsys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))\nimport mine\n"
        "task = types.SimpleNamespace(row=json.loads(sys.stdin.readline()), base_url=os.environ['OPENAI_BASE_URL'], "
        "api_key=os.environ['OPENAI_API_KEY'])\nprint(json.dumps(mine.agent(task)))\n"
    )
    done = train(
        times=1, n_samples_per_prompt=2, rollout_batch_size=1, agent=f"{sys.executable} -S {tmp_path / 'program.py'}"
    )
    assert {s["reward"] for s in done.samples} == {0, 1} and done.metrics[0]["endpoint/crashed"] == 0


def test_plans(plan, train):
    with pytest.raises(Exception, match="there is no agent to run: give --agent"):
        plan(plugins=["endpoint"], generate="endpoint")
    with pytest.raises(Exception, match="agents are run by this rollout function only"):
        plan(plugins=["endpoint"], agent="python x.py")
    plan(plugins=["endpoint"], agent="python x.py", generate="endpoint")
    with pytest.raises(ConfigError, match="there is no program 'nothing-here'"):
        train(agent="nothing-here x")


def test_an_address_in_use(train):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"the endpoint cannot listen on 127.0.0.1:{port}"):
            train(endpoint_port=port)
