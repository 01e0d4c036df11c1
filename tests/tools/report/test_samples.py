"""The sample browser holds what matters most, within its size, and nothing a model wrote becomes markup."""

import gzip
import json
from html.parser import HTMLParser

from miles_tools.report import samples
from miles_tools.report.report import report
from miles_tools.report.samples import browser
from miles_tools.samples.files import FILE

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


def test_a_sample_is_told_with_its_parts_gap_and_advantage(tmp_path):
    keep(tmp_path, 3, [sample(0, prompt=[{"role": "user", "content": "hi"}]), sample(1, reward=True, label=7)])
    keep(tmp_path, 3, [sample(9, reward=1.0, set="held", train_log_probs=None, advantages=None)], "eval")
    found = json.loads(browser(tmp_path, "even")["data"])
    assert [(s["kind"], s["step"], s["set"], s["index"]) for s in found] == [
        ("train", 3, "", 0),
        ("train", 3, "", 1),
        ("eval", 3, "held", 9),
    ]
    first, second, held = found
    assert first["prompt"] == "user: hi" and first["reward"] == 0.0 and first["parts"] == {"even": 0.0, "odd": None}
    assert first["gap"] == 0.5  # of the one token that the model generated
    assert first["mask"] == [1, 0] and first["advantages"] == [0.5]
    assert second["reward"] == 1.0 and second["parts"] == {} and second["label"] == "7"
    assert held["gap"] is None and held["trainer"] is None


def test_turns_of_a_conversation_are_told_with_calls_and_rewards(tmp_path):
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
    found = json.loads(browser(tmp_path, "even")["data"])
    first, second = found[0]["turns"]
    assert (
        first["calls"][0].startswith('add({"a": 1, "note": "xxx')
        and len(first["calls"][0]) < 320
        and first["calls"][1] == "odd({bad)"
    )
    assert (first["reward"], first["errors"], first["seconds"]) == (0.5, 1, 0.25) and second == {"start": 1, "end": 2}
    assert found[1]["turns"] == found[2]["turns"] == []


def test_the_page_stays_small_and_keeps_the_extremes(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "BUDGET", 12 * 2_000)
    for step in range(1, 31):
        rows = [sample(i) for i in range(40)]
        rows[33]["train_log_probs"] = [-9.0, 0.0]
        keep(tmp_path, step, rows)
    found = browser(tmp_path, "even")
    entries = json.loads(found["data"])
    assert len(found["data"]) <= 24_100 and found["held"] == 12 * 40 and found["shown"] == len(entries)
    steps = sorted({s["step"] for s in entries})
    assert len(steps) == 12 and steps[0] == 1 and steps[-1] == 30
    assert all({0, 33, 39} <= {s["index"] for s in entries if s["step"] == step} for step in steps)
    keep(tmp_path, 31, [sample(0, prompt="x" * 50_000, pieces=["a"] * 9_000, advantages=list(range(9_000)))])
    (huge,) = (s for s in json.loads(browser(tmp_path, "even")["data"]) if s["step"] == 31)
    assert huge["length"] == 9_000 and len(huge["pieces"]) == len(huge["advantages"]) == 1_000
    assert huge["prompt"].endswith("(44000 more characters)")


def test_nothing_that_a_model_wrote_becomes_markup(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1.0}\n')
    assert browser(tmp_path, None) == {} and "sample-data" not in report(tmp_path).read_text()
    rows = [sample(0, prompt=EVIL, response=EVIL, pieces=[EVIL, "b"], label=EVIL, status=EVIL, set=EVIL)]
    keep(tmp_path, 1, [{**rows[0], "reward": {EVIL: 1.0}}])
    page = report(tmp_path).read_text(encoding="utf-8")

    class Tags(HTMLParser):
        tags, data = [], ""

        def handle_starttag(self, tag, attrs):
            Tags.tags.append((tag, dict(attrs)))

        def handle_data(self, data):
            if Tags.tags and Tags.tags[-1][1].get("id") == "sample-data":
                Tags.data += data

    Tags().feed(page)
    assert not [attrs for _, attrs in Tags.tags if "onerror" in attrs or attrs.get("src") == "x"]
    assert not [attrs for _, attrs in Tags.tags if "http" in str(attrs.get("src")) + str(attrs.get("href"))]
    (entry,) = json.loads(Tags.data)
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
    found = json.loads(browser(tmp_path, None)["data"])[0]
    assert found["pieces"][0] == "a␛]0;title␇␛[2J␀\\u009b31m\\u202eb␡␍\tc\n" == found["prompt"] == found["label"]
