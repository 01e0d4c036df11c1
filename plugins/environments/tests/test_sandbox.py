"""Sandboxes: limits of programs, Docker's command line, and rewards by unit tests."""

import asyncio
import os
import time

import pytest

from miles_core.config.load import load
from miles_core.plugin import ConfigError
from miles_environments.config import EnvironmentsConfig
from miles_environments.environment import EnvironmentFault
from miles_environments.sandbox import OUTPUT, LocalSandbox, make_sandbox
from miles_environments.unit_tests import find_program


def run(program, **limits):
    box = LocalSandbox(EnvironmentsConfig(**{"sandbox_seconds": 20.0, **limits}))
    return asyncio.run(box.run([box.python, "-I", "main.py"], {"main.py": program}))


def test_a_program_runs_in_a_directory_of_its_own(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    done = run(
        "import os, sys; print(os.listdir('.'), 'SECRET_TOKEN' in os.environ); print('e', file=sys.stderr); sys.exit(3)"
    )
    assert (done.code, done.timed_out) == (3, False) and sorted(done.output.splitlines()) == ["['main.py'] False", "e"]


def test_limits():
    started = time.monotonic()
    slow = run(
        "import subprocess, time; subprocess.Popen(['sleep', '55'], cwd='/'); time.sleep(50)",
        sandbox_seconds=1.0,
    )
    assert slow.timed_out and slow.code == -9 and time.monotonic() - started < 15
    big = run("x = bytearray(1 << 30)", sandbox_memory_mb=256)
    assert big.code == 1 and "MemoryError" in big.output
    loud = run(f"print('x' * {3 * OUTPUT})")
    assert loud.code == 0 and len(loud.output) == OUTPUT


def test_files_stay_inside():
    box = LocalSandbox(EnvironmentsConfig())
    for name in ("../a", "/a"):
        with pytest.raises(ValueError, match="is outside of the sandbox"):
            asyncio.run(box.run(["true"], {name: ""}))
    with pytest.raises(EnvironmentFault, match="cannot start"):
        asyncio.run(_broken(box))


async def _broken(box):
    from miles_environments import sandbox

    return await sandbox._run(["no-such-program"], 1, "/", {})


DOCKER = """#!/bin/sh
echo "$@" >> LOG
case $1 in
  version) exit CODE;;
  kill) exit 0;;
esac
for part in "$@"; do case $part in --volume=*) cd "${part#--volume=}" 2>/dev/null || cd "$(echo "${part#--volume=}" | cut -d: -f1)";; esac; done
while [ "$1" != IMAGE ]; do shift; done
shift
exec "$@"
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """``docker(code)``: a stand-in for Docker's program that records its arguments and runs the command here."""

    def install(code=0):
        path = tmp_path / "docker"
        path.write_text(
            DOCKER.replace("LOG", str(tmp_path / "log")).replace("CODE", str(code)).replace("IMAGE", "an-image")
        )
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path / "log"

    return install


def test_docker(docker):
    log = docker()
    box = make_sandbox(
        EnvironmentsConfig(sandbox="docker", sandbox_image="an-image", sandbox_seconds=2.0, sandbox_memory_mb=99)
    )
    done = asyncio.run(box.run(["cat", "a.txt"], {"a.txt": "hello"}))
    assert done.output == "hello" and done.code == 0
    assert "--memory=99m --cpus=1 --pids-limit=128 --network=none --cap-drop=ALL" in log.read_text()
    assert asyncio.run(box.run(["sleep", "30"])).timed_out
    name = next(word for word in log.read_text().splitlines()[-2].split() if word.startswith("--name="))
    assert log.read_text().splitlines()[-1] == f"kill {name[7:]}"
    with pytest.raises(EnvironmentFault, match="docker cannot run an-image"):
        asyncio.run(box.run(["sh", "-c", "exit 125"]))


@pytest.mark.parametrize("network", ["none", "host"])
def test_the_network_of_a_container(docker, network):
    log = docker()
    words = ["--hf-checkpoint", "x", "--environments", "toy:x", "--sandbox", "docker", "--sandbox-image", "an-image"]
    options = load([*words, "--sandbox-network", network]).plugin("environments")
    asyncio.run(make_sandbox(options).run(["true"]))
    assert f" --network={network} " in log.read_text().splitlines()[-1]
    with pytest.raises(ConfigError, match="--sandbox-network"):
        load([*words, "--sandbox-network", "bridge"])


def test_sandboxes_that_cannot_work(docker, monkeypatch, tmp_path):
    docker(1)
    with pytest.raises(ConfigError, match="docker version failed"):
        make_sandbox(EnvironmentsConfig(sandbox="docker"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(
        ConfigError, match="the program docker is not installed; install Docker, or give --sandbox local"
    ):
        make_sandbox(EnvironmentsConfig(sandbox="docker"))
    for name, message in (
        ("vm", "give local, docker, or module:Class"),
        ("json:dumps", "give local, docker"),
        ("no_module:A", "no_module"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_sandbox(EnvironmentsConfig(sandbox=name))


def test_a_sandbox_of_a_third_party(monkeypatch, tmp_path):
    (tmp_path / "their_box.py").write_text(
        "from miles_environments.sandbox import Sandbox\nclass Box(Sandbox):\n    async def run(self, command, files=None): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert type(make_sandbox(EnvironmentsConfig(sandbox="their_box:Box"))).__name__ == "Box"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("Sure:\n```python\na = 1\n```\nor\n```\na = 2\n```\n", "a = 2"),
        ("<think>```python\nno\n```</think>a = 3", "a = 3"),
        ("```python\na = 4", "a = 4"),
    ],
)
def test_the_program_of_a_response(text, program):
    assert find_program(text) == program


def test_rewards_by_unit_tests(toy_run, checkpoint, scripted, tmp_path):
    answers = iter(
        ["```python\ndef f(x): return x + 1\n```", "def f(x): return x", "import sys; sys.exit(0)", "", *["x = 1"] * 9]
    )
    scripted(lambda text: next(answers))
    (tmp_path / "p.jsonl").write_text('{"input": "write f", "label": "assert f(1) == 2"}\n')
    given = {"prompt_data": tmp_path / "p.jsonl", "label_key": "label", "custom_rm_path": None, "rollout_batch_size": 1}
    done = toy_run(
        ["environments"], hf_checkpoint=checkpoint, rm_type="unit_tests", rollout_max_response_len=64, steps=1, **given
    )
    assert sorted(sample["reward"] for sample in done.samples) == [0, 0, 0, 1]
