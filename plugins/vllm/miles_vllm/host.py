"""vLLM's ``AsyncLLM`` in a process of its own, which ``miles_workers.LocalProcess`` starts.

The process ends if vLLM's engine dies, so that the run notices both in the same way.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_core.plugin import MilesError

#: Import path of ``Host`` for ``LocalProcess``.
NAME = "miles_vllm.host:Host"
#: Parts of an engine -> vLLM's names of their memory.
_TAGS = {"weights": "weights", "cache": "kv_cache"}


class StartError(MilesError):
    """vLLM did not start."""


class Host:
    """Answers the calls of ``VllmEngine``.

    Args:
        arguments: arguments of ``AsyncEngineArgs``.
        environment: environment variables for vLLM; those that the user has set remain.
    """

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        os.environ.update({name: value for name, value in environment.items() if name not in os.environ})
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        logging.getLogger("vllm").propagate = False  # it has a handler of its own
        try:
            self.llm: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except Exception as error:
            raise StartError(f"vLLM did not start: {type(error).__name__}: {error}") from error
        self._adapters: dict[str, Any] = {}  # name -> vLLM's ``LoRARequest``
        self._ids = itertools.count(1)
        # parts without memory, and those that should have none; a part may wait for the weights, see ``_allocate``
        self._released: set[str] = set()
        self._asleep: set[str] = set()
        self._calls: dict[str, Callable[..., Awaitable[Any]]] = {
            "generate": self.generate,
            "abort": self.abort,
            "pause": self.pause,
            "resume": self.resume,
            "sleep": self.sleep,
            "wake": self.wake,
            "expect": self.expect,
            "receive": self.receive,
            "load_adapter": self.load_adapter,
            "unload_adapter": self.unload_adapter,
            "close": self.close,
        }

    def beat(self) -> tuple[()]:
        """Implements the heartbeat of ``LocalProcess``, which an engine's process does not use."""
        return ()

    async def answer(self, method: str, *args: Any) -> Any:
        """Run a call. If vLLM's engine is dead, this process ends."""
        try:
            return await self._calls[method](*args)
        except Exception as error:
            if self.llm.errored:
                logging.getLogger(__name__).error("vLLM's engine died: %s", error)
                os._exit(1)
            raise

    async def generate(
        self, number: int, tokens: NDArray[Any], parameters: Mapping[str, Any], adapter: str
    ) -> dict[str, Any]:
        """Generate one response to token ids, or score them if the parameters ask for ``prompt_logprobs``. adapter: its name; empty for the base.

        Returns:
            ``tokens``, ``log_probs``, ``finish``, ``cached_tokens``; ``routes`` if vLLM recorded them;
            ``prompt_log_probs`` if they were requested.
        """
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(**parameters, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY)
        prompt = TokensPrompt(prompt_token_ids=tokens.tolist())
        lora = self._adapters[adapter] if adapter else None
        stream = self.llm.generate(prompt, sampling, str(number), lora_request=lora)
        (result,) = [each async for each in stream]
        made, scored = result.outputs[0], result.prompt_logprobs
        return {
            "tokens": np.array(made.token_ids, np.int32),
            "log_probs": _first_of_each(made.logprobs),
            "finish": made.finish_reason or "abort",
            "cached_tokens": result.num_cached_tokens or 0,
            "routes": made.routed_experts,
            # the first token has none
            "prompt_log_probs": None if scored is None else _first_of_each(scored),
        }

    async def abort(self, number: int) -> None:
        """End a request, if vLLM has registered it."""
        await self.llm.abort(str(number))

    async def pause(self) -> None:
        """Stop the scheduler; the run has aborted all requests. Cached prefixes are dropped."""
        await self.llm.pause_generation(mode="abort", clear_cache=True)

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self.llm.resume_generation()

    async def sleep(self, parts: Sequence[str]) -> None:
        """Release the memory of these parts. vLLM releases all of it at once. If the weights stay, they are allocated again with their values,
        which take the way through host memory; the cache is not allocated again before the weights (see ``wake``)."""
        wanted = self._asleep | set(parts)
        if not wanted <= self._released:
            await self.wake([*_TAGS])
            await self.llm.sleep(level=2 if "weights" in wanted else 1)
            self._released = {*_TAGS}
        self._asleep = wanted
        await self._allocate()

    async def wake(self, parts: Sequence[str]) -> None:
        """Allocate the memory of these parts again. A cache that wakes before the weights is allocated together with them."""
        self._asleep -= set(parts)
        await self._allocate()

    async def _allocate(self) -> None:
        """Allocate what is released and should not be asleep. After weights were released, vLLM's first ``wake_up`` writes into their memory,
        whatever it allocates, so nothing is allocated before they are."""
        woken = self._released - self._asleep
        if woken and "weights" not in self._asleep:
            await self.llm.wake_up(tags=sorted(_TAGS[part] for part in woken))
            self._released -= woken

    async def expect(self, names: Sequence[str], tied: bool, layers: int | None) -> None:
        """Tell the workers which tensors an update has."""
        await self.llm.collective_rpc("miles_expect", args=(list(names), tied, layers))

    async def receive(self, message: Mapping[str, Any], version: int, last: bool) -> dict[str, Any]:
        """Pass a message of the transport ``buckets`` on to every worker; returns the first refusal, or the first worker's answer."""
        answers = await self.llm.collective_rpc("miles_receive", args=(dict(message), version, last))
        answer: dict[str, Any] = next((each for each in answers if "error" in each), answers[0])
        if answer["complete"]:
            await self.llm.reset_prefix_cache()
        return answer

    async def load_adapter(self, name: str, config: Mapping[str, Any], tensors: bytes) -> None:
        """Load an adapter: peft's configuration, and a safetensors file.

        Raises:
            MilesError: vLLM rejected it.
        """
        from vllm.lora.request import LoRARequest

        with tempfile.TemporaryDirectory(prefix="miles-adapter-") as path:  # vLLM does not read it again
            (Path(path) / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
            (Path(path) / "adapter_model.safetensors").write_bytes(tensors)
            request = LoRARequest(lora_name=name, lora_int_id=next(self._ids), lora_path=path)
            try:
                loaded = await self.llm.add_lora(request)
            except Exception as error:
                if self.llm.errored:
                    raise
                raise MilesError(f"vLLM rejected the adapter {name}: {error}") from error
        if not loaded:
            raise MilesError(f"vLLM rejected the adapter {name}, and gave no reason")
        self._adapters[name] = request

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter."""
        await self.llm.remove_lora(self._adapters.pop(name).lora_int_id)

    async def close(self) -> None:
        """Stop vLLM."""
        self.llm.shutdown()


def _first_of_each(logprobs: Any) -> NDArray[Any]:
    """Return the log-probability of the token itself at each position of vLLM's ``FlatLogprobs`` that has one, float32."""
    if not logprobs:
        return np.zeros(0, np.float32)
    starts, ends = np.array(logprobs.start_indices), np.array(logprobs.end_indices)
    return np.array(logprobs.logprobs, np.float32)[starts[ends > starts]]
