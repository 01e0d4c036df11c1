"""What clients may rely on: results, refusals that change nothing, and requests that are repeated."""

import asyncio
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from miles_service.queue import Job
from miles_service.service import Service
from miles_service.testing import DATA, Client, base, forward_backward
from miles_service.wire import decode
from miles_tools.http_server import ApiError

ANSWERS = {
    "samples": {1: ("sequences", "[sequence]"), 2: ("prompt", "bytes")},
    "sequence": {1: ("stop", "int"), 2: ("tokens", "bytes"), 3: ("scores", "bytes")},
    "output": {3: ("metrics", "[number]")},
    "number": {1: ("key", "string"), 2: ("value", "double")},
}


def files(directory):
    """Relative path -> bytes of all files."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def saved(server, client, model, number, name):
    """The bytes of a model's state."""
    assert client.save(model, number, name)["path"] == f"tinker://{model}/weights/{name}"
    return files(server.directory / "weights" / model.replace(":", "-") / name)


def refused(found, text):
    """Check an error that the client shows to its user: one sentence."""
    assert found["category"] == "user" and text in found["error"] and "\n" not in found["error"], found


def test_only_clients_with_the_token_are_served(server):
    stranger = Client(server.address, "tml-another")
    status, body = stranger.send("create_session", {})
    assert status == 401 and "TINKER_API_KEY" in body["error"]


def test_a_state_is_saved_and_loaded_byte_for_byte(server, client):
    model = client.create()["model_id"]
    client.result("forward_backward", forward_backward(model, 1, DATA, "cross_entropy"))
    metrics = client.step(model, 2)["metrics"]
    assert metrics["lr"] == 1e-2 and metrics["grad_norm"] > 0
    first = saved(server, client, model, 3, "first")
    body = {"session_id": client.session, "model_seq_id": client.models, "optimizer": True}
    client.models += 1
    other = f"{client.session}:train:1"
    assert client.result("load_weights", body | {"path": f"tinker://{model}/weights/first"})["type"] == "load_weights"
    assert saved(server, client, other, 1, "again") == first
    for number, name in ((4, model), (2, other)):
        client.result("forward_backward", forward_backward(name, number, DATA, "cross_entropy"))
        client.step(name, number + 1)
    assert saved(server, client, model, 6, "second") == saved(server, client, other, 4, "second") != first


def test_gradients_add_up_over_calls(server, client):
    one, other = (client.create(seed=3)["model_id"] for _ in range(2))
    client.result("forward_backward", forward_backward(one, 1, DATA, "cross_entropy"))
    for number, datum in ((1, DATA[0]), (2, DATA[1])):
        client.result("forward_backward", forward_backward(other, number, [datum], "cross_entropy"))
    norms = [client.step(one, 2)["metrics"]["grad_norm"], client.step(other, 3)["metrics"]["grad_norm"]]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_repeated_request_is_applied_once(server, client):
    """The reply was lost, before or after the request ran; the second attempt gets the result of the first."""
    one, other = (client.create(seed=3)["model_id"] for _ in range(2))
    for model in (one, other):
        repeat = 3 if model == one else 1
        body = forward_backward(model, 1, DATA, "cross_entropy")
        found = [client.result("forward_backward", body) for _ in range(repeat)]
        assert len(set(found)) == 1
        steps = [client.step(model, 2) for _ in range(repeat)]
        assert all(step == steps[0] for step in steps)
    assert saved(server, client, one, 3, "once") == saved(server, client, other, 3, "once")


def test_two_clients_cannot_update_one_model(server, client):
    model = client.create()["model_id"]
    client.result("forward_backward", forward_backward(model, 1, DATA, "cross_entropy"))
    intruder = Client(server.address)
    status, body = intruder.send("forward_backward", forward_backward(model, 1, DATA[:1], "cross_entropy"))
    assert status == 400 and "two clients use one model" in body["error"]
    assert client.step(model, 2)["metrics"]["grad_norm"] > 0
    server.service.jobs.pop(f"{model}:1")
    status, body = intruder.send("forward_backward", forward_backward(model, 1, DATA, "cross_entropy"))
    assert status == 400 and "was answered before 2" in body["error"]


@pytest.mark.parametrize(
    ("data", "loss", "settings", "text"),
    [
        (DATA, "gspo", {}, "the loss 'gspo' is not supported"),
        (DATA, "policy", {}, "the loss 'policy' is not supported"),
        (DATA, "cross_entropy", {"beta": 1}, "the loss cross_entropy has no setting 'beta'; it has none"),
        ([], "cross_entropy", {}, "received no sample"),
        ([([5], {"target_tokens": [6], "logprobs": [0], "advantages": [1]})], "dro", {}, "dro needs the setting beta"),
        (
            [([5, 6], {"target_tokens": [6, 7], "weights": [1]})],
            "cross_entropy",
            {},
            "datum 0: weights has the shape [1]",
        ),
        (
            [([5, 6], {"target_tokens": [9, 7]})],
            "cross_entropy",
            {},
            "target_tokens[0] is 9, and the next token of model_input is 6",
        ),
        ([([5, 6], {"target_tokens": [6, 7]})], "ppo", {}, "datum 0 has no logprobs"),
        ([([5, 6], {"target_tokens": [6, 7], "kl": [0, 0]})], "cross_entropy", {}, "datum 0 has the input kl"),
        ([([5, 6], {"target_tokens": [6, 9999]})], "cross_entropy", {}, "the token 9999"),
        ([([5, 6], {"target_tokens": [6, 7], "weights": [1, np.nan]})], "cross_entropy", {}, "not finite"),
        ([([], {"target_tokens": []})], "cross_entropy", {}, "datum 0 has no tokens"),
    ],
)
def test_what_cannot_be_computed_changes_nothing(server, client, data, loss, settings, text):
    model = client.create()["model_id"]
    before = saved(server, client, model, 1, "before")
    refused(client.result("forward_backward", forward_backward(model, 2, data, loss, settings)), text)
    refused(client.step(model, 3), "holds no gradients")
    assert saved(server, client, model, 4, "after") == before


def test_a_failed_request_leaves_the_gradients_of_others(server, client):
    model = client.create()["model_id"]
    client.result("forward_backward", forward_backward(model, 1, DATA, "cross_entropy"))
    refused(client.result("forward_backward", forward_backward(model, 2, DATA, "gspo")), "not supported")
    assert client.step(model, 3)["metrics"]["grad_norm"] > 0


def test_an_adapter_of_another_rank_or_base_is_refused(server, client):
    model, wider = client.create(4)["model_id"], client.create(8)["model_id"]
    client.save(wider, 1, "wide")
    before = saved(server, client, model, 1, "before")
    path = f"tinker://{wider}/weights/wide"
    body = {"model_id": model, "path": path, "optimizer": True}
    refused(
        client.result("load_weights", body | {"seq_id": 2}), "saved with lora.rank = 8, and the policy adapter-0 has 4"
    )
    state = server.directory / "weights" / wider.replace(":", "-") / "wide" / "state.json"
    described = json.loads(state.read_text())
    state.write_text(json.dumps(described | {"hf_checkpoint": "another/base", "lora.rank": 4}))
    refused(client.result("load_weights", body | {"seq_id": 3}), "saved with hf_checkpoint = another/base")
    refused(
        client.result("load_weights", body | {"seq_id": 4, "path": "tinker://x/weights/y"}),
        "there are no saved weights",
    )
    assert saved(server, client, model, 5, "after") == before
    assert client.send("weights_info", {"tinker_path": f"tinker://{model}/weights/before"})[1]["lora_rank"] == 4


def test_an_unloaded_model_is_gone_and_its_place_free(server, client):
    models = [client.create()["model_id"] for _ in range(3)]
    refused(client.create(), "trains 3 adapters at the same time")
    assert client.result("unload_model", {"model_id": models[1]})["type"] == "unload_model"
    status, body = client.send("forward_backward", forward_backward(models[1], 1, DATA, "cross_entropy"))
    assert status == 410 and "was unloaded" in body["error"]
    assert "model_id" in client.create(2)
    assert client.send("get_info", {"model_id": models[2]})[1]["lora_rank"] == 4


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("create_model", {"base_model": "another"}, 400, "no 'another'"),
        (
            "create_model",
            {"base_model": base(), "optimizer_config": {"type": "dimuon"}},
            400,
            "'dimuon' is not supported",
        ),
        ("optim_step", {"model_id": "none", "seq_id": 1, "adam_params": {}}, 404, "there is no model 'none'"),
        ("optim_step", {"model_id": "none", "optimizer_params": {}}, 400, "give AdamParams"),
        ("asample", {"prompt": {}, "topk_prompt_logprobs": 3}, 400, "topk_prompt_logprobs is not supported"),
        ("asample", {"record_stability_info": True}, 400, "stable_reinforce"),
        ("retrieve_future", {"request_id": "lost"}, 404, "there is no request 'lost'"),
        ("training_runs", {}, 404, "has no 'training_runs'"),
        ("optim_step", {"adam_params": {}}, 400, "malformed (KeyError('model_id'))"),
        ("forward_backward", b"\x0a\xff", 400, "cannot be decoded"),
        ("session_heartbeat", {"session_id": "old"}, 404, "there is no session 'old'"),
    ],
)
def test_what_is_not_supported_is_one_sentence(client, path, body, status, text):
    if isinstance(body, dict) and path == "create_model":
        body = {"session_id": client.session, "model_seq_id": 9, **body}
    found, reply = client.send(path, body)
    assert found == status and text in reply["error"] and "\n" not in reply["error"]


def test_a_server_that_stops_answers_requests_that_wait():
    async def wait_for_the_end():
        service = Service(*[None] * 6)
        service.jobs["slow"] = Job("slow", "client", None, False, b"")
        asyncio.get_running_loop().call_later(0.01, service.stopping.set)
        await service.result("slow")

    with pytest.raises(ApiError, match="the server stops") as error:
        asyncio.run(wait_for_the_end())
    assert error.value.status == 503


def sampler(client, model, number):
    body = {"model_id": model, "seq_id": number, "sampling_session_seq_id": client.samplers}
    client.samplers += 1
    return client.result("save_weights_for_sampler", body)["sampling_session_id"]


def sample(client, session, number, **more):
    """Sample and decode: tokens, log-probabilities and the prompt's log-probabilities."""
    body = {
        "sampling_session_id": session,
        "seq_id": number,
        "prompt": {"chunks": [{"tokens": [5, 6, 7], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 6, "seed": 1, "stop": []},
        "prompt_logprobs": True,
        **more,
    }
    found = client.result("asample", body)
    decoded = decode(memoryview(found), "samples", ANSWERS)
    tokens = [np.frombuffer(each["tokens"], "<i4").tolist() for each in decoded["sequences"]]
    scores = [np.frombuffer(each["scores"], "<f4") for each in decoded["sequences"]]
    return tokens, scores, np.frombuffer(decoded["prompt"], "<f4")


def test_samplers_keep_the_weights_they_were_made_with(server, client):
    """More versions than samplers: each request is answered with the weights of its session."""
    model = client.create()["model_id"]
    sessions, number = [], 1
    for _ in range(4):
        sessions.append(sampler(client, model, number))
        client.result("forward_backward", forward_backward(model, number + 1, DATA, "cross_entropy"))
        client.step(model, number + 2, lr=5e-2)
        number += 3
    body = {"session_id": client.session, "sampling_session_seq_id": client.samplers, "base_model": base()}
    sessions.append(client.send("create_sampling_session", body)[1]["sampling_session_id"])
    first = [sample(client, session, 0) for session in sessions]
    again = [sample(client, session, 1) for session in reversed(sessions)][::-1]
    for (tokens, scores, prompt), (tokens_again, scores_again, prompt_again) in zip(first, again, strict=True):
        assert tokens == tokens_again and len(tokens[0]) == 6
        np.testing.assert_allclose(scores, scores_again, atol=1e-6)
        np.testing.assert_allclose(prompt, prompt_again, atol=1e-6)
    samplers = server.service.adapters.samplers
    assert len({id(each.opened.parts.engine.batch) for each in samplers}) == 1 < len(samplers), "one batch"
    prompts = [prompt[1:].tobytes() for _, _, prompt in first]
    assert prompts[0] == prompts[4] and len(set(prompts)) == 4  # an adapter begins as the base
    assert np.isnan(first[0][2][0])
    assert np.isnan(sample(client, sessions[0], 2, prompt_logprobs_last_n=1)[2][:2]).all()


def test_overwritten_weights_replace_those_that_a_sampler_has_loaded(server, client):
    model = client.create()["model_id"]
    path = client.save(model, 1, "best")["path"]

    def session_of_path():
        body = {"session_id": client.session, "sampling_session_seq_id": client.samplers, "model_path": path}
        client.samplers += 1
        return client.send("create_sampling_session", body)[1]["sampling_session_id"]

    old = session_of_path()
    before = sample(client, old, 0)[2]
    client.result("forward_backward", forward_backward(model, 2, DATA, "cross_entropy"))
    client.step(model, 3, lr=5e-2)
    client.save(model, 4, "best", overwrite=True)
    expected = sample(client, sampler(client, model, 5), 0)[2]
    assert not np.array_equal(expected[1:], before[1:])
    for session in (session_of_path(), old):  # a session names the path
        np.testing.assert_allclose(sample(client, session, 1)[2], expected, atol=1e-6)


def test_sampled_log_probs_are_the_trainers(server, client):
    model = client.create()["model_id"]
    client.result("forward_backward", forward_backward(model, 1, DATA, "cross_entropy"))
    client.step(model, 2, lr=5e-2)
    (tokens,), (scores,), _ = sample(client, sampler(client, model, 3), 0)
    text = [5, 6, 7, *tokens]
    datum = (text[:-1], {"target_tokens": text[1:], "weights": [0, 0, 1, 1, 1, 1, 1, 1]})
    data = client.result("forward_backward", forward_backward(model, 4, [datum], "cross_entropy", forward_only=True))
    assert np.asarray(scores, "<f4").sum() == pytest.approx(-loss_of(data), abs=1e-4)
    refused(client.step(model, 5), "holds no gradients")  # a forward pass leaves none


def loss_of(data):
    return {entry["key"]: entry["value"] for entry in decode(memoryview(data), "output", ANSWERS)["metrics"]}[
        "loss:sum"
    ]


def test_unnamed_weights_are_few_and_deleted_with_the_model(server, client):
    model = client.create()["model_id"]
    sessions = [sampler(client, model, number) for number in range(1, 11)]
    kept = server.directory / "sampler_weights" / model.replace(":", "-")
    assert len([*kept.iterdir()]) == 8
    body = {
        "sampling_session_id": sessions[0],
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [5]}]},
        "sampling_params": {},
    }
    refused(client.result("asample", body), "save weights that are used for longer under a name")
    client.result("unload_model", {"model_id": model})
    assert not [*kept.iterdir()]


def test_a_client_that_is_silent_gives_its_adapters_up(server, client, monkeypatch):
    silent = Client(server.address)
    for _ in range(3):
        silent.create()
    refused(client.create(), "at the same time")
    server.service.sessions[silent.session].seen -= 1000
    assert "model_id" in client.create()
    assert silent.send("session_heartbeat", {"session_id": silent.session})[0] == 410


def test_clients_take_turns(server):
    """While one client sent many steps, another's request waits for one of them."""
    busy, other = Client(server.address), Client(server.address)
    one, two = busy.create()["model_id"], other.create()["model_id"]
    requests = [
        busy.send("forward_backward", forward_backward(one, number, DATA * 8, "cross_entropy"))[1]["request_id"]
        for number in range(1, 31)
    ]
    other.result("forward_backward", forward_backward(two, 1, DATA, "cross_entropy"))
    waiting = sum(not server.service.jobs[request].result.done() for request in requests)
    assert waiting > 10
    for each in (busy, other):
        each.send(f"sessions/{each.session}/finish", {})
    assert all(busy.fetch(request) for request in requests)


def test_heartbeats_do_not_wait_for_training(server, client):
    model = client.create()["model_id"]
    client.send("forward_backward", forward_backward(model, 1, DATA * 64, "cross_entropy"))
    started = time.monotonic()
    assert client.send("session_heartbeat", {"session_id": client.session})[0] == 200
    assert time.monotonic() - started < 5


def test_named_weights_outlive_the_server(serve, server, client, tmp_path):
    model = client.create()["model_id"]
    client.result("forward_backward", forward_backward(model, 1, DATA, "cross_entropy"))
    client.step(model, 2)
    directory = Path(tmp_path / "copy")
    first = saved(server, client, model, 3, "kept")
    for name, data in first.items():
        target = directory / "weights" / model.replace(":", "-") / "kept" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    later = serve(directory=directory)
    reader = Client(later.address)
    body = {
        "session_id": reader.session,
        "model_seq_id": 0,
        "path": f"tinker://{model}/weights/kept",
        "optimizer": True,
    }
    reader.result("load_weights", body)
    assert saved(later, reader, f"{reader.session}:train:0", 1, "again") == first


def test_many_clients_train_at_the_same_time(server):
    clients = [Client(server.address) for _ in range(3)]
    norms = {}

    def work(number, each):
        model = each.create(seed=number)["model_id"]
        for step in range(3):
            each.result("forward_backward", forward_backward(model, 2 * step + 1, DATA, "cross_entropy"))
            norms[number, step] = each.step(model, 2 * step + 2)["metrics"]["grad_norm"]
        each.send(f"sessions/{each.session}/finish", {})

    threads = [threading.Thread(target=work, args=item) for item in enumerate(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = Client(server.address)
    work(1, alone)
    assert len(norms) == 9 and len({round(value, 3) for value in norms.values()}) == 9
