"""What runs inside SGLang's schedulers, and what reaches them, on stand-ins for them."""

from __future__ import annotations

import asyncio
import base64
import pickle
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from miles_sglang import inside
from miles_sglang.answers import Answer
from miles_sglang.record import Record
from miles_sglang.request_batcher import RequestBatcher

#: As the output streamer of a scheduler that sends.
SENDER = types.SimpleNamespace(send_to_detokenizer=types.SimpleNamespace(socket=object()))


@dataclass
class Tokenized:
    rid: str


@dataclass
class Batch:
    batch: list[Tokenized]


class Setting:
    """As a variable of SGLang's environment."""

    value = True

    def get(self) -> bool:
        return self.value


class Scheduler:
    """As ``handle_rpc_request`` finds a method, and ``collective_rpc`` reports."""

    server_args = types.SimpleNamespace(enable_dp_attention=False)

    def collective_rpc(self, method: str, **parameters: Any) -> None:
        try:
            getattr(self, method)(**parameters)
        except Exception as error:
            raise AssertionError(str(error)) from error


@pytest.fixture
def hooks(monkeypatch: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    registry = types.SimpleNamespace(register=lambda target, hook, kind: found.setdefault(target, hook))
    kinds = types.SimpleNamespace(AFTER="after", BEFORE="before", AROUND="around")
    for name, content in (
        ("sglang.srt.managers.scheduler", {"Scheduler": Scheduler}),
        ("sglang.srt.plugins.hook_registry", {"HookRegistry": registry, "HookType": kinds}),
        ("sglang.srt.environ", {"envs": types.SimpleNamespace(SGLANG_USE_PICKLE_IPC=Setting())}),
        (
            "sglang.srt.managers.io_struct",
            {"TokenizedGenerateReqInput": Tokenized, "BatchTokenizedGenerateReqInput": Batch},
        ),
    ):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            if (part := ".".join(parts[:end])) not in sys.modules:
                monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
        vars(sys.modules[name]).update(content)
    return found


def test_it_does_nothing_in_somebody_elses_sglang(hooks: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.delenv(inside.VARIABLE, raising=False)
    inside.install()
    inside.check(Scheduler())
    assert not hooks and not hasattr(Scheduler, "miles_digest")


def test_routed_experts_leave_a_scheduler_as_bytes_and_the_half_is_known_by_its_digest(
    hooks: dict[str, Any], monkeypatch: Any
) -> None:
    monkeypatch.setenv(inside.VARIABLE, "uint8")
    monkeypatch.setattr(Scheduler, "miles_digest", None, raising=False)
    with pytest.raises(
        RuntimeError, match="SGLang's schedulers did not load the scheduler code of miles-plugin-sglang"
    ):
        inside.check(Scheduler())
    inside.install()
    inside.check(Scheduler())
    complete = next(hook for target, hook in hooks.items() if target.endswith("_maybe_collect_routed_experts"))
    request = types.SimpleNamespace(routed_experts=None)

    def collect(processor: Any, request: Any) -> None:
        request.routed_experts = torch.tensor([[[0, 255]]], dtype=torch.int32)

    complete(collect, None, request)
    inside.send_routes(SENDER)
    assert request.routed_experts.tobytes() == bytes([0, 255])
    complete(lambda *_: None, None, types.SimpleNamespace(routed_experts=None))
    ours = inside.digest()
    monkeypatch.setattr(inside, "digest", lambda: "another")
    with pytest.raises(AssertionError, match=f"its digest is another, not {ours}"):
        Scheduler().collective_rpc("miles_digest", expected=ours)


def test_the_detokenizer_encodes_records_as_it_encodes_tensors() -> None:
    rows = torch.arange(12, dtype=torch.uint8).view(3, 2, 2)
    found = pickle.loads(pickle.dumps([Record(rows.numpy().tobytes()), None], pickle.HIGHEST_PROTOCOL))
    text = base64.b64encode(found[0].numpy().tobytes()).decode()  # DetokenizerManager._b64_encode_per_request
    assert text == base64.b64encode(rows.numpy().tobytes()).decode() and found[1] is None
    answer = Answer.from_sglang({"output_ids": [1], "meta_info": {"routed_experts": text}}, "uint8")
    assert answer.columns["routes"].tolist() == list(range(12))


def test_records_stay_tensors_where_sglang_declares_them_so(hooks: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setenv(inside.VARIABLE, "uint8")
    monkeypatch.setattr(Setting, "value", False)
    monkeypatch.setattr(inside, "_pickles", True)
    inside.install()
    rows = torch.arange(4, dtype=torch.uint8).view(4, 1, 1)
    request = types.SimpleNamespace(routed_experts=None)
    inside.complete_routes(lambda _, r: setattr(r, "routed_experts", rows[1:2]), None, request)
    inside.send_routes(SENDER)
    assert request.routed_experts.tolist() == [1] and request.routed_experts.untyped_storage().nbytes() == 1


def test_a_model_without_weights_gets_no_random_scales_of_its_cache(hooks: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setenv(inside.VARIABLE, inside.WIDE)
    monkeypatch.setattr(Scheduler, "miles_digest", None, raising=False)
    inside.install()
    fill = hooks["sglang.srt.model_loader.loader.initialize_dummy_weights"]
    attention, model = torch.nn.Linear(2, 2), torch.nn.Module()
    attention.k_scale, attention.v_scale = (torch.nn.Parameter(torch.tensor(5e-4)) for _ in "kv")
    model.attn = attention
    before = attention.weight.clone()
    fill(None, model)
    assert attention.k_scale.item() == attention.v_scale.item() == -1.0 and torch.equal(attention.weight, before)


@pytest.mark.parametrize(
    ("path", "is_draft", "marked"),
    [("head", True, True), ("head", False, False), ("model", True, False), (None, True, False)],
)
def test_a_draft_of_its_own_is_marked(path: str | None, is_draft: bool, marked: bool) -> None:
    arguments = types.SimpleNamespace(model_path="model", speculative_draft_model_path=path)
    runner = types.SimpleNamespace(server_args=arguments, is_draft_worker=is_draft, model=torch.nn.Module())
    inside.mark_draft(None, runner)
    assert hasattr(runner.model, "miles_separate_draft") is marked


def test_the_end_of_a_text_is_not_looked_up_for_each_token(hooks: dict[str, Any], monkeypatch: Any) -> None:
    class Tokenizer:
        asked = 0

        @property
        def eos_token_id(self) -> int:
            self.asked += 1
            return 7

    monkeypatch.setenv(inside.VARIABLE, inside.WIDE)
    monkeypatch.setattr(Scheduler, "miles_digest", None, raising=False)
    inside.install()
    scheduler = types.SimpleNamespace(tokenizer=Tokenizer())
    hooks["sglang.srt.managers.scheduler.Scheduler.init_tokenizer"](None, scheduler)
    assert [scheduler.tokenizer.eos_token_id for _ in range(3)] == [7] * 3 and scheduler.tokenizer.asked == 1
    assert isinstance(scheduler.tokenizer, Tokenizer)
    hooks["sglang.srt.managers.scheduler.Scheduler.init_tokenizer"](None, types.SimpleNamespace(tokenizer=None))


def test_requests_of_one_moment_reach_the_scheduler_together(hooks: dict[str, Any]) -> None:
    sent: list[Any] = []
    manager = types.SimpleNamespace(_dispatch_to_scheduler=sent.append)

    async def ask() -> None:
        RequestBatcher(manager)
        for rid in "ab":
            manager._dispatch_to_scheduler(Tokenized(rid))
        assert not sent
        manager._dispatch_to_scheduler("abort")
        manager._dispatch_to_scheduler(Tokenized("c"))
        await asyncio.sleep(0)

    asyncio.run(ask())
    assert sent == [Batch([Tokenized("a"), Tokenized("b")]), "abort", Tokenized("c")]
