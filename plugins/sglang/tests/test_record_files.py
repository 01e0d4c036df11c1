"""Records of routed experts that pass SGLang's processes as references to files."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import stat
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_routes import SENDER, SILENT

from miles_sglang import inside, record_files
from miles_sglang.answers import Answer
from miles_sglang.link import SglangError
from miles_sglang.process import ProcessLink
from miles_sglang.record_files import RecordReader, RecordWriter, remove_abandoned

RECORDS = [np.arange(n * 6, dtype=np.uint8).reshape(n, 3, 2) for n in (4, 0, 7)]


@pytest.fixture
def reader(tmp_path: Path) -> Any:
    made = RecordReader("uint8", tmp_path)
    yield made
    made.close()


def as_sent(reference: bytes) -> np.ndarray:
    return np.frombuffer(reference, np.uint8)


def files(reader: RecordReader) -> list[str]:
    return sorted(path.name for path in reader.directory.iterdir())


@pytest.mark.parametrize("dtype", ["uint8", "int32"])
def test_the_records_of_a_step_are_one_file_that_exists_until_all_were_read(dtype: str, tmp_path: Path) -> None:
    reader = RecordReader(dtype, tmp_path)
    assert stat.S_IMODE(reader.directory.stat().st_mode) == 0o700
    records = [record.astype(dtype) for record in RECORDS]
    references = RecordWriter(reader.directory).write(records)
    assert len(files(reader)) == 1 and max(map(len, references)) <= 40
    for at in (2, 0, 1):
        assert len(files(reader)) == 1
        found = reader.read(as_sent(references[at]))
        assert found.dtype == dtype and np.array_equal(found.reshape(records[at].shape), records[at])
    assert not files(reader) and not reader._files
    reader.close()
    assert not list(tmp_path.iterdir())


def test_records_from_the_schedulers_reach_the_run_through_sglangs_processes(
    reader: RecordReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The detokenizer of an installed SGLang encodes the references; without one, the same expression."""
    try:
        from sglang.srt.managers.detokenizer_manager import DetokenizerManager

        encode = DetokenizerManager._b64_encode_per_request
    except ImportError:

        def encode(items: Any) -> list[str]:
            return [base64.b64encode(item.numpy().tobytes()).decode() for item in items]

    monkeypatch.setenv(inside.VARIABLE, "uint8")
    monkeypatch.setattr(inside, "_writer", RecordWriter(reader.directory))
    kept = torch.full((2, 3, 2), 9, dtype=torch.int32)  # of a request that was retracted after two tokens
    requests = [types.SimpleNamespace(routed_experts=None) for _ in RECORDS] + [
        types.SimpleNamespace(routed_experts=None, miles_routes=kept)
    ]
    taken = iter([*RECORDS, RECORDS[0]])

    def collect(processor: Any, request: Any) -> None:
        request.routed_experts = torch.from_numpy(next(taken).astype(np.int32))

    for pickles in (True, False):
        monkeypatch.setattr(inside, "_pickles", pickles)
        taken = iter([*RECORDS, RECORDS[0]])
        for request in requests:
            inside.complete_routes(collect, None, request)
        inside.send_routes(SENDER)
        assert len(files(reader)) == 1
        texts = encode(pickle.loads(pickle.dumps([request.routed_experts for request in requests])))
        answers = [
            Answer.from_sglang({"output_ids": [1], "meta_info": {"routed_experts": text}}, "uint8") for text in texts
        ]
        found = [reader.read(answer.columns["routes"]) for answer in answers]
        expected = [*RECORDS, np.concatenate([kept.numpy().astype(np.uint8), RECORDS[0][2:]])]
        assert [f.tolist() for f in found] == [e.ravel().tolist() for e in expected] and not files(reader)


def test_a_scheduler_that_does_not_send_writes_nothing(reader: RecordReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(inside.VARIABLE, "uint8")
    monkeypatch.setattr(inside, "_writer", RecordWriter(reader.directory))
    request = types.SimpleNamespace(routed_experts=None)
    inside.complete_routes(lambda _, r: setattr(r, "routed_experts", torch.zeros(1, 1, 1)), None, request)
    inside.send_routes(SILENT)
    assert not files(reader) and not inside._finished


@pytest.mark.parametrize("damage", ["removed", "shorter", "longer", "another reference"])
def test_a_missing_or_damaged_file_is_an_error_of_each_request(reader: RecordReader, damage: str) -> None:
    references = RecordWriter(reader.directory).write(RECORDS)
    path = next(reader.directory.iterdir())
    if damage == "removed":
        path.unlink()
    elif damage == "another reference":
        references = [reference[:20] for reference in references]
    else:
        os.truncate(path, path.stat().st_size + (1 if damage == "longer" else -1))
    for reference in references:
        with pytest.raises(
            SglangError, match=r"record of routed experts of a response cannot be read.*generate the response again"
        ):
            reader.read(as_sent(reference))
    later = RecordWriter(reader.directory).write(RECORDS)
    assert np.array_equal(reader.read(as_sent(later[0])), RECORDS[0].ravel())


def test_a_reference_does_not_lead_out_of_the_directory(reader: RecordReader, tmp_path: Path) -> None:
    (secret := tmp_path / "secret").write_bytes(bytes(10))
    for name in (b"../secre", b"../../se"):
        with pytest.raises(SglangError, match="cannot be read"):
            reader.read(as_sent(record_files._REFERENCE.pack(name, 0, 10, 10, 1)))
    assert secret.exists()


@pytest.mark.parametrize("reason", ["files", "bytes", "full"])
def test_records_follow_their_references_if_no_file_can_be_written(
    reader: RecordReader, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    writer = RecordWriter(reader.directory)
    first = writer.write(RECORDS)
    if reason == "full":
        monkeypatch.setattr(writer, "directory", reader.directory / "absent")
    else:
        monkeypatch.setattr(record_files, f"MOST_{reason.upper()}", 1 if reason == "files" else 130)
    for _ in range(2):
        second = writer.write([record[::-1].copy() for record in RECORDS])
        assert len(files(reader)) == 1
        assert [reader.read(as_sent(r)).tolist() for r in second] == [r[::-1].ravel().tolist() for r in RECORDS]
    assert caplog.text.count("records of routed experts are sent in answers") == 1
    assert [reader.read(as_sent(r)).tolist() for r in first] == [r.ravel().tolist() for r in RECORDS]
    if reason != "full":  # space again
        assert max(map(len, writer.write(RECORDS))) <= 40 and len(files(reader)) == 1


def test_directories_of_ended_processes_are_removed_and_those_of_others_are_kept(
    reader: RecordReader, tmp_path: Path
) -> None:
    program = f"from pathlib import Path; from miles_sglang.record_files import *; r = RecordReader('uint8', Path({str(tmp_path)!r}))"
    write = "; import numpy as np; RecordWriter(r.directory).write([np.zeros(3)]); import os; os._exit(1)"
    subprocess.run([sys.executable, "-c", program + write], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "miles-records-link").symlink_to(reader.directory)
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([reader.directory, tmp_path / "miles-records-link"])
    RecordWriter(reader.directory).write(RECORDS)
    reader.clear()
    assert not files(reader) and reader.directory.exists()


@pytest.mark.parametrize(
    ("arguments", "parent", "refers"),
    [
        ({"enable_return_routed_experts": True}, True, True),
        ({}, True, False),
        ({"enable_return_routed_experts": True, "enable_dp_attention": True}, True, False),
        ({"enable_return_routed_experts": True, "nnodes": 2}, True, False),
        ({"enable_return_routed_experts": True}, False, False),
    ],
)
def test_files_are_used_where_run_and_schedulers_share_memory(
    arguments: dict[str, Any], parent: bool, refers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "MEMORY", tmp_path if parent else tmp_path / "absent")
    reader = ProcessLink(arguments, tmp_path / "log")._make_reader()
    assert (reader is not None) == refers
    if reader is not None:
        assert reader.directory.parent == tmp_path and reader.dtype == "int32"
        reader.close()


def test_files_of_cancelled_requests_are_removed_when_no_request_is_in_flight(
    reader: RecordReader, tmp_path: Path
) -> None:
    """One of two requests of a step is cancelled; the other's file stays until a third request has ended."""
    link, writer = ProcessLink({}, tmp_path / "log"), RecordWriter(reader.directory)
    link._records = reader
    sent: list[asyncio.Future[Any]] = []

    def exchange(endpoint: str, body: Any) -> asyncio.Future[Any]:
        sent.append(asyncio.get_running_loop().create_future())
        return sent[-1]

    link._exchange = exchange  # type: ignore[method-assign, assignment]

    def answer(number: int, reference: bytes | None) -> None:
        columns = {} if reference is None else {"routes": np.frombuffer(reference, np.uint8)}
        message, pieces = Answer({}, columns).message()
        sent[number].set_result((message, b"".join(pieces)))

    async def used() -> list[int]:
        calls = [asyncio.ensure_future(link.generate({})) for _ in range(3)]
        await asyncio.sleep(0)
        references = writer.write(RECORDS)
        calls[0].cancel()
        answer(2, references[2])
        found: list[int] = (await calls[2]).columns["routes"].tolist()
        assert len(files(reader)) == 1
        answer(1, None)  # aborted in SGLang's queue
        await calls[1]
        return found

    assert asyncio.run(used()) == RECORDS[2].ravel().tolist()
    assert not files(reader) and not reader._files
