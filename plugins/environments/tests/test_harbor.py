"""Tasks of Harbor: the protocol with a small command, and trials of the real package in its own processes.

Harbor needs Python 3.12, so ``MILES_HARBOR`` names its command. A folder replaces the container, which needs a daemon.
"""

import json
import os
import shutil
import sys
import time

import pytest

from miles_core.plugin import ConfigError
from miles_environments.entry import read_entry
from miles_environments.environment import EnvironmentFault
from miles_environments.libraries import make_environment

HARBOR = os.environ.get("MILES_HARBOR")
COMMAND = f"""#!{sys.executable}
import json, sys, time, urllib.request
from pathlib import Path
assert sys.argv[1:3] == ["trial", "start"]
config = json.loads(Path(sys.argv[-1]).read_text())
task = Path(config["task"]["path"])
options = config["agent"]["kwargs"]
body = {{"messages": [{{"role": "user", "content": (task / "instruction.md").read_text()}}]}}
headers = {{"Authorization": "Bearer " + options["llm_kwargs"]["api_key"]}}
request = urllib.request.Request(options["api_base"] + "/chat/completions", json.dumps(body).encode(), headers)
try:
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
except OSError:
    answer = "closed"
except KeyboardInterrupt:
    answer = "interrupted"
if answer in ("closed", "interrupted"):
    try:
        time.sleep(60 * (answer == "closed"))
    except KeyboardInterrupt:
        pass
    (task / "interrupted").touch()
    sys.exit(1)
if answer == "crash":
    sys.exit("no container runtime")
result = {{"exception_info": {{"exception_type": "TestsError", "exception_message": "broken"}}}}
if answer != "broken":
    result = {{"verifier_result": {{"rewards": {{"reward": float(answer == "done"), "style": 0.5}}}}}}
place = Path(config["trials_dir"]) / config["trial_name"]
place.mkdir()
(place / "result.json").write_text(json.dumps(result))
"""
FOLDER = '''
import asyncio, re, shutil, tempfile
from pathlib import Path
from harbor.environments.base import BaseEnvironment, ExecResult

class Folder(BaseEnvironment):
    """A folder in place of a container: the paths of containers in commands are below it."""

    @staticmethod
    def type():
        return "folder"

    def _validate_definition(self):
        pass

    def _path(self, path):
        return Path(f"{self._root}{path}")

    async def start(self, force_build):
        self._root = tempfile.mkdtemp(dir=Path(__file__).parent)
        for name in ("app", "logs/verifier", "logs/agent", "logs/artifacts", "tests", "tmp"):
            self._path(f"/{name}").mkdir(parents=True)

    async def stop(self, delete):
        await self.exec("tmux kill-server")
        shutil.rmtree(self._root)

    async def upload_file(self, source_path, target_path):
        self._path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._path(target_path))

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self._path(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        shutil.copy(self._path(source_path), target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self._path(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None, **more):
        if re.search(r"\\binstall\\b", command):
            return ExecResult(stdout="", stderr="nothing is installed here", return_code=1)
        inside = re.sub(r"(?<![\\w.])/(app|logs|tests)\\b", lambda found: self._root + found[0], command)
        variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": self._root, "TMUX_TMPDIR": self._root, **(env or {})}
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", inside, cwd=self._path(cwd or "/app"), env=variables, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)
'''
TESTS = "if grep -q done $HOME/app/answer.txt; then echo 1; else echo 0; fi > $HOME/logs/verifier/reward.txt\n"


@pytest.fixture
def task(tmp_path):
    folder = tmp_path / "tasks" / "write-a-word"
    for name, text in (
        ("task.toml", 'version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n[agent]\ntimeout_sec = 120.0\n'),
        ("instruction.md", "Write the word done into /app/answer.txt."),
        ("environment/Dockerfile", "FROM debian:stable-slim\n"),
        ("tests/test.sh", f"#!/bin/bash\n{TESTS}"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def make(tmp_path, task):
    made = []

    def make(command, options=""):
        made.append(
            make_environment(read_entry(f"harbor:{task.parent}?harbor={command}{options}", "--environments"), 5)
        )
        return made[-1]

    yield make
    for environment in made:
        environment.close()


@pytest.fixture
def command(tmp_path):
    path = tmp_path / "harbor"
    path.write_text(COMMAND)
    path.chmod(0o755)
    return path


def wait_for(condition):
    for _ in range(200):
        if condition():
            return
        time.sleep(0.1)
    raise TimeoutError


def test_a_trial_is_an_episode(make, command):
    made = make(command)
    assert made.several_turns and made.length == 1 and made.task(0, 0).label == "write-a-word"
    for answer, reward in (("done", 1.0), ("nothing", 0.0)):
        episode = made.open(0, 0)
        assert episode.reset() == "Write the word done into /app/answer.txt."
        step = episode.step(answer)
        assert (step.text, step.reward, step.done) == ("", reward, True)
    styled = make(command, "&reward=style").open(0, 0)
    styled.reset()
    assert styled.step("done").reward == 0.5
    assert not made._endpoint.conversations


def test_trials_without_a_reward_fail(make, command):
    for answer, options, message in (
        ("crash", "", "harbor ended with code 1 and no result: no container runtime"),
        ("broken", "", r"the trial has no reward \(TestsError: broken\)"),
        (
            "done",
            "&reward=speed",
            r"the trial has the rewards \['reward', 'style'\], not 'speed'; select one with reward=NAME",
        ),
    ):
        episode = make(command, options).open(0, 0)
        episode.reset()
        with pytest.raises(EnvironmentFault, match=message):
            episode.step(answer)


def test_a_closed_episode_interrupts_its_trial(make, command, task):
    episode = make(command).open(0, 0)
    episode.reset()
    episode.close()
    wait_for((task / "interrupted").exists)


def test_refused_entries(make, command, tmp_path):
    for arguments, message in (
        (("/no/harbor",), "there is no command /no/harbor; install harbor"),
        ((command, "&config=missing.yaml"), "config=missing.yaml is not a file"),
        ((command, "&agent=x"), "has no option 'agent'"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(*arguments)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="there is no task"):
        make_environment(read_entry(f"harbor:{tmp_path / 'empty'}", "--environments"), 5)


@pytest.fixture
def real(make, tmp_path, monkeypatch):
    if HARBOR is None:
        pytest.skip("harbor is not installed")
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    containers = tmp_path / "containers"
    containers.mkdir()
    (containers / "folder_container.py").write_text(FOLDER)
    (tmp_path / "trial.json").write_text(json.dumps({"environment": {"import_path": "folder_container:Folder"}}))
    monkeypatch.setenv("PYTHONPATH", str(containers))
    return make(HARBOR, f"&config={tmp_path / 'trial.json'}&turns=6"), containers


def write(text, complete=False):
    commands = [{"keystrokes": f"echo {text} > /app/answer.txt\n", "duration": 0.5}] * (not complete)
    return json.dumps({"analysis": "", "plan": "", "commands": commands, "task_complete": complete})


@pytest.mark.parametrize("word, reward", [("done", 1.0), ("other", 0.0)])
def test_a_real_trial_with_terminus(real, word, reward):
    made, _ = real
    episode = made.open(0, 0)
    assert "Write the word done into /app/answer.txt." in episode.reset()
    assert "No valid JSON found" in episode.step("nonsense").text
    assert f"echo {word} >" in episode.step(write(word)).text
    assert "Are you sure" in episode.step(write(word, complete=True)).text
    end = episode.step(write(word, complete=True))
    episode.close()
    assert (end.reward, end.done) == (reward, True)


def test_a_real_trial_ends_at_the_end_of_the_run(real):
    made, containers = real
    made.open(0, 0).reset()
    running = [path for path in containers.iterdir() if (path / "app").is_dir()]
    assert len(running) == 1
    made.close()
    assert not running[0].exists()
