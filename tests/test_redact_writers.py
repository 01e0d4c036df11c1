"""No file that a run, its report or its commands write holds a secret, in whatever form the file escapes it."""

from __future__ import annotations

import gzip
import html
import json
import string
from contextlib import suppress
from pathlib import Path
from shutil import copytree
from urllib.parse import unquote_plus

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from miles_core.redact import MARK, redact
from miles_testing.doubles import remote

#: Every printable character: quotes, backslashes, and what JSON, HTML, YAML and URLs escape.
HARD = st.text(string.ascii_letters + string.digits + "\"'\\<>&%+/=:;,#?@![]{}()|~^$*-_.éß日", min_size=10, max_size=24)
SECRETS = HARD.map(lambda text: f"Q7z{text}")

#: A user's code with the secret in its log, its prints, the names of its reward's parts, its metadata, and plugins' metrics and panels.
CODE = """
import json, logging, os, sys
from miles_core.plugin import hookimpl

SECRET = os.environ["MILES_RM_TOKEN"]

def reward(args, sample):
    logging.getLogger("miles_core.launch").warning("asked with %s and %r", SECRET, SECRET)
    print("print", SECRET, json.dumps(SECRET), flush=True)
    sample.metadata["answer"] = {SECRET: [SECRET]}
    sample.metadata["shown"] = json.dumps({"header": f"Bearer {SECRET}"})
    return {"score": len(sample.tokens) % 3 / 2, "part": 1.0}

@hookimpl
def on_step(run, metrics):
    metrics[f"faults/{SECRET}"] = 1.0
    print("step", SECRET, file=sys.stderr, flush=True)
"""


def read(path: Path) -> list[str]:
    """The content of a file, as it is and with what it escapes restored."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode(errors="replace")
    found = [text, html.unescape(text), unquote_plus(text), text.replace("''", "'")]
    for line in text.splitlines():
        with suppress(ValueError):
            found += strings(json.loads(line))
    return found


def strings(value: object) -> list[str]:
    """All strings in a JSON value, names of entries included."""
    if isinstance(value, dict):
        return [text for item in value.items() for part in item for text in strings(part)]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


@pytest.mark.thorough
@pytest.mark.parametrize("where", [{}, {"plugins": (remote.__file__,), "runtime": "remote"}], ids=["inline", "workers"])
@settings(
    max_examples=1,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(secret=SECRETS)
@example(secret="Q7z\"'\\<&%+/=:;,#?@é日$x")
def test_no_file_holds_a_secret(toy_run, tmp_path_factory, where, secret):
    from miles_tools.report.report import compare, report

    folder = tmp_path_factory.mktemp("secrets")
    (folder / "code.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILES_RM_TOKEN", secret)
        patch.setattr("sys.argv", ["miles", "train", "--wandb-group", secret, "--wandb-key", secret])
        toy_run(
            [str(folder / "code.py"), *where.get("plugins", ())],
            directory=folder / "run",
            steps=2,
            save_interval=1,
            custom_rm_path=folder / "code.py",
            reward_key="score",
            use_wandb=False,
            wandb_group=secret,
            **{name: value for name, value in where.items() if name != "plugins"},
        )
        report(folder / "run")
        copytree(folder / "run", folder / "again")
        compare([folder / "run", folder / "again"], folder / "run/compare.html")
    files = {path.relative_to(folder): path for path in (folder / "run").rglob("*") if path.is_file()}
    assert {
        "run.log",
        "config.yaml",
        "plan.json",
        "metrics.jsonl",
        "environment.json",
        "ending.json",
        "report.html",
    } <= {path.name for path in files}
    assert any(path.suffix == ".gz" for path in files) and any(path.name == "manifest.json" for path in files)
    assert [name for name, path in files.items() if any(secret in text for text in read(path))] == []


@given(secret=SECRETS)
def test_every_way_to_write_a_secret_is_found(secret):
    from urllib.parse import quote, quote_plus

    variables = {"SOME_API_KEY": secret}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOME_API_KEY", secret)
        for text in (
            secret,
            json.dumps([secret]),
            json.dumps([secret], ensure_ascii=False),
            repr(secret),
            html.escape(secret),
            quote(secret),
            quote_plus(secret),
            f"https://host/?a={quote(secret, safe='')}&b=1",
        ):
            redacted = redact(text, variables)
            assert MARK in redacted
            assert all(secret not in form for form in (redacted, html.unescape(redacted), unquote_plus(redacted)))
