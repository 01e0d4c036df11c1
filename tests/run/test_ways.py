from __future__ import annotations

import sys

from miles_core.cli import main as cli
from miles_core.errors import DataError
from miles_core.train import rank
from miles_testing.doubles import apart
from miles_testing.toy import toy_arguments
from tests.ways import ErrorTrace


def test_error(monkeypatch, capsys, tmp_path):
    trace = ErrorTrace()
    def learn(self, share, step):
        error = DataError("a bad sample")
        trace.begin(error)
        raise error
    monkeypatch.setattr(rank.Rank, "learn", learn)
    try:
        code = cli.main(["train", *toy_arguments([str(apart.__file__)], tmp_path/"run", runtime="apart")])
    finally:
        sys.settrace(None)
    print(capsys.readouterr().err)
    print("\n".join(trace.stops))
    assert 0
