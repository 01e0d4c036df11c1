"""The embedded engine against Transformers' own generation and forward."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
import transformers

from miles_core.contracts.engine import Request, Sampling
from miles_core.data.weight_unit import Encoded
from miles_core.errors import MilesError
from miles_core.precision.codec import Codec
from miles_embedded.engine.build import end_tokens
from miles_embedded.engine.decoder import Decoder
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.row import StopText
from miles_embedded.engine.settings import Settings
from miles_embedded.model.load import load_model
from miles_embedded.testing.families import family_checkpoint
from miles_testing.stored import stored_units
from miles_testing.tiny import FAMILIES, tiny_checkpoint

PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13, 14, 15]]


def letters(tokens):
    return "".join(chr(48 + t) for t in tokens)


@pytest.fixture(scope="module", params=list(FAMILIES))
def checkpoint(request, tmp_path_factory):
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp("family") / request.param)


def generate(engine, requests):
    async def main():
        return await asyncio.gather(*[engine.generate(r) for r in requests])

    return asyncio.run(main())


def test_greedy_equals_transformers_generate(checkpoint):
    engine = EmbeddedEngine(load_model(checkpoint), Settings(letters, eos=[1]))
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    got = generate(engine, [Request(p, Sampling(12, temperature=0.0)) for p in PROMPTS])
    for prompt, response in zip(PROMPTS, got, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0
        )
        assert response.tokens == expected[0, len(prompt) :].tolist()


def test_log_probs_equal_a_full_forward(checkpoint):
    engine = EmbeddedEngine(load_model(checkpoint), Settings(letters, eos=[1]))
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    requests = [
        Request(p, Sampling(4 + k, temperature=0.9), key=10 * i + k) for i, p in enumerate(PROMPTS) for k in range(4)
    ]
    for request, response in zip(requests, generate(engine, requests), strict=True):
        tokens = torch.tensor([request.tokens + response.tokens])
        with torch.no_grad():
            logp = (reference(tokens).logits[0].float() / 0.9).log_softmax(-1)
        expected = logp[:-1].gather(1, tokens[0, 1:, None])[len(request.tokens) - 1 :, 0]
        np.testing.assert_allclose(response.log_probs, expected.numpy(), atol=2e-5)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("small"))


def test_what_a_family_does_after_the_head_is_done_here_too(tmp_path):
    capped = family_checkpoint("gemma2", tmp_path)  # its logits are capped by a hyperbolic tangent
    model = load_model(capped)
    engine = EmbeddedEngine(model, Settings(letters, eos=[1]))
    (response,) = generate(engine, [Request([3, 4, 5], Sampling(6), key=1)])
    tokens = [3, 4, 5, *response.tokens]
    (scored,) = asyncio.run(engine.score([tokens]))
    plain = transformers.AutoModelForCausalLM.from_pretrained(capped, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = plain(torch.tensor([tokens])).logits[0, :-1]
    assert logits.abs().max() < plain.config.final_logit_softcapping
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
    np.testing.assert_allclose(scored, expected, atol=1e-5)
    np.testing.assert_allclose(response.log_probs, expected[2:], atol=1e-5)


def test_requests_with_one_prompt_compute_it_once(small):
    model = load_model(small)
    engine = EmbeddedEngine(model, Settings(letters, eos=[1]))
    fed = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda m, a, k: fed.append(k["hidden_states"].shape[1]), with_kwargs=True
    )
    generate(engine, [Request([3, 4, 5], Sampling(4, ignore_eos=True), key=i) for i in range(6)])
    assert fed == [3, 6, 6, 6]
    assert engine.runner.cache.rows == engine.runner.cache.prefixes.size == 0


def test_a_late_request_shares_a_prompt_that_is_still_there(small):
    model = load_model(small)
    engine = EmbeddedEngine(model, Settings(letters, eos=[1], max_running_requests=2))
    fed = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda m, a, k: fed.append(k["hidden_states"].shape[1]), with_kwargs=True
    )
    budget = (9, 3, 5, 5)
    requests = [Request([3, 4, 5], Sampling(n, ignore_eos=True), key=i) for i, n in enumerate(budget)]
    got = generate(engine, requests)
    assert [len(r.tokens) for r in got] == list(budget)
    assert fed.count(3) == 1
    alone = [generate(EmbeddedEngine(load_model(small), Settings(letters, eos=[1])), [r])[0] for r in requests]
    assert [r.tokens for r in got] == [r.tokens for r in alone]


def test_finished_rows_leave_and_waiting_ones_join(small):
    engine = EmbeddedEngine(load_model(small), Settings(letters, eos=[1], max_running_requests=3))
    sizes = []
    step = engine.decoder.step

    class Watching(Decoder):
        def step(self, engine, rows):
            sizes.append(len(rows))
            return step(engine, rows)

    engine.decoder = Watching()
    requests = [Request([5 + i], Sampling(2 + i, ignore_eos=True), key=i) for i in range(7)]
    got = generate(engine, requests)
    assert [len(r.tokens) for r in got] == [2 + i for i in range(7)]
    assert max(sizes) == 3 and sizes[-1] == 1


@pytest.mark.parametrize("when", ["prompt", "decode"])
def test_an_error_in_the_model_fails_every_waiting_request(small, when):
    model = load_model(small)

    def fail(module, args, kwargs):
        if (kwargs["hidden_states"].shape[1] > 2) == (when == "prompt"):
            raise ArithmeticError("broken layer")

    hook = model.model.layers[1].self_attn.register_forward_pre_hook(fail, with_kwargs=True)
    engine = EmbeddedEngine(model, Settings(letters, eos=[1], max_running_requests=2))

    async def main():
        tasks = [engine.generate(Request([5, 6, 7], Sampling(5), key=i)) for i in range(6)]
        failed = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        hook.remove()
        return failed, await engine.generate(Request([5, 6, 7], Sampling(5), key=0))

    failed, worked = asyncio.run(main())
    assert all(isinstance(f, ArithmeticError) for f in failed) and worked.tokens


def test_a_cancelled_request_leaves_the_batch(small):
    engine = EmbeddedEngine(load_model(small), Settings(letters, eos=[1]))

    async def main():
        long = asyncio.ensure_future(engine.generate(Request([5], Sampling(100, ignore_eos=True), key=0)))
        short = asyncio.ensure_future(engine.generate(Request([5], Sampling(6, ignore_eos=True), key=1)))
        for _ in range(4):
            await asyncio.sleep(0)
        long.cancel()
        response = await short
        with pytest.raises(asyncio.CancelledError):
            await long
        for _ in range(3):
            await asyncio.sleep(0)
        return response

    assert len(asyncio.run(main()).tokens) == 6
    assert engine.rows == [] and engine.runner.cache.rows == 0


def test_requests_sent_while_paused_wait(small):
    engine = EmbeddedEngine(load_model(small), Settings(letters, eos=[1]))

    async def main():
        await engine.pause("abort")
        task = asyncio.ensure_future(engine.generate(Request([5], Sampling(4, ignore_eos=True))))
        for _ in range(5):
            await asyncio.sleep(0)
        waiting = not task.done()
        await engine.resume()
        return waiting, await task

    waiting, response = asyncio.run(main())
    assert waiting and len(response.tokens) == 4


def test_an_update_with_requests_in_flight_is_a_defect(small):
    engine = EmbeddedEngine(load_model(small), Settings(letters, eos=[1]))

    async def main():
        task = asyncio.ensure_future(engine.generate(Request([5], Sampling(40, ignore_eos=True))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="pause or abort"):
            await engine.update_weights([], 1)
        await engine.abort()
        return await task

    assert asyncio.run(main()).finish == "abort"


def test_the_engine_refuses_to_generate_after_half_an_update(small):
    engine = EmbeddedEngine(load_model(small), Settings(letters, eos=[1]))

    async def main():
        with pytest.raises(MilesError, match="incomplete"):
            await engine.update_weights([], 1)
        await engine.generate(Request([5], Sampling(4)))

    with pytest.raises(MilesError, match="update failed part-way"):
        asyncio.run(main())


def test_long_context_stays_exact(small, tmp_path):
    checkpoint = tiny_checkpoint("llama", tmp_path, max_position_embeddings=1024)
    engine = EmbeddedEngine(load_model(checkpoint), Settings(letters))
    prompts = [[2 + (7 * i) % 60 for i in range(n)] for n in (700, 3, 650)]
    got = generate(engine, [Request(p, Sampling(120), key=i) for i, p in enumerate(prompts)])
    scored = asyncio.run(engine.score([p + r.tokens for p, r in zip(prompts, got, strict=True)]))
    for prompt, response, row in zip(prompts, got, scored, strict=True):
        np.testing.assert_allclose(response.log_probs, row[len(prompt) - 1 :], atol=2e-4)


def test_stop_text_over_incomplete_characters():
    pieces = {0: b"ab", 1: "é".encode()[:1], 2: "é".encode()[1:], 3: b"c", 4: b"<", 5: b"/x>"}

    def decode(tokens):
        return b"".join(pieces[t] for t in tokens).decode("utf-8", errors="replace")

    text = StopText(decode, ["</x>", "zzz"])
    assert [text.add(t) for t in (0, 1, 2, 3, 4, 5)] == [False] * 5 + [True]
    assert text.text == "abéc"


def test_a_tokenizer_that_fails_fails_only_its_requests(small):
    def decode(tokens):
        if len(tokens) == 3:
            raise UnicodeError("cannot decode")
        return letters(tokens)

    engine = EmbeddedEngine(load_model(small), Settings(decode, eos=[1]))

    async def main():
        budgets = (3, 4, 3, 5)
        tasks = [engine.generate(Request([5], Sampling(n, ignore_eos=True), key=n)) for n in budgets]
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)

    got = asyncio.run(main())
    assert [isinstance(r, UnicodeError) for r in got] == [True, False, True, False]


def test_an_update_equals_a_fresh_load(checkpoint, tmp_path):
    """Every family's layout: fused experts, tied embeddings, latent attention; encoded tensors go through ``decode``."""
    other = tiny_checkpoint(checkpoint.name, tmp_path, seed=5)
    halved = [Encoded(u.name, {f"{u.name}_half": u.parts[u.name] / 2}, "halved") for u in stored_units(other)]

    class Halved(Codec):
        def decode(self, encoded):
            return encoded.parts[f"{encoded.name}_half"] * 2

    engine = EmbeddedEngine(load_model(checkpoint), Settings(letters, eos=[1], codec=Halved()))
    fresh = EmbeddedEngine(load_model(other), Settings(letters, eos=[1]))
    asyncio.run(engine.update_weights(halved, 3))
    assert engine.version == 3
    requests = [Request(p, Sampling(8), key=i) for i, p in enumerate(PROMPTS)]
    for a, b in zip(generate(engine, requests), generate(fresh, requests), strict=True):
        assert a.tokens == b.tokens and a.weight_versions == [(0, 3)] and b.weight_versions == [(0, -1)]
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)


def test_a_large_layer_follows_every_update(tmp_path):
    """Products of a few rows may read copies of the weights that are in another order."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64}
    paths = [tiny_checkpoint("llama", tmp_path / str(seed), seed=seed, **sizes) for seed in (0, 1)]
    requests = [Request([3 + i, 7], Sampling(6, temperature=0.0)) for i in range(6)]
    engine = EmbeddedEngine(load_model(paths[0]), Settings(letters, eos=[1]))
    for path in (paths[0], paths[1], paths[0]):
        asyncio.run(engine.update_weights(iter(stored_units(path)), 1))
        fresh = EmbeddedEngine(load_model(path), Settings(letters, eos=[1]))
        one, two = (generate(e, requests) for e in (engine, fresh))
        assert [r.tokens for r in one] == [r.tokens for r in two]
        for mine, theirs in zip(one, two, strict=True):
            np.testing.assert_allclose(mine.log_probs, theirs.log_probs, atol=1e-5)


def test_an_encoded_update_without_a_decoder_is_refused(small):
    engine = EmbeddedEngine(load_model(small), Settings(letters))
    with pytest.raises(MilesError, match=r"norm\.weight arrived as fancy, but this engine was built without"):
        asyncio.run(engine.update_weights([Encoded("model.norm.weight", {}, "fancy")], 1))


def test_an_end_token_that_the_model_does_not_have_is_left_out_with_a_word(small, caplog):
    model = load_model(small)
    model.generation_config.eos_token_id = [1, 64]
    tokenizer = transformers.AutoTokenizer.from_pretrained(small)
    with caplog.at_level("WARNING"):
        assert end_tokens(model, tokenizer) == sorted({1, tokenizer.eos_token_id})
    assert (
        "eos_token_id 64 of generation_config.json or config.json is outside the model's vocabulary of 64"
        in caplog.text
    )
