"""Redaction: what is a credential, what is not, and that every writer of a run asks."""

from __future__ import annotations

import ast
import io
import itertools
import json
import logging
import random
import string
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import miles_core
from miles_core.cli.main import main
from miles_core.errors import ConfigError, MilesError
from miles_core.observe import log as logs
from miles_core.redact import (
    MARK,
    RedactingStream,
    has_credentials,
    is_random,
    redact,
    redact_values,
    secrets,
    show_controls,
    show_exception,
)

SECRET = st.text(string.ascii_letters + string.digits, min_size=12, max_size=30).map(lambda s: "Q7z" + s)
NAMES = st.sampled_from(
    ["api_key", "key", "token", "access-token", "X-Amz-Signature", "sig", "password", "client_secret", "auth"]
)


@given(SECRET, NAMES)
def test_parameters_and_users_of_urls(secret, name):
    for url in (
        f"https://h/x?{name}={secret}",
        f"https://h/x?a=1&{name}={secret}&b=2",
        f"http://me:{secret}@h:1/x",
        f"http://{secret}@h/",
    ):
        assert secret not in redact(f"asked {url} twice", {}) and has_credentials(url)


@given(SECRET)
def test_headers_flags_and_entries(secret):
    for text in (
        f"Authorization: Bearer {secret}",
        f"{{'Authorization': 'Bearer {secret}'}}",
        f"api_key={secret}",
        f'"api-key": "{secret}"',
        f"--wandb-key {secret} --lr 1",
        f"--judge-api-key={secret}",
        f"password: {secret}",
        f"password: {secret.upper()}",
        f"valid_api_key={secret} myApiKey={secret} dbpassword={secret} GET /x?a=1&token={secret}",
    ):
        assert secret not in redact(text, {}) and secret.upper() not in redact(text, {})
    assert "HUNTER" not in redact("password: HUNTERHUNTER and more", {})
    assert redact_values(
        {"api_key": secret, "nested": [{"password": secret}], "command": ["x", "--wandb-key", secret]}
    ) == {
        "api_key": MARK,
        "nested": [{"password": MARK}],
        "command": ["x", "--wandb-key", MARK],
    }


@given(
    SECRET,
    st.sampled_from(["MILES_RM_TOKEN", "WANDB_API_KEY", "GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "KEY"]),
)
def test_values_of_the_environment(secret, name):
    assert secret not in redact(f"Invalid header value b'Bearer {secret}\\n'", {name: secret + "\n"})


@pytest.mark.parametrize(
    "text",
    [
        "--eos-token 5 --input-key prompt --label-key label --reward-key score",
        "max_new_tokens=5, stop_token_ids=[3], tokens_per_second: 7.5",
        "input_key: prompt\nlabel_key: label\nreward_key: null\n",
        "https://host:8000/score?mode=fast&n=3",
        "--rm-url https://h/s?key=${RM_KEY}",
        "rollout/tokens 5, key=sample.index, the basic idea of a token",
        "the answer holds basic arithmetic; the bearer responsible for it is unknown",
        "password: must have eight characters; the secret: it is missing",
        "give --wandb-key or set WANDB_API_KEY; --wandb-key is missing (--wandb-key KEY)",
        "valid_key: the name; invalid token: none; api_key: null, hf_token: None",
        "gym:task?weight=2&key=value#tokens=5;max_tokens=7",
        "https://host/v1?api-version=2024-02-01&model=Qwen2.5-7B-Instruct&author=me&monkey=1&key=5&max_tokens=700000",
        "hf://datasets/rasbt/math_full_minus_math500/data/train-00000-of-00001.parquet?revision=refs%2Fconvert%2Fparquet",
    ],
)
def test_ordinary_text_stays(text):
    assert (
        redact(
            text,
            {
                "TOKENIZERS_PARALLELISM": "false",
                "KEYBOARD": "qwertyuiop",
                "SSH_AUTH_SOCK": "/tmp/agent.1",
                "AUTH_TYPE": "responsible",
                "MAX_TOKENS": "00000-of-00001",
                "SECRET_NAME": "arithmetic",
            },
        )
        == text
    )


RANDOM = st.text(string.ascii_letters + string.digits, min_size=24, max_size=60).filter(is_random)


@given(RANDOM, st.sampled_from(["code", "k", "id", "q", "sv", "p", "access", "hash", "user_id"]))
def test_random_values_of_urls_whatever_their_name(secret, name):
    for url in (f"https://h/x?{name}={secret}", f"https://h/x?a=1&{name}={secret}&b=2", f"https://h/x#{name}={secret}"):
        assert secret not in redact(f"asked {url} twice", {}) and has_credentials(url)
    assert has_credentials("https://h/?code=short-one") and has_credentials(
        "https://h/?id=0f8fad5b-d9cb-469f-a165-70867728950e"
    )


def test_most_generated_keys_look_random():
    draw = random.Random(0)
    kinds = (string.hexdigits.lower()[:16], string.ascii_letters + string.digits, string.ascii_letters)
    for alphabet in kinds:
        made = ["".join(draw.choices(alphabet, k=32)) for _ in range(1000)]
        assert sum(map(is_random, made)) >= 980


def sentences():
    """The texts of the code base that users read, apart from docstrings, with a word and a number for what is filled in."""
    root = Path(miles_core.__file__).parents[1]
    packages = [*root.glob("miles_*"), *root.glob("plugins/*/miles_*")]
    for path in sorted(file for package in packages for file in package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        nodes = list(ast.walk(tree))
        skipped = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
        skipped |= {id(v) for n in nodes if isinstance(n, ast.JoinedStr) for v in n.values}
        for node in nodes:
            if id(node) in skipped:
                continue
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if not all(
                isinstance(part, ast.FormattedValue) or isinstance(getattr(part, "value", 0), str) for part in parts
            ):
                continue
            for fill in ("word", "7"):
                text = "".join(part.value if isinstance(part, ast.Constant) else fill for part in parts)
                if " " in text and path.name != "redact.py":
                    yield f"{path.name}:{node.lineno}", text


def test_no_message_of_the_code_base_is_altered():
    found = [(place, text) for place, text in sentences() if redact(text, {}) != text]
    assert not found, found[:5]
    assert sum(1 for _ in sentences()) > 5000


def test_redacting_twice_changes_nothing_more():
    once = redact("Authorization: Bearer abcdefghijk http://u:p@h/?key=abc api_key=hunter22", {})
    assert redact(once, {}) == once


def test_short_values_and_paths_are_no_secrets():
    assert secrets({"A_TOKEN": "1", "SSH_AUTH_SOCK": "/tmp/x/agent.12", "B_TOKEN": "longenough"}) == ["longenough"]


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SECRET)
def test_logs_and_their_tracebacks(tmp_path, monkeypatch, secret):
    from rich.console import Console

    monkeypatch.setenv("SOME_API_KEY", secret)
    shown = io.StringIO()
    logs.configure(run_dir=tmp_path, console=Console(file=shown))
    try:
        raise ValueError(f"Invalid header value b'Bearer {secret}'")
    except ValueError:
        logging.getLogger("miles_core.launch").exception("failed with %s", secret)
    written = (tmp_path / "run.log").read_text() + shown.getvalue()
    assert "failed with" in written and secret not in written


def test_control_characters_reach_no_terminal(tmp_path, capsys):
    from rich.console import Console

    shown = io.StringIO()
    logs.configure(run_dir=tmp_path, console=Console(file=shown))
    logging.getLogger("miles_core.launch").error("answer %s", "\x1b[2J\x1b]0;x\x07\r\x9b1m\ttab")
    for text in (shown.getvalue(), (tmp_path / "run.log").read_text()):
        assert "answer ␛[2J␛]0;x␇␍\\u009b1m\ttab" in text
    assert show_controls("\ud800") == "\ufffd"  # not logged: pytest could not send it between processes
    assert main(["train", "--load", "/no/such\x1b[2J"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_no_file_of_a_run_holds_a_secret(toy_run, tmp_path, monkeypatch):
    """Known to the run through the environment, an option and an error message."""
    secret = "Q7zSecretOfThisTest99"
    monkeypatch.setenv("MILES_RM_TOKEN", secret)
    monkeypatch.setattr("sys.argv", ["miles", "train", "--wandb-key", secret, "--note", secret])
    (tmp_path / "judge.py").write_text(
        f"import logging\n\ndef reward(args, sample):\n    logging.getLogger('miles_core.launch').warning('asked with {secret}')\n"
        f"    raise ValueError('refused: Bearer {secret}')\n"
    )
    with pytest.raises(MilesError):
        toy_run(
            steps=1,
            custom_rm_path=tmp_path / "judge.py",
            save=tmp_path / "run",
            model_name=secret,
            keep=2,
            save_interval=1,
        )
    files = [p for p in (tmp_path / "run").rglob("*") if p.is_file()]
    names = {p.name for p in files}
    assert {"config.yaml", "plan.json"} <= names
    assert not [p for p in files if secret.encode() in p.read_bytes()]


def test_a_checkpoint_and_the_report_hold_no_secret_and_the_run_goes_on(toy_run, tmp_path, monkeypatch):
    from miles_tools.report.report import report

    secret = "Q7zSecretOfThisTest99"
    monkeypatch.setenv("MILES_RM_TOKEN", secret)
    url = "9fK2xQ7zB81mP0vL3nT5"  # of an address, under an ordinary name
    toy_run(
        steps=1, save=tmp_path / "run", save_interval=1, reward_key=secret, model_name=f"https://host/judge?code={url}"
    )
    report(tmp_path / "run")
    files = [p for p in (tmp_path / "run").rglob("*") if p.is_file()]
    assert any(p.name == "manifest.json" for p in files) and any(p.suffix == ".html" for p in files)
    assert not [p for p in files if secret.encode() in p.read_bytes() or url.encode() in p.read_bytes()]
    with pytest.raises(
        ConfigError, match=r"a run directory does not keep credentials; give the value of reward.reward_key again"
    ):
        from miles_core.config.load import load

        load(["--load", str(tmp_path / "run")])


def test_metrics_services_get_no_secret(tmp_path, monkeypatch):
    import sys
    import types

    from miles_tools.sinks import WeightsAndBiases

    given = {}
    fake = types.ModuleType("wandb")
    fake.init = lambda **named: given.update(named) or types.SimpleNamespace(id="1")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    WeightsAndBiases(tmp_path, "n", {"rm_url": "http://h/?api_key=abcdef", "api_key": "hunter22", "lr": 1}, "p")
    assert json.dumps(given["config"]) == json.dumps({"rm_url": f"http://h/?api_key={MARK}", "api_key": MARK, "lr": 1})


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SECRET, st.lists(st.integers(0, 60), max_size=4))
def test_a_worker_s_output_however_it_is_written(tmp_path, monkeypatch, secret, cuts):
    """``print`` writes a line in parts; a value that is cut in two is whole when its line is."""
    monkeypatch.setenv("SOME_API_KEY", secret)
    text = f"asked with {secret}\nfailed: --wandb-key {secret}\nhalf a line {secret}"
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    with (tmp_path / "out").open("wb") as file:
        stream = RedactingStream.of(file.fileno())
        for start, end in itertools.pairwise(edges):
            stream.write(text[start:end])
        stream.flush()
    written = (tmp_path / "out").read_text()
    assert written == f"asked with {MARK}\nfailed: --wandb-key {MARK}\nhalf a line {MARK}"


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SECRET)
def test_a_traceback_on_the_terminal(capsys, secret):
    try:
        raise ValueError(f"http://me:{secret}@h/") from KeyError(f"Bearer {secret}")
    except ValueError as error:
        show_exception(type(error), error, error.__traceback__)
    shown = capsys.readouterr().err
    assert "ValueError" in shown and "KeyError" in shown and secret not in shown


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SECRET)
def test_metrics_in_the_file_and_in_every_sink(tmp_path, monkeypatch, secret):
    """A user's function may name a metric after anything."""
    from miles_core.observe.metrics import MetricLog

    monkeypatch.setenv("SOME_API_KEY", secret)
    seen = []
    sink = SimpleNamespace(write=lambda step, metrics: seen.append(metrics), close=lambda: None)
    with MetricLog(tmp_path / "metrics.jsonl", sinks=[sink]) as log:
        log.append(1, {f"reward/{secret}": 1.0, "loss": float("nan")})
    assert seen == [{f"reward/{MARK}": 1.0}] and secret not in (tmp_path / "metrics.jsonl").read_text()


def test_samples_hold_no_value_of_the_environment(tmp_path, monkeypatch):
    """A tool may print it. Words that look like credentials stay: they may be the task."""
    import gzip

    from miles_tools.samples.rows import Row
    from miles_tools.samples.saver import SampleSaver

    monkeypatch.setenv("SOME_API_KEY", "Q7zSecretOfThisTest99")
    row = Row({"response": "Q7zSecretOfThisTest99 password: hunter22"})
    SampleSaver(tmp_path, None, 1 << 20).save("train", 1, [row])
    (file,) = (p for p in tmp_path.rglob("*") if p.is_file())
    assert f"{MARK} password: hunter22" in gzip.decompress(file.read_bytes()).decode()
