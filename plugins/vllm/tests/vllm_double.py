"""A double of vLLM: an ``AsyncLLM`` whose only worker serves a Transformers model, and the modules that the plugin imports from vLLM.

What it imitates was read in the source of vLLM 0.26.0 and 0.32.0: the arguments and results of ``AsyncLLM``, ``collective_rpc``,
``FlatLogprobs``, and ``initialize_layerwise_reload`` and its end, between which parameters have no values.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import sys
import types
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from miles_vllm.receiver import WeightReceiver
from miles_workers import ProcessEnded


class Flat:
    """``FlatLogprobs`` with one log-probability per position."""

    def __init__(self, values: Iterable[float], empty: int = 0) -> None:
        self.logprobs = [float(value) for value in values]
        self.start_indices = [0] * empty + [*range(len(self.logprobs))]
        self.end_indices = [0] * empty + [*range(1, len(self.logprobs) + 1)]

    def __len__(self) -> int:
        return len(self.start_indices)


class Model(nn.Module):
    """vLLM's model: loads by name, and returns the names."""

    def __init__(self, checkpoint: str) -> None:
        super().__init__()
        self.inner: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own = dict(self.inner.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                own[name].copy_(tensor)
        return set(own)


class Worker(WeightReceiver):
    """vLLM's worker with the plugin's extension."""

    def __init__(self, checkpoint: str, arguments: dict[str, Any]) -> None:
        model = Model(checkpoint)
        self.model_runner = types.SimpleNamespace(get_model=lambda: model)
        self.model, self.model_config = model, None
        self.vllm_config = self._describe(checkpoint, model, arguments)
        self.device = torch.device("cpu")

    def _describe(self, checkpoint: str, model: Model, arguments: dict[str, Any]) -> Any:
        space = types.SimpleNamespace
        described = space(
            model=checkpoint,
            hf_config=model.inner.config,
            dtype=torch.float32,
            quantization=None,
            logprobs_mode=arguments["logprobs_mode"],
            max_model_len=arguments["max_model_len"],
        )
        parallel = space(data_parallel_size=1, pipeline_parallel_size=1)
        return space(
            model_config=described,
            parallel_config=parallel,
            cache_config=space(cache_dtype="auto"),
            lora_config=self._describe_adapters(arguments),
            speculative_config=None,
        )

    @staticmethod
    def _describe_adapters(arguments: dict[str, Any]) -> Any:
        if not arguments.get("enable_lora"):
            return None
        names = ("max_lora_rank", "max_loras", "max_cpu_loras")
        targets = arguments.get("lora_target_modules")
        return types.SimpleNamespace(**{name: arguments[name] for name in names}, target_modules=targets)


class AsyncLLM:
    """Generates with the worker's model. One step computes one token of each of the first ``max_num_seqs`` requests."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments, self.errored = arguments, False
        self.worker, self.prefix_resets, self.slept = Worker(arguments["model"], arguments), 0, list[Any]()
        self.slots = asyncio.Semaphore(arguments["max_num_seqs"])
        self.aborted: set[str] = set()
        self.draw = torch.Generator().manual_seed(arguments["seed"])
        self.vllm_paused = False
        self.loras: dict[int, Any] = {}  # id -> the base plus this adapter, the least recently used first

    @classmethod
    def from_engine_args(cls, arguments: Any) -> AsyncLLM:
        return cls(vars(arguments))

    def _scores(self, tokens: list[int], lora: Any) -> Tensor:
        if lora is not None:
            self._use(lora)
        model = self.worker.model.inner if lora is None else self.loras[lora.lora_int_id]
        with torch.no_grad():
            found: Tensor = model(torch.tensor([tokens])).logits[0].float()
        return found

    def _use(self, lora: Any) -> None:
        """Load an adapter unless it is loaded, and drop the least recently used one if there are too many."""
        model = self.loras.pop(lora.lora_int_id, None)
        if model is None:
            config = json.loads((Path(lora.lora_path) / "adapter_config.json").read_text())
            if config["r"] > self.arguments["max_lora_rank"]:
                raise ValueError(
                    f"LoRA rank {config['r']} is greater than max_lora_rank {self.arguments['max_lora_rank']}."
                )
            model = copy.deepcopy(self.worker.model.inner)
            own, scale = dict(model.named_parameters()), config["lora_alpha"] / config["r"]
            tensors = load_file(Path(lora.lora_path) / "adapter_model.safetensors")
            for name, down in tensors.items():
                if name.endswith("lora_A.weight"):
                    layer = name.removeprefix("base_model.model.").removesuffix("lora_A.weight") + "weight"
                    assert layer.split(".")[-2] in self.arguments["lora_target_modules"]
                    own[layer].data += tensors[name.replace("lora_A", "lora_B")] @ down * scale
            if len(self.loras) == self.arguments["max_cpu_loras"]:
                del self.loras[next(iter(self.loras))]
        self.loras[lora.lora_int_id] = model

    async def add_lora(self, lora: Any) -> bool:
        self._use(lora)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        return self.loras.pop(lora_id, None) is not None

    async def generate(
        self, prompt: dict[str, Any], sampling: Any, request_id: str, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        tokens, made, log_probs = list(prompt["prompt_token_ids"]), list[int](), list[float]()
        finish, stop, text = "length", None, ""
        assert len(tokens) + sampling.max_tokens <= self.arguments["max_model_len"]
        async with self._slot(request_id):
            while len(made) < sampling.max_tokens:
                await asyncio.sleep(0)
                if request_id in self.aborted:
                    finish = "abort"
                    break
                assert not self.vllm_paused, "the engine sends no request while it is paused"
                token, log_prob = self._sample(tokens + made, sampling, lora_request)
                made.append(token)
                log_probs.append(log_prob)
                text += self._text(token) if sampling.detokenize else ""
                stop = next((each for each in sampling.stop if each in text), None)
                if stop or token in sampling.stop_token_ids or (token == 1 and not sampling.ignore_eos):
                    finish = "stop"
                    break
        self.aborted.discard(request_id)
        scored = None
        if sampling.prompt_logprobs is not None:
            rows = (
                self._scores(tokens, lora_request).log_softmax(-1)[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]
            )
            scored = Flat(rows.tolist(), empty=1)
        output = types.SimpleNamespace(
            token_ids=made, logprobs=Flat(log_probs), finish_reason=finish, stop_reason=stop, routed_experts=None
        )
        yield types.SimpleNamespace(outputs=[output], prompt_logprobs=scored, num_cached_tokens=0)

    @contextlib.asynccontextmanager
    async def _slot(self, request_id: str) -> AsyncIterator[None]:
        while self.slots.locked() and request_id not in self.aborted:
            await asyncio.sleep(0.001)
        if request_id in self.aborted:
            yield
            return
        async with self.slots:
            yield

    def _sample(self, tokens: list[int], sampling: Any, lora: Any) -> tuple[int, float]:
        logits = self._scores(tokens, lora)[-1] / (sampling.temperature or 1.0)
        if sampling.top_k > 0 or sampling.top_p < 1:
            order = logits.argsort(descending=True)
            before = logits.softmax(-1)[order].cumsum(0) - logits.softmax(-1)[order]
            keep = (before < sampling.top_p) & (
                torch.arange(len(order)) < (sampling.top_k if sampling.top_k > 0 else len(order))
            )
            logits[order[~keep]] = -torch.inf
        probabilities = logits.softmax(-1)
        greedy = sampling.temperature == 0
        token = int(logits.argmax() if greedy else torch.multinomial(probabilities, 1, generator=self.draw))
        return token, float(logits.log_softmax(-1)[token])

    def _text(self, token: int) -> str:
        from miles_testing import tiny_tokenizer

        return str(tiny_tokenizer().decode([token], skip_special_tokens=True))

    async def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert mode == "abort" and clear_cache
        self.vllm_paused = True

    async def resume_generation(self) -> None:
        self.vllm_paused = False

    async def sleep(self, level: int) -> None:
        self.slept.append(level)

    async def wake_up(self, tags: list[str]) -> None:
        # vLLM writes the model's buffers into the memory of the weights
        assert self.slept[-1] != 2 or "weights" in tags, "CUDA error: invalid argument"
        self.slept.append(tags)

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        # in vLLM this is another process, without an event loop
        return [await asyncio.to_thread(getattr(self.worker, method), *args)]

    async def reset_prefix_cache(self) -> bool:
        self.prefix_resets += 1
        return True

    def shutdown(self) -> None:
        pass


class SamplingParams(types.SimpleNamespace):
    """``SamplingParams`` with vLLM's defaults."""

    def __init__(self, **given: Any) -> None:
        assert given["temperature"] <= 2.0, "vLLM refuses it"
        defaults = {
            "top_p": 1.0,
            "top_k": -1,
            "stop": [],
            "stop_token_ids": [],
            "ignore_eos": False,
            "prompt_logprobs": None,
        }
        super().__init__(**{**defaults, **given})


def _begin(model: Model) -> None:
    model.before = {name: p.detach().clone() for name, p in model.named_parameters()}


def _end(model: Model, config: object) -> None:
    del model.before


def stand_in_for_vllm(monkeypatch: Any) -> None:
    """Let the plugin's imports of vLLM find this double."""
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"SamplingParams": SamplingParams, "TokensPrompt": dict},
        "vllm.sampling_params": {"RequestOutputKind": types.SimpleNamespace(FINAL_ONLY=2)},
        "vllm.config": {"set_current_vllm_config": lambda config: contextlib.nullcontext()},
        "vllm.engine": {},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": types.SimpleNamespace},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": types.SimpleNamespace},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": _begin,
            "finalize_layerwise_reload": _end,
        },
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


class Process:
    """A ``LocalProcess`` whose worker runs in this process, on the caller's event loop."""

    started: list[Process]

    def __init__(self, directory: str, name: str, level: str) -> None:
        self.worker: Any = None
        self.pid, self.dead = 0, False
        (Path(directory) / "workers").mkdir(parents=True, exist_ok=True)
        type(self).started.append(self)

    async def call(self, method: str, *args: Any) -> Any:
        from miles_vllm.host import Host

        if self.dead:
            raise ProcessEnded("its process ended with exit status 1")
        if method == "make":
            self.worker = Host(*args[1:])
            return None
        task = asyncio.ensure_future(self.worker.answer(method, *args))
        while not task.done():
            await asyncio.wait([task], timeout=0.01)
            if self.dead:
                task.cancel()
                raise ProcessEnded("its process ended with exit status 1")
        return task.result()

    async def kill(self) -> None:
        self.dead = True
