"""Running rows as columns: the same rows as when every token is appended on its own, with work that does not grow with the rows."""

from __future__ import annotations

import random
import sys
from unittest.mock import Mock

import numpy as np
import pytest

from miles_core.contracts.engine import Request, Sampling
from miles_embedded.engine.detokenizer import Detokenizer
from miles_embedded.engine.sampling import Sampled
from miles_embedded.engine.scheduler import Scheduler
from miles_embedded.engine.step import Emitted
from miles_testing.tiny import tiny_tokenizer

VOCABULARY = 50


def letters(tokens):
    return "".join(chr(60 + t) for t in tokens)


class Engine:
    """The batch of an engine without a model: rows join, take steps, and leave as in the cache."""

    def __init__(self, decode=letters):
        self.scheduler, self.rows, self.done = Scheduler(decode, [1], 10_000, VOCABULARY), [], []

    def join(self, *requests):
        new = []
        for request in requests:
            row = self.scheduler.make_row(request, Mock(done=lambda: False))
            row.slot = len(self.rows)
            self.rows.append(row)
            new.append(row)
        self.scheduler.columns.join(new)
        return new

    def leave(self, gone):
        self.scheduler.columns.leave(gone)
        slots = sorted(row.slot for row in gone)
        left = len(self.rows) - len(gone)
        where = np.array([slot for slot in slots if slot < left], np.int64)
        sources = np.array([row.slot for row in self.rows[left:] if row not in gone], np.int64)
        for to, source in zip(where, sources, strict=True):
            self.rows[to] = self.rows[source]
            self.rows[to].slot = to
        del self.rows[left:]
        for row in gone:
            row.slot = -1
        self.scheduler.columns.move(where, sources, left)
        self.done += gone

    def step(self, emitted, version=0):
        self.leave(self.scheduler.accept(self.rows, emitted, np.array([version])))


def found(engine):
    return {
        row.request.key: (
            row.tokens.tolist(),
            row.log_probs.tolist(),
            row.versions,
            row.finish,
            row.text and row.text.text,
        )
        for row in engine.rows + engine.done
    }


def requests(draw, first, count):
    return [
        Request(
            [2 + key % 7, 3],
            Sampling(
                draw.randint(1, 400),
                stop_token_ids=(5,) if key % 3 else (),
                stop=("DE",) if key % 5 == 0 else (),
                ignore_eos=key % 2 == 0,
            ),
            key=key,
        )
        for key in range(first, first + count)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_of_single_appends(seed):
    """Rows join and leave, weights change, some rows have no token in a step, and something reads rows in between."""
    draw, columns, single = random.Random(seed), Engine(), Engine()
    key = 0
    for step in range(700):
        if len(columns.rows) < 3 or draw.random() < 0.02:
            joining = requests(draw, key, draw.randint(1, 6))
            key += len(joining)
            for engine in (columns, single):
                engine.join(*joining)
        count = len(columns.rows)
        joined = [not row.log_probs and draw.random() < 0.5 for row in columns.rows]
        tokens = [-1 if late else draw.choice([*range(6, VOCABULARY)] * 9 + [1, 5, 8, 9]) for late in joined]
        log_probs = [-draw.random() for _ in range(count)]
        version = step // 150
        columns.step(Sampled(np.array(tokens), np.array(log_probs)), version)
        emitted = (
            [[] if t < 0 else [t] for t in tokens],
            [[] if t < 0 else [p] for t, p in zip(tokens, log_probs, strict=True)],
        )
        single.step(Emitted(*emitted), version)
        if draw.random() < 0.05 and columns.rows:
            row = draw.choice(columns.rows)
            assert len(row.response) == len(row.log_probs) == columns.scheduler.columns.lengths[row.slot] - 2
        assert [row.request.key for row in columns.rows] == [row.request.key for row in single.rows]
        running = columns.scheduler.columns
        assert running.last[: running.count].tolist() == [row.tokens[-1] for row in single.rows]
    assert found(columns) == found(single) and len(columns.done) > 20


def test_a_plain_step_calls_as_many_functions_for_many_rows_as_for_few():
    def calls(count):
        engine, seen = Engine(), []
        engine.join(*(Request([2, 3], Sampling(50), key=key) for key in range(count)))
        sampled = Sampled(np.full(count, 7), np.full(count, -0.5))
        engine.step(sampled)
        sys.setprofile(lambda frame, event, _: seen.append(event))
        engine.scheduler.accept(engine.rows, sampled, np.array([0]))
        sys.setprofile(None)
        return len(seen)

    assert calls(4) == calls(200)


def test_responses_that_end_together_are_decoded_in_one_call():
    tokenizer = tiny_tokenizer()
    decode = Detokenizer(tokenizer)
    engine, batches = Engine(decode), []
    decode.batch = lambda responses, batch=decode.batch: (batches.append(len(responses)), batch(responses))[1]
    rows = engine.join(*(Request([2, 3], Sampling(2), key=key) for key in range(3)))
    for token in (20, 21):
        engine.step(Sampled([token, token + 1, token + 2], [-0.5] * 3))
    engine.scheduler.respond(rows, "", [{} for _ in rows])
    texts = [row.future.set_result.call_args.args[0].text for row in rows]
    assert batches == [3] and texts == [tokenizer.decode([t, t + 1], skip_special_tokens=True) for t in (20, 21, 22)]


def test_a_response_that_cannot_be_decoded_fails_alone():
    def decode(tokens):
        if 21 in tokens:
            raise ValueError("no such token")
        return letters(tokens)

    engine = Engine(decode)
    rows = engine.join(*(Request([2, 3], Sampling(1), key=key) for key in range(2)))
    engine.step(Sampled([20, 21], [-0.5] * 2))
    engine.scheduler.respond(rows, "", [{}, {}])
    assert rows[0].future.set_result.call_args.args[0].text == letters([20])
    assert isinstance(rows[1].future.set_exception.call_args.args[0], ValueError)
