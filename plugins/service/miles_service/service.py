"""The requests of clients: what each of them does, who owns which model, and the results until clients have fetched them.

Every request that computes becomes a job, whose id follows from the model or sampler and the client's sequence number. A client that repeats a
request after a broken connection therefore finds the job of the first attempt.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.engine import Sampling
from miles_core.plugin import CheckpointError, ConfigError, MilesError
from miles_core.primitives import read_state
from miles_service.adapters import Adapter, Adapters
from miles_service.datums import INPUTS, make_batch
from miles_service.paths import KEPT, SavedWeights
from miles_service.queue import FairQueue, Job
from miles_service.sessions import Model, Session
from miles_service.wire import encode_gradients, encode_samples
from miles_tools.http_server import ApiError

#: Seconds without any request after which a session may lose its adapters to others; the client's heartbeat comes every 10 seconds.
SILENT = 600.0
#: Number of fetched results that are kept for a client that did not receive the reply.
FETCHED = 256
#: Seconds that a request for a result waits before the client has to ask again.
WAIT = 20.0
#: Random numbers of requests with a seed: first number, and largest number of responses to such a request.
SEEDED, MOST_SEEDED = 1 << 41, 1 << 10
#: Options of a sample request that are not supported.
UNSUPPORTED = (
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "record_stability_info",
)
NOTICE = "adapters of this server are on linear layers of the decoder: train_unembed has no effect"


class Service:
    """Turns requests into jobs. Its methods run in the HTTP thread, and the jobs' ``work`` in the thread of the models.

    Args:
        base: name of the base model, as clients give it.
        context: length of its context; None if unknown.
        adapters, saved: the models and the saved weights.
        queue, loop: the queue, and the event loop in which it runs.
    """

    def __init__(
        self,
        base: str,
        context: int | None,
        adapters: Adapters,
        saved: SavedWeights,
        queue: FairQueue,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.base, self.context, self.adapters, self.saved = base, context, adapters, saved
        self.queue, self.loop = queue, loop
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, tuple[Session, Path | None]] = {}
        self.jobs: dict[str, Job] = {}
        self.stopping = asyncio.Event()  # set in the event loop of the HTTP server
        self._fetched: deque[str] = deque()
        self._seeded: asyncio.Lock | None = None

    # ---- sessions

    def create_session(self) -> dict[str, Any]:
        """Start a client's session."""
        session = Session(secrets.token_hex(8), time.monotonic())
        self.sessions[session.id] = session
        return {"type": "create_session", "session_id": session.id, "info_message": NOTICE}

    def session(self, name: str) -> Session:
        """Return a session, and note that it is alive."""
        session = self.sessions.get(name)
        if session is None:
            raise ApiError(404, f"there is no session {name!r:.80} on this server; was it restarted?", "not_found")
        if session.finished:
            raise ApiError(410, f"the session {name} has ended", "gone")
        session.seen = time.monotonic()
        return session

    def finish(self, session: Session, client: str) -> None:
        """End a session and unload its models. ``client``: whose turn the work takes."""
        session.finished = True
        for model in [each for each in self.models.values() if each.session is session and not each.unloaded]:
            self._submit(f"{model.id}:unload", client, lambda model=model: self._unload(model))  # type: ignore[misc]

    # ---- models

    def create_model(self, body: Mapping[str, Any], digest: bytes) -> dict[str, Any]:
        """Create a model with a new adapter."""
        lora = body.get("lora_config") or {}
        self._check_base(body["base_model"])
        self._check_optimizer(body.get("optimizer_config"))
        shape = (int(lora.get("rank", 32)), lora.get("train_attn", True), lora.get("train_mlp", True), lora.get("seed"))

        async def work(model: Model) -> Any:
            model.adapter = await self.adapters.create(self.adapters.shape_of(*shape))
            return {"type": "create_model", "model_id": model.id}

        return self._new_model(body, digest, work)

    def load_weights(self, body: Mapping[str, Any], digest: bytes) -> dict[str, Any]:
        """Load saved weights into a model, or create one of their shape."""
        if body.get("weights_access_token"):
            raise ApiError(
                400, "weights_access_token is not supported: all weights here belong to the server", "unsupported"
            )
        self._check_optimizer(body.get("optimizer_config"))
        path, optimizer = str(body["path"]), bool(body["optimizer"])
        done = {"type": "load_weights", "path": path}
        if body.get("session_id") is None:

            async def load(adapter: Adapter) -> Any:
                await adapter.opened.load_state(self.saved.find(path), optimizer)
                return done

            return self.train(body, digest, load)
        if body.get("base_model"):
            self._check_base(body["base_model"])

        async def work(model: Model) -> Any:
            model.adapter = await self.adapters.restore(self.saved.find(path), optimizer)
            return done

        return self._new_model(body, digest, work)

    def _new_model(
        self, body: Mapping[str, Any], digest: bytes, work: Callable[[Model], Awaitable[Any]]
    ) -> dict[str, Any]:
        session = self.session(str(body["session_id"]))
        name = f"{session.id}:train:{int(body['model_seq_id'])}"
        if name not in self.models:
            self.models[name] = Model(name, session)
            for other in [*self.sessions.values()]:
                if not other.finished and time.monotonic() - other.seen > SILENT:
                    self.finish(other, session.id)
        model = self.models[name]
        return self._submit(f"{name}:create", session.id, lambda: work(model), digest) | {"model_id": name}

    def model(self, name: str) -> Model:
        """Return a client's model."""
        model = self.models.get(name)
        if model is None:
            raise ApiError(404, f"there is no model {name!r:.80} on this server; was it restarted?", "not_found")
        if model.unloaded:
            raise ApiError(410, f"the model {name} was unloaded; create another one, or load its saved weights", "gone")
        model.session.seen = time.monotonic()
        return model

    def train(
        self, body: Mapping[str, Any], digest: bytes, work: Callable[[Adapter], Awaitable[Any]]
    ) -> dict[str, Any]:
        """Submit a request to a model. Its sequence numbers increase; one that was used names the same request."""
        model, number = self.model(str(body["model_id"])), int(body["seq_id"])
        name = f"{model.id}:{number}"
        if number <= model.last and name not in self.jobs:
            raise ApiError(
                400, f"request {number} of the model {model.id} was answered before {model.last}", "conflict"
            )
        model.last = max(model.last, number)
        return self._submit(name, model.session.id, lambda: work(model.require()), digest) | {"model_id": model.id}

    def forward_backward(self, body: Mapping[str, Any], digest: bytes) -> dict[str, Any]:
        """Compute a loss and, unless ``forward_only``, add its gradients."""
        loss, settings, forward_only = body["loss_fn"], body["settings"], body["forward_only"]

        async def work(adapter: Adapter) -> Any:
            if loss not in INPUTS:
                raise ConfigError(f"the loss {loss!r:.80} is not supported; the losses are {', '.join(INPUTS)}")
            batch = make_batch(body["data"], loss)
            run = adapter.opened.forward if forward_only else adapter.opened.forward_backward
            found = await run(batch.samples, loss, settings)
            return encode_gradients(batch.align(found.log_probs), {"loss:sum": found.metrics["train/loss_sum"]})

        return self.train(body, digest, work)

    def optim_step(self, body: Mapping[str, Any], digest: bytes) -> dict[str, Any]:
        """Step the optimizer."""
        if body.get("adam_params") is None:
            raise ApiError(400, "the optimizer of this server is AdamW; give AdamParams", "unsupported")
        params = dict(body["adam_params"])

        async def work(adapter: Adapter) -> Any:
            return {"type": "optim_step", "metrics": await adapter.optimizer_step(params)}

        return self.train(body, digest, work)

    def save_weights(self, body: Mapping[str, Any], digest: bytes, kind: str) -> dict[str, Any]:
        """Save a model under a name, or for one sampler."""
        model, number = self.model(str(body["model_id"])), int(body["seq_id"])
        sampler, given = body.get("sampling_session_seq_id"), body.get("path")
        answer: dict[str, Any] = {"type": f"save_{kind}" if kind == "weights" else "save_weights_for_sampler"}
        if given is None and sampler is not None:
            directory, overwrite = self.saved.unnamed(model.id, number), True
            answer["sampling_session_id"] = name = f"{model.session.id}:sample:{int(sampler)}"
            self.samplers[name] = model.session, directory
        else:
            answer["path"], directory = self.saved.new(model.id, kind, given or f"step-{number}")
            overwrite = bool(body.get("overwrite"))

        async def work(adapter: Adapter) -> Any:
            await adapter.opened.save_state(directory, overwrite)
            return answer

        return self.train(body, digest, work)

    def unload(self, body: Mapping[str, Any], digest: bytes) -> dict[str, Any]:
        """Release a model."""
        model = self.model(str(body["model_id"]))
        return self._submit(f"{model.id}:unload", model.session.id, lambda: self._unload(model), digest)

    async def _unload(self, model: Model) -> Any:
        adapter, model.adapter, model.unloaded = model.adapter, None, True
        self.saved.forget(model.id)
        if adapter is not None:
            await self.adapters.remove(adapter)
        return {"type": "unload_model", "model_id": model.id}

    def info(self, name: str) -> dict[str, Any]:
        """Describe a model."""
        adapter = self.model(name).require()
        data = {"model_name": self.base, "tokenizer_id": self.base, "arch": "unknown"}
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": name,
            "is_lora": True,
            "lora_rank": adapter.rank,
            "model_name": self.base,
        }

    def weights_info(self, path: str) -> dict[str, Any]:
        """Describe saved weights."""
        rank = read_state(self.saved.find(path))["lora.rank"]
        return {"base_model": self.base, "is_lora": True, "lora_rank": rank}

    # ---- sampling

    def create_sampler(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Start a sampling session with saved weights or with the base."""
        session, path = self.session(str(body["session_id"])), body.get("model_path")
        if path is None:
            self._check_base(body["base_model"])
        name = f"{session.id}:sample:{int(body['sampling_session_seq_id'])}"
        self.samplers[name] = session, None if path is None else self.saved.find(str(path))
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def sampler_info(self, name: str) -> dict[str, Any]:
        """Describe a sampling session."""
        self._sampler(name)
        return {"sampler_id": name, "base_model": self.base}

    def _sampler(self, name: str) -> tuple[Session, Path | None]:
        if name not in self.samplers:
            raise ApiError(
                404, f"there is no sampling session {name!r:.80} on this server; was it restarted?", "not_found"
            )
        session, weights = self.samplers[name]
        return self.session(session.id), weights

    def sample(self, body: Mapping[str, Any], digest: bytes) -> dict[str, Any]:
        """Generate responses, and score the prompt if requested."""
        for name in UNSUPPORTED:
            if body.get(name):
                what = "the loss stable_reinforce (record_stability_info)" if name == "record_stability_info" else name
                raise ApiError(400, f"{what} is not supported by this server", "unsupported")
        if body.get("sampling_session_id") is None:
            raise ApiError(
                400, "create a sampling session first; requests with model_path are not supported", "unsupported"
            )
        name = str(body["sampling_session_id"])
        session, weights = self._sampler(name)
        prompt = [token for chunk in body["prompt"]["chunks"] for token in _tokens_of(chunk)]
        count, asked = int(body.get("num_samples", 1)), body["sampling_params"]
        sampling, seed = self._sampling(asked, len(prompt)), asked.get("seed")
        scored, last = bool(body.get("prompt_logprobs")), body.get("prompt_logprobs_last_n")

        async def work() -> Any:
            if weights is not None and not weights.is_dir():
                raise CheckpointError(
                    f"the weights of this sampler are gone: each model keeps {KEPT} unnamed ones; save weights that are used for longer under "
                    "a name"
                )
            async with self.adapters.sampler(weights) as policy:
                if seed is None:
                    samples = await policy.sample(prompt, count, sampling)
                else:
                    self._seeded = self._seeded or asyncio.Lock()
                    async with self._seeded:  # two requests in flight must not have the same random numbers
                        first = SEEDED + int(seed) % (1 << 30) * MOST_SEEDED
                        samples = await policy.sample(prompt, min(count, MOST_SEEDED), sampling, first)
                scores = await _score(policy, prompt, last) if scored else None
            found = [
                (np.asarray(s.tokens)[s.prompt_length :], np.asarray(s.rollout_log_probs), s.status == "truncated")
                for s in samples
            ]
            return encode_samples(found, scores)

        request = f"{name}:{int(body['seq_id'])}"
        answer = self._submit(request, session.id, work, digest, alone=False)
        return answer | {"sample_sequence_ids": [f"{request}:{i}" for i in range(count)]}

    def _sampling(self, asked: Mapping[str, Any], prompt: int) -> Sampling:
        room = (self.context or 1 << 31) - prompt
        stop = asked.get("stop")
        stops = [stop] if isinstance(stop, str) else [*(stop or ())]
        return Sampling(
            max_new_tokens=min(int(asked.get("max_tokens") or room), max(room, 1)),
            temperature=float(asked.get("temperature", 1.0)),
            top_p=float(asked.get("top_p", 1.0)),
            top_k=int(asked.get("top_k", -1)),
            stop=tuple(each for each in stops if isinstance(each, str)),
            stop_token_ids=tuple(each for each in stops if not isinstance(each, str)),
            ignore_eos=stop == [],
        )

    # ---- results

    async def result(self, name: str) -> Any:
        """Return a job's result once it is complete: bytes or JSON data.

        Raises:
            ApiError: status 408 if it is not complete yet, 503 if the server stops; 404 if there is no such job.
        """
        job = self.jobs.get(name)
        if job is None:
            raise ApiError(404, f"there is no request {name!r:.120} on this server; was it restarted?", "not_found")
        await job.wait(WAIT, self.stopping)
        try:
            found = job.result.result()
        except (MilesError, ApiError) as error:
            found = {"error": " ".join(str(error).split()), "category": "user"}
        except Exception as error:
            found = {"error": f"the server failed ({type(error).__name__}); its log has details", "category": "server"}
        self._fetched.append(name)
        if len(self._fetched) > FETCHED:
            self.jobs.pop(self._fetched.popleft(), None)
        return found

    def _submit(
        self,
        name: str,
        client: str,
        work: Callable[[], Awaitable[Any]],
        digest: bytes = b"",
        alone: bool = True,
    ) -> dict[str, Any]:
        if name in self.jobs:
            if self.jobs[name].digest != digest:
                raise ApiError(
                    400,
                    f"the number of request {name} was used for another request: two clients use one model; each needs a model of its own",
                    "conflict",
                )
        else:
            self.jobs[name] = job = Job(name, client, work, alone, digest)
            self.loop.call_soon_threadsafe(self.queue.put, job)
        return {"request_id": name}

    def _check_base(self, name: object) -> None:
        if name != self.base:
            raise ApiError(400, f"this server has the base model {self.base!r} and no {name!r:.120}", "not_found")

    def _check_optimizer(self, config: Mapping[str, Any] | None) -> None:
        if config is not None and config.get("type") != "adamw":
            raise ApiError(
                400, f"the optimizer {config.get('type')!r:.80} is not supported; it is adamw", "unsupported"
            )


def _tokens_of(chunk: Mapping[str, Any]) -> list[int]:
    if "tokens" not in chunk:
        raise ApiError(400, "the prompt has an image or audio; this service samples from text only", "unsupported")
    return list(chunk["tokens"])


async def _score(policy: Any, prompt: list[int], last: int | None) -> np.ndarray:
    """Return the log-probability of each token of a prompt, NaN for the first and for those that were not requested."""
    scores = np.full(len(prompt), np.nan, np.float32)
    if len(prompt) > 1:
        (scores[1:],) = await policy.score([prompt])
    scores[: len(prompt) - (last or len(prompt))] = np.nan
    return scores
