"""``miles verify --budget --url``: causes of a server's gap, and one clear error for everything that is wrong with it."""

import json
import socket

import pytest
import torch

from benchmarks.mismatch.server_causes import CAUSES, make_checkpoint
from benchmarks.mismatch.server_double import Faults, Handler, serve
from miles_core.cli.main import main
from miles_core.contracts.engine import Sampling
from miles_tools.verify.processing import find_processings
from miles_tools.verify.server import connect, restore_last


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    return make_checkpoint(tmp_path_factory.mktemp("served") / "model", "qwen3", sizes)


@pytest.fixture
def verify(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("MILES_VERIFY_TOKEN", raising=False)

    def call(url, *words, model=checkpoint):
        usual = ["--hf-checkpoint", str(model), "--save", str(tmp_path / "out"), "--rollout-max-response-len", "4"]
        code = main(["verify", "--budget", "--url", url, *usual, *words])
        said = capsys.readouterr()
        return code, said.out, " ".join(said.err.split())

    return call


def cause(name):
    (found,) = (c for c in CAUSES if c.name == name)
    return found


def test_a_sound_server_has_no_cause_and_leaves_a_page(verify, checkpoint, tmp_path):
    with serve(checkpoint) as url:
        code, out, _ = verify(url)
    assert code == 0
    assert "no cause beyond rounding" in " ".join(out.split())
    assert "no cause beyond rounding" in (tmp_path / "out" / "verify.html").read_text()


@pytest.mark.parametrize(("name", "protocol"), [("raw log-probs", "openai"), ("cached prefix", "sglang")])
def test_a_planted_cause_is_named_with_its_share(verify, checkpoint, name, protocol):
    planted = cause(name)
    with serve(checkpoint, planted.faults, protocol) as url:
        code, out, _ = verify(url, "--json", *planted.words)
    (policy,) = json.loads(out)["policies"]
    assert code == 1
    assert planted.expected in policy["findings"][0] and "What to do:" in policy["findings"][0]
    assert next(c for c in policy["budget"]["causes"] if planted.expected in c["name"])["share"] > 0.9


def repeated(logits, sampling, tokens, prompt):
    """Divide positive logits of tokens that occurred by 1.37, and multiply negative ones."""
    seen = list(set(tokens))
    changed = logits.clone()
    changed[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.37, logits[seen] * 1.37)
    return changed / sampling["temperature"]


def generated_only(logits, sampling, tokens, prompt):
    return repeated(logits, sampling, tokens[prompt:], 0)


def above(logits, sampling, *_):
    """Report log-probs over the tokens that have a fifth of the largest probability (min-p)."""
    p = (logits / sampling["temperature"]).softmax(-1)
    return (logits / sampling["temperature"]).masked_fill(p < 0.2 * p.max(), -torch.inf)


@pytest.mark.parametrize(
    ("reported", "name", "words"),
    [
        (repeated, "a repetition penalty of about 1.37, by which logits of repeated tokens of prompt and response", ()),
        (repeated, "a repetition penalty of about 1.37", ("--rollout-temperature", "0.7")),
        (generated_only, "a repetition penalty of about 1.37, by which logits of repeated tokens are divided", ()),
        (above, "the tokens that a min-p of about 0.2 keeps", ()),
    ],
)
def test_a_default_of_the_server_is_the_only_cause(verify, checkpoint, reported, name, words):
    with serve(checkpoint, Faults(reported=reported), "openai") as url:
        code, out, _ = verify(url, "--json", "--rollout-max-response-len", "8", *words)
    (policy,) = json.loads(out)["policies"]
    assert code == 1
    (finding,) = policy["findings"]
    assert name in finding and "100% of the gap" in finding


@pytest.mark.parametrize(("given", "tried"), [(1.17, True), (1, False), (0, False), (-2.0, False), ("1.17", False)])
def test_a_repetition_penalty_of_the_checkpoint_is_tried(given, tried):
    sampling = Sampling(max_new_tokens=4)
    usual = {one.repetition for one in find_processings(sampling, {})}
    found = {one.repetition for one in find_processings(sampling, {"repetition_penalty": given})}
    assert found - usual == ({1.17} if tried else set())


def test_a_deviation_that_cannot_be_imitated_has_a_reason(verify, checkpoint):
    planted = cause("one layer of other weights")
    with serve(checkpoint, planted.faults, "openai") as url:
        _, out, _ = verify(url, "--json")
    (policy,) = json.loads(out)["policies"]
    assert planted.expected in policy["findings"][0]
    reasons = {c["name"]: c["why"] for c in policy["budget"]["causes"] if "NVFP4" in c["name"]}
    assert reasons and all("supported by no active plugin" in why for why in reasons.values())


def test_a_server_that_does_not_score_says_what_cannot_be_measured(verify, checkpoint):
    with serve(checkpoint, Faults(scores=False), "openai") as url:
        code, out, _ = verify(url)
    assert code == 0
    assert "not measured: --url" in " ".join(out.split()) and "no log-probs of prompts" in " ".join(out.split())


class Broken(Handler):
    """Answers every completion in the same wrong way."""

    answer: object = b"<html>"
    status = 200

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send(self.answer, self.status)


def broken(status, answer):
    return type("Answering", (Broken,), {"status": status, "answer": answer})


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (broken(200, b"<html>"), "which is not JSON"),
        (broken(401, b"no"), "put the server's key into the environment variable MILES_VERIFY_TOKEN"),
        (broken(404, b"no"), "/v1/completions answered HTTP 404: no"),
        (broken(500, b"out of memory"), "/v1/completions answered HTTP 500: out of memory"),
        (broken(200, {"choices": [{"text": "x"}]}), "has no token ids"),
        (
            broken(200, {"choices": [{"token_ids": [1], "logprobs": None}]}),
            "has no log-probs (logprobs.token_logprobs)",
        ),
        (broken(200, []), "has no list of choices"),
    ],
)
def test_a_wrong_answer_is_one_error(verify, checkpoint, handler, expected):
    with serve(checkpoint, protocol="openai", handler=handler) as url:
        code, out, err = verify(url)
    assert code == 2 and expected in err and "Traceback" not in err and not out


def test_another_vocabulary_is_an_error(verify, checkpoint):
    logprobs = {"tokens": ["token_id:99999"], "token_logprobs": [-1.0]}
    handler = broken(200, {"choices": [{"logprobs": logprobs}]})
    with serve(checkpoint, protocol="openai", handler=handler) as url:
        code, _, err = verify(url)
    assert code == 2 and "they have different vocabularies" in err and "99999" in err


def test_addresses_and_options(verify, checkpoint, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nothing = f"http://127.0.0.1:{free.getsockname()[1]}"
    code, _, err = verify(nothing)
    assert code == 2 and "start the server, or correct the address" in err
    code, _, err = verify("http://me:hunter22@127.0.0.1:1")
    assert code == 2 and "hunter22" not in err and "MILES_VERIFY_TOKEN" in err
    code, _, err = verify("ftp://host")
    assert code == 2 and "must start with http://" in err
    code, _, err = verify(nothing, "--exact")
    assert code == 2 and "give --budget, without --exact" in err
    with serve(checkpoint, protocol="openai") as url:
        code, _, err = verify(url, "--url-model", "other")
        assert code == 2 and "--url-model other" in err and "serves double" in err
        code, _, err = verify(url, model=tmp_path / "missing")
        assert code == 2 and "missing" in err and "Traceback" not in err


def test_the_key_is_sent_and_not_written(verify, checkpoint, monkeypatch, tmp_path):
    seen = []

    class Watched(Handler):
        def do_POST(self):
            seen.append(self.headers["Authorization"])
            super().do_POST()

    with serve(checkpoint, handler=Watched) as url:
        monkeypatch.setenv("MILES_VERIFY_TOKEN", "sk-very-secret")
        assert verify(url)[0] == 0
    assert set(seen) == {"Bearer sk-very-secret"}
    assert (
        "very-secret"
        not in (tmp_path / "out" / "verify.json").read_text() + (tmp_path / "out" / "verify.html").read_text()
    )


@pytest.mark.parametrize(
    ("listed", "given", "found"),
    [
        ([5, 0, 3], [5, 9, 3], [5, 9, 3]),
        ([7, 5, 0, 0], [5, 9, 9], [7, 5, 9, 9]),
        ([0, 0], [8, 9], [0, 0]),
        ([5], [5, 9], [5]),
    ],
)
def test_sglang_lists_the_last_id_of_the_vocabulary_as_0(listed, given, found):
    assert restore_last(listed, given) == found


def test_a_sound_sglang_scores_the_last_id_of_the_vocabulary(checkpoint):
    last = json.loads((checkpoint / "config.json").read_text())["vocab_size"] - 1
    with serve(checkpoint) as url:
        server = connect(url)
        assert len(server.score([3, last, 5, last])) == 3 and server.added == []


class Echo(Handler):
    """Answers like SGLang's OpenAI interface: an echo has the text of tokens, and their ids apart."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        row = body["prompt"]
        if not body.get("echo"):
            return self.send({"choices": [{"index": 0, "token_ids": [1], "prompt_token_ids": row}]})
        logprobs = {"tokens": ["x"] * (len(row) + 1), "token_logprobs": [None, *map(float, range(len(row)))]}
        return self.send({"choices": [{"index": 0, "token_ids": [1], "prompt_token_ids": row, "logprobs": logprobs}]})


def test_an_echo_without_ids_in_its_tokens_is_read(checkpoint):
    with serve(checkpoint, protocol="openai", handler=Echo) as url:
        assert connect(url).score([7, 8, 9]).tolist() == [0.0, 1.0]
