"""An engine on two machines: both parts are placed, a lost part costs one replacement of the whole engine, and the run goes on."""

from __future__ import annotations

import pytest

from miles_testing import toy_run

#: An embedded engine whose further parts compute nothing. The last batch of the second step kills the part on the other machine.
SPREAD = r"""
import json, os, re, signal
from pathlib import Path
from miles_core.plugin import Plugin, hookimpl
from miles_embedded import make_engine, plugin as EMBEDDED
from miles_embedded.engine.engine import EmbeddedEngine

plugin = Plugin(
    "spread", "the embedded engine as the first of several parts", "0", "~=0.1", hooks={"": ""}, provides={"engine": {"spread": "make"}},
    capabilities={"engine": (*EMBEDDED.capabilities["engine"], "span")},
)
FOUND = Path(__file__).parent

class Spread(EmbeddedEngine):
    def span(self, machines, index, address):
        self.index = index
        with (FOUND / "spans").open("a") as file:
            file.write(json.dumps([machines, index, address, os.getpid()]) + "\n")

    async def start(self):
        if self.index == 0:
            await super().start()

def make(run, policy):
    engine = make_engine(run, policy)
    engine.__class__ = Spread
    return engine

@hookimpl
def on_batch(run, batch):
    if run.step == 1 and not (FOUND / "killed").exists():
        (FOUND / "killed").touch()
        text = (run.directory / "workers/engine-0-part-1.log").read_text()
        os.kill(int(re.findall(r"process (\d+) on", text)[-1]), signal.SIGKILL)
"""


@pytest.mark.thorough
def test_an_engine_on_two_machines_survives_the_loss_of_a_part(cluster, tmp_path):
    (tmp_path / "spread.py").write_text(SPREAD)
    done = toy_run(
        [str(tmp_path / "spread.py")],
        directory=tmp_path / "run",
        steps=4,
        runtime="ray",
        engine="spread",
        rollout_num_gpus=4,
        rollout_num_gpus_per_engine=4,
        worker_heartbeat=3.0,
        log_level="info",
    )
    assert len(done.metrics) == 4
    spans = [line.split(", ") for line in (tmp_path / "spans").read_text().splitlines()]
    assert sorted(int(index) for _, index, *_ in spans) == [0, 0, 1, 1]
    assert {address for _, index, address, _ in spans[:2]} == {spans[0][2]} and len({pid for *_, pid in spans}) == 4
    log = (tmp_path / "run" / "run.log").read_text()
    assert "worker engine-0 was lost: a part of it on another machine was lost: its process died" in log
