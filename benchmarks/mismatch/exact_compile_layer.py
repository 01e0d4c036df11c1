"""The invariant decoder layer of Qwen3 as a function that ``torch.compile`` captures; part of ``exact_compile.py``.

Products and attention are opaque operations, which call the functions of ``true_on_policy``. Norms, rotations and the gate are opaque as well,
or PyTorch code that the compiler may fuse with the residual additions (``native``). Backward passes are those of the eager functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from miles_embedded import decoder_layers
from miles_true_on_policy.attention import attend as attend_eagerly
from miles_true_on_policy.elementwise import apply_aligned
from miles_true_on_policy.mode import skip_mode
from miles_true_on_policy.products import multiply_rows

#: The call and the layer that run: objects of Python, which no operation can receive.
_running = SimpleNamespace(call=None, layer=None)
_recording = ThreadPoolExecutor(1)


def native_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of Transformers' Qwen3."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def native_rotation(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The rotation of Transformers' Qwen3: x [1, heads, rows, dim], cosine and sine [1, rows, dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cosine.unsqueeze(1) + turned * sine.unsqueeze(1)


def native_gate(gate: Tensor, up: Tensor) -> Tensor:
    """The gate of Transformers' Qwen3."""
    return silu(gate) * up


def norm_eagerly(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The invariant norm: the plugin's kernel on a GPU."""
    if x.is_cuda:
        from miles_embedded.kernels.norm import rms_norm

        return rms_norm(x.contiguous(), weight, eps)
    wide = x.float()
    mean = apply_aligned(torch.pow, wide, 2).mean(-1, keepdim=True)
    return weight * (wide * apply_aligned(torch.rsqrt, mean + eps)).to(x.dtype)


def rotate_eagerly(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The invariant rotation: a kernel on a GPU."""
    if x.is_cuda:
        from miles_embedded.kernels.rotation import rotate

        return rotate(x, cosine, sine)
    return native_rotation(x, cosine, sine)


def gate_eagerly(gate: Tensor, up: Tensor) -> Tensor:
    """The invariant gate: a kernel on a GPU."""
    if gate.is_cuda:
        from miles_embedded.kernels.swiglu import swiglu

        return swiglu(gate, up)
    return apply_aligned(silu, gate) * up


def _differentiate(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor, *rest: Any) -> list[Tensor]:
    """Gradients of ``function`` by computing it again, on a CPU; in another thread, because this one does not record inside an operation."""

    def compute() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        return list(torch.autograd.grad(function(*leaves, *rest), leaves, grad))

    return _recording.submit(compute).result()


def _side_by_side(weights: Sequence[Tensor]) -> Tensor:
    """Weights as one matrix: a view where they are adjacent in memory, as ``join_linear`` lays them out on a GPU."""
    if len(weights) == 1:
        return weights[0]
    first, rows = weights[0], sum(len(weight) for weight in weights)
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    near = all(weight.data_ptr() == end for weight, end in zip(weights[1:], ends, strict=False))
    if near and len({weight.untyped_storage().data_ptr() for weight in weights}) == 1:
        return first.detach().as_strided((rows, first.shape[1]), (first.shape[1], 1))
    return torch.cat(list(weights))


@torch.library.custom_op("miles_exact::product", mutates_args=())
def product(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x [..., inner] times each weight [columns, inner], the columns side by side."""
    return multiply_rows(x, _side_by_side(weights))


@product.register_fake
def _(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    x, *weights = ctx.saved_tensors
    flat, parts = x.flatten(0, -2), grad.flatten(0, -2).split([len(weight) for weight in weights], -1)
    grad_x = parts[0] @ weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        grad_x = grad_x + part @ weight
    return grad_x.view(x.shape), [part.t() @ flat for part in parts]


product.register_autograd(
    _product_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], *inputs[1])
)


@torch.library.custom_op("miles_exact::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``norm_eagerly``."""
    return norm_eagerly(x, weight, eps)


@norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("miles_exact::norm_gradients", mutates_args=())
def norm_gradients(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> list[Tensor]:
    """Gradients of x and weight."""
    if not x.is_cuda:
        return _differentiate(native_norm, (x, weight), grad, eps)
    from miles_embedded.kernels.norm import _Norm

    return list(_Norm.backward(SimpleNamespace(saved_tensors=(x.contiguous(), weight), eps=eps), grad)[:2])  # type: ignore[arg-type]


@norm_gradients.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> list[Tensor]:
    return [x.new_empty(x.shape), weight.new_empty(weight.shape)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.rest = [x for x in inputs if not isinstance(x, Tensor)]


norm.register_autograd(
    lambda ctx, grad: (*norm_gradients(grad, *ctx.saved_tensors, *ctx.rest), None), setup_context=_keep
)


@torch.library.custom_op("miles_exact::rotate", mutates_args=())
def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """``rotate_eagerly``, contiguous by rows: x [1, heads, rows, dim]."""
    out = rotate_eagerly(x, cosine, sine)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


@rotate.register_fake
def _(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


def _rotate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    cosine, sine = ctx.saved_tensors[1:]
    half = sine.shape[-1] // 2  # the transposed rotation is a rotation by the sine's halves exchanged
    return rotate(grad, cosine, -torch.cat((sine[..., half:], sine[..., :half]), -1)), None, None


rotate.register_autograd(_rotate_backward, setup_context=_keep)


@torch.library.custom_op("miles_exact::gate", mutates_args=())
def gate(gate: Tensor, up: Tensor) -> Tensor:
    """``gate_eagerly``."""
    return gate_eagerly(gate, up)


@gate.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("miles_exact::gate_gradients", mutates_args=())
def gate_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    """Gradients of both."""
    if not gate.is_cuda:
        return [x.contiguous() for x in _differentiate(native_gate, (gate, up), grad)]
    from miles_embedded.kernels.swiglu import _SwiGLU

    return list(_SwiGLU.backward(SimpleNamespace(saved_tensors=(gate, up)), grad))  # type: ignore[arg-type]


@gate_gradients.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    return [gate.new_empty(gate.shape), up.new_empty(up.shape)]


gate.register_autograd(lambda ctx, grad: tuple(gate_gradients(grad, *ctx.saved_tensors)), setup_context=_keep)


@torch.library.custom_op("miles_exact::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention of the running call and layer: query [1, heads, rows, dim]; returns [1, rows, heads, dim], and [heads, rows] for the gradients."""
    call, layer = _running.call, _running.layer
    sums = query.new_zeros(query.shape[1:3], dtype=torch.float32)
    if not query.is_cuda:
        return attend_eagerly(call, layer, query, key, value, scaling, None), sums
    from miles_true_on_policy.tiles import attend_by_tiles

    return attend_by_tiles(call, layer, query, key, value, scaling, None, sums), sums


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    _, heads, rows, dim = query.shape
    return query.new_empty(1, rows, heads, dim), query.new_empty(heads, rows, dtype=torch.float32)


@torch.library.custom_op("miles_exact::attend_gradients", mutates_args=())
def attend_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, scaling: float
) -> list[Tensor]:
    """Gradients of query, key and value, [1, rows, heads, dim] each."""
    call, layer = _running.call, _running.layer
    found = call.gradients(grad, query, key, value, out, sums, scaling) if query.is_cuda else None
    if found is None:
        found = _differentiate(lambda *qkv: call.attend(layer, *qkv, scaling, None), (query, key, value), grad)
    return [x.transpose(1, 2).contiguous() for x in found]


@attend_gradients.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, scaling: float
) -> list[Tensor]:
    return [x.new_empty(x.transpose(1, 2).shape) for x in (query, key, value)]


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.scaling = inputs[3]


def _attend_backward(ctx: Any, grad: Tensor, unused: Tensor) -> tuple[Tensor | None, ...]:
    found = attend_gradients(grad.contiguous(), *ctx.saved_tensors, ctx.scaling)
    return *(x.transpose(1, 2) for x in found), None


attend.register_autograd(_attend_backward, setup_context=_keep_attention)


def compute_layer(
    x: Tensor, cosine: Tensor, sine: Tensor, weights: list[Tensor], numbers: tuple[int, int, int, float], native: bool
) -> Tensor:
    """One decoder layer.

    Args:
        x: [1, rows, hidden].
        cosine: [1, rows, dim].
        sine: likewise.
        weights: of ``weights_of``.
        numbers: heads, key/value heads, entries of a head, and the norms' epsilon.
        native: whether norms, rotations and the gate are PyTorch code.

    Returns:
        [1, rows, hidden].
    """
    first, q, k, v, q_norm, k_norm, o, second, w_gate, w_up, down = weights
    heads, kv_heads, dim, eps = numbers
    normalize, turn, close = (native_norm, native_rotation, native_gate) if native else (norm, rotate, gate)
    rows = x.shape[1]
    whole = product(normalize(x, first, eps), [q, k, v])
    query, key, value = (
        part.reshape(1, rows, -1, dim) for part in whole.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    )
    query = turn(normalize(query, q_norm, eps).transpose(1, 2), cosine, sine)
    key = turn(normalize(key, k_norm, eps).transpose(1, 2), cosine, sine)
    seen = attend(query, key, value.transpose(1, 2), dim**-0.5)[0]
    x = x + product(seen.reshape(1, rows, -1), [o])
    left, right = product(normalize(x, second, eps), [w_gate, w_up]).chunk(2, -1)
    out: Tensor = x + product(close(left, right), [down])
    return out


def weights_of(layer: Any) -> list[Tensor]:
    """The weights of a Qwen3 decoder layer, in the order of ``compute_layer``."""
    attention, mlp = layer.self_attn, layer.mlp
    return [
        layer.input_layernorm.weight,
        *(getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj")),
        layer.post_attention_layernorm.weight,
        *(getattr(mlp, name).weight for name in ("gate_proj", "up_proj", "down_proj")),
    ]


def use_layer(model: Any, run: Callable[..., Tensor], native: bool) -> None:
    """Let the layers of a Qwen3 model compute with ``run``, which is ``compute_layer`` or a compiled one; outside the mode, whose functions
    the opaque operations call themselves."""
    for layer in decoder_layers(model):
        layer.__dict__["forward"] = _forward_of(layer, skip_mode(run), native)


def _forward_of(layer: nn.Module, run: Callable[..., Tensor], native: bool) -> Callable[..., Tensor]:
    attention: Any = layer.self_attn
    config = attention.config
    numbers = config.num_attention_heads, config.num_key_value_heads, attention.head_dim, config.rms_norm_eps
    weights = weights_of(layer)

    def forward(hidden_states: Tensor, *, position_embeddings: Any, call: Any, **unused: Any) -> Tensor:
        _running.call, _running.layer = call, attention
        for x in (hidden_states, *position_embeddings):  # the number of rows is a variable of the graph
            torch._dynamo.maybe_mark_dynamic(x, 1)
        return run(hidden_states, *position_embeddings, weights, numbers, native)

    return forward
