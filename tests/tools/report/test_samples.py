"""Single samples are read from their place in a file; a report holds those that matter most, within its size; no text becomes markup."""

import gzip
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from miles_core.errors import MilesError
from miles_tools.report import selection
from miles_tools.report.reading import RunReader
from miles_tools.report.report import report
from miles_tools.report.samples import SampleStore
from miles_tools.samples.files import FILE
from miles_tools.samples.index import read_at, read_lines

EVIL = "</script><img src=x onerror=alert(1)>\u2028<!--\ud800"


def sample(index, **more):
    return {
        "index": index,
        "group": index // 2,
        "prompt": "p",
        "response": "ab",
        "reward": {"even": index / 100, "odd": float("nan")},
        "status": "completed",
        "tokens": [1, 2, 3],
        "pieces": ["a", "b"],
        "loss_mask": [1, 0],
        "rollout_log_probs": [-1.0, 0.0],
        "train_log_probs": [-1.5, 0.0],
        "advantages": [0.5, 0.5],
        **more,
    }


def keep(run_dir, step, rows, kind="train"):
    path = run_dir / FILE.format(kind, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("".join(json.dumps({"step": step, **row}) + "\n" for row in rows).encode()))


def make_store(run_dir, reward_key="even"):
    store = SampleStore(run_dir)
    store.reward_key = reward_key
    return store


def select(run_dir, reward_key="even"):
    """The samples of a report, and the numbers of damaged files and of all files."""
    (run_dir / "metrics.jsonl").touch()
    run = RunReader(run_dir)
    run.refresh()
    return selection.select_samples(run, 0, 1, reward_key)


def test_a_sample_has_its_parts_gap_and_advantage(tmp_path):
    keep(tmp_path, 3, [sample(0, prompt=[{"role": "user", "content": "hi"}]), sample(1, reward=True, label=7)])
    keep(tmp_path, 3, [sample(9, reward=1.0, set="held", train_log_probs=None, advantages=None)], "eval")
    store = make_store(tmp_path)
    first, second = (store.sample("train", 3, row) for row in (0, 1))
    held = store.sample("eval", 3, 0)
    assert [(s["set"], s["index"]) for s in (first, second, held)] == [("", 0), ("", 1), ("held", 9)]
    assert first["prompt"] == [{"role": "user", "parts": ["hi"], "calls": []}]
    assert first["reward"] == 0.0 and first["parts"] == {"even": 0.0, "odd": None}
    assert first["gap"] == 0.5  # of the one token that the model generated
    assert first["mask"] == [1, 0] and first["advantages"] == [0.5] and first["peak"] == 0.5
    assert second["reward"] == 1.0 and second["parts"] == {} and second["label"] == "7"
    assert held["gap"] is None and held["trainer"] is None


def test_a_sample_is_read_at_its_place_in_any_member(tmp_path, monkeypatch):
    monkeypatch.setattr("miles_tools.samples.index._CHUNK", 37)
    lines = [json.dumps(sample(i, response="x" * (i * 7 % 50))).encode() for i in range(20)]
    file = tmp_path / "samples.gz"
    file.write_bytes(b"".join(gzip.compress(b"\n".join(lines[i : i + 6]) + b"\n") for i in range(0, 20, 6)))
    found = list(read_lines(file))
    assert [line for _, line in found] == lines and len({place.member for place, _ in found}) == 4
    assert [read_at(file, place) for place, _ in found] == [json.loads(line) for line in lines]


def test_a_list_is_searched_in_prompts_responses_labels_and_calls(tmp_path):
    call = {"turn": 0, "name": "Weather", "arguments": {"city": "Zürich"}, "failed": True, "seconds": 0.5}
    rows = [
        sample(0, prompt="Straße"),
        sample(1, label='say "A"'),
        sample(2, metadata={"tool_calls": [call]}),
        sample(3, response="AbCd"),
    ]
    keep(tmp_path, 1, rows)
    store = make_store(tmp_path)

    def search(text):
        return [entry["row"] for entry in store.entries("train", 1, text)]

    assert (
        search("") == [0, 1, 2, 3]
        and search("sTRASS") == []
        and search("STRA") == [0]
        and search('say "a"') == [1]
        and search("zürich") == [2]
    )
    assert search("bcd") == [3] and search("completed") == []  # not the names of entries
    assert store.sample("train", 1, 2)["calls"] == [
        {"turn": 0, "call": 'Weather({"city": "Zürich"})', "failed": True, "seconds": 0.5}
    ]


def test_samples_that_are_not_there_are_one_sentence(tmp_path):
    keep(tmp_path, 1, [sample(0)])
    store = make_store(tmp_path)
    with pytest.raises(MilesError, match="samples of step 2 are not on disk"):
        store.entries("train", 2)
    with pytest.raises(MilesError, match="not on disk"):
        store.entries("../../train", 1)
    with pytest.raises(MilesError, match="step 1 has no sample 5: it has 1"):
        store.sample("train", 1, 5)
    file = tmp_path / FILE.format("train", 1)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(MilesError, match=r"cannot be read .*: the samples of that step are damaged"):
        store.sample("train", 1, 0)


def test_a_file_that_a_resumed_run_replaced_is_read_again(tmp_path):
    store = make_store(tmp_path)
    for index in (1, 2):
        keep(tmp_path, 1, [sample(index, response="x" * index)])
        assert store.sample("train", 1, 0)["index"] == index


def test_only_the_image_that_the_run_read_is_shown(tmp_path):
    png, secret = b"\x89PNG\r\n" + bytes(8), b"no image"
    (tmp_path / "rollouts/media").mkdir(parents=True)
    (tmp_path / "rollouts/media" / hashlib.sha256(png).hexdigest()).write_bytes(png)
    (tmp_path / "picture.png").write_bytes(png)
    (tmp_path / "secret").write_bytes(secret)
    media = [
        {"kind": "image", "digest": hashlib.sha256(png).hexdigest()},
        {"kind": "image", "digest": hashlib.sha256(png).hexdigest(), "path": str(tmp_path / "picture.png")},
        {"kind": "image", "digest": hashlib.sha256(secret).hexdigest(), "path": str(tmp_path / "secret")},
        {"kind": "image", "digest": "../../secret"},
        {"kind": "image", "digest": "0" * 64, "path": str(tmp_path / "picture.png")},
    ]
    keep(tmp_path, 1, [sample(0, media=media)])
    store = make_store(tmp_path)
    assert [store.image("train", 1, 0, number) for number in (0, 1)] == [(png, "image/png")] * 2
    for number, why in (
        (2, "is not the image"),
        (3, "is not the image"),
        (4, "is not the image"),
        (5, "has no image number 5"),
    ):
        with pytest.raises(MilesError, match=why):
            store.image("train", 1, 0, number)
    ((shown,), _, _) = select(tmp_path)
    assert [uri[:22] for uri in shown["media"]] == ["data:image/png;base64,"] * 2 + [""] * 3


def test_turns_of_a_conversation_have_calls_and_rewards(tmp_path):
    call = {"name": "add", "arguments": {"a": 1, "note": "x" * 1000}}
    turns = [
        {
            "start": 0,
            "end": 1,
            "reward": 0.5,
            "calls": [call, {"name": "odd", "arguments": "{bad"}],
            "errors": 1,
            "seconds": 0.25,
        },
        {"start": 1, "end": 2, "reward": "none", "calls": "?"},
        {"start": 2, "end": 1},
        {"start": -1, "end": 1},
        "no turn",
    ]
    keep(tmp_path, 1, [sample(0, metadata={"turns": turns}), sample(1, metadata={"turns": 3}), sample(2)])
    store = make_store(tmp_path)
    found = [store.sample("train", 1, row) for row in range(3)]
    first, second = found[0]["turns"]
    assert (
        first["calls"][0].startswith('add({"a": 1, "note": "xxx')
        and len(first["calls"][0]) < 320
        and first["calls"][1] == "odd({bad)"
    )
    assert (first["reward"], first["errors"], first["seconds"]) == (0.5, 1, 0.25) and second == {"start": 1, "end": 2}
    assert found[1]["turns"] == found[2]["turns"] == []


def test_the_report_stays_small_and_keeps_the_extremes(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "BUDGET", 12 * 4_000)
    for step in range(1, 31):
        rows = [sample(i) for i in range(40)]
        rows[33]["train_log_probs"] = [-9.0, 0.0]
        keep(tmp_path, step, rows)
    found, damaged, files = select(tmp_path)
    assert len(json.dumps(found, separators=(",", ":"))) <= 48_100 and (damaged, files) == (0, 12)
    steps = sorted({s["step"] for s in found})
    assert len(steps) == 12 and steps[0] == 1 and steps[-1] == 30
    assert all({0, 33, 39} <= {s["index"] for s in found if s["step"] == step} for step in steps)
    keep(tmp_path, 31, [sample(0, prompt="x" * 50_000, pieces=["a"] * 9_000, advantages=list(range(9_000)))])
    (huge,) = (s for s in select(tmp_path)[0] if s["step"] == 31)
    assert huge["length"] == 9_000 and len(huge["pieces"]) == len(huge["advantages"]) == 1_000
    assert huge["prompt"].endswith("(44000 more characters)")


def test_nothing_that_a_model_wrote_becomes_markup(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1.0}\n')
    assert select(tmp_path, None) == ([], 0, 0)
    rows = [sample(0, prompt=EVIL, response=EVIL, pieces=[EVIL, "b"], label=EVIL, status=EVIL, set=EVIL)]
    keep(tmp_path, 1, [{**rows[0], "reward": {EVIL: 1.0}}])
    page = report(tmp_path).read_text(encoding="utf-8")

    class Tags(HTMLParser):
        tags, data = [], ""

        def handle_starttag(self, tag, attrs):
            Tags.tags.append((tag, dict(attrs)))

        def handle_data(self, data):
            if Tags.tags and Tags.tags[-1][1].get("id") == "data":
                Tags.data += data

    Tags().feed(page)
    assert not [attrs for _, attrs in Tags.tags if "onerror" in attrs or attrs.get("src") == "x"]
    assert not [attrs for _, attrs in Tags.tags if "http" in str(attrs.get("src")) + str(attrs.get("href"))]
    (entry,) = json.loads(Tags.data)["samples"]
    shown = EVIL.replace("\ud800", "\ufffd")
    assert entry["prompt"] == entry["label"] == entry["pieces"][0] == shown and list(entry["parts"]) == [shown]


def test_control_characters_are_visible(tmp_path):
    """ANSI sequences, NUL, C1 controls and directions of text, in texts of samples and in what the page says about the run."""
    odd = "a\x1b]0;title\x07\x1b[2J\x00\x9b31m\u202eb\x7f\r\tc\n"
    rows = [
        sample(0, prompt=odd, pieces=[odd, "b"], label=odd, status=odd, metadata={"turns": [{"start": 0, "end": 1}]})
    ]
    keep(tmp_path, 3, rows)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 1.0}) + "\n")
    (tmp_path / "config.yaml").write_text(json.dumps({"run": {"model_name": odd}}))
    (tmp_path / "ending.json").write_text(json.dumps({"why": f"ended by {odd}", "step": 1, "of": 2}))
    page = report(tmp_path).read_text()
    raw = [c for c in page if (ord(c) < 32 and c not in "\t\n") or 127 <= ord(c) < 160 or c == "\u202e"]
    assert not raw
    found = json.loads(re.search('id="data">(.*?)</script>', page, re.DOTALL)[1])["samples"][0]
    assert found["pieces"][0] == "a␛]0;title␇␛[2J␀\\u009b31m\\u202eb␡␍\tc\n" == found["prompt"] == found["label"]
