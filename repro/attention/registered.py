"""The operators behind ``repro.flash_attention``, as torch knows them.

Two, so that a compiler sees both as single nodes:

``repro::flash_attention``
    (q, k, v, …) → (out, lse). FlashAttention-2, Alg. 1 (2023); the mask, dropout and block-sparse
    forms are those of FlashAttention 2022, Alg. 2 and 5.
``repro::flash_attention_backward``
    (dout, q, k, v, out, lse, …) → (dq, dk, dv, and those of options). FlashAttention-2, Alg. 2.

Saved between them: q, k, v, out and lse, and the masks, seed, slopes and tables of packed sequences
where there are any.
All of it goes through torch's saved-tensor mechanism and is unpacked once, so checkpointing and
offloading see everything; nothing saved is quadratic in the sequence length.

The backward operator is itself registered with autograd, with a backward that raises. This is
what makes a second derivative an error: marking the backward once-differentiable would not do,
because with a constant incoming gradient (``out.sum()``) the first gradient would carry no graph
and the second-order term would be missing without a word.

Around an operator of ``torch.library.custom_op`` and its gradient the wrappers cost the host more
than the launches themselves; hence the registration piece by piece. We bypass torch's dispatcher
unless a mode, a tensor subclass, a functorch transform or a profiler is active (:func:`_direct`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from repro.attention import engine
from repro.attention.options import DIFFERENTIABLE, SCHEMA, Options

__all__ = ["attention", "attention_again"]

_Key: Any = torch._C.DispatchKey


def _bits(*keys: Any) -> int:
    bits: int = 0
    for key in keys:
        bits |= torch._C.DispatchKeySet(key).raw_repr()
    return bits


#: What the dispatcher finds in a dense tensor on a device of ours: memory, and perhaps a gradient.
_USUAL_TENSOR = _bits(
    _Key.CPU, _Key.CUDA, _Key.ADInplaceOrView, _Key.AutogradCPU, _Key.AutogradCUDA, _Key.AutocastCPU, _Key.AutocastCUDA
)
#: What it adds outside every mode and transformation.
_USUAL_MODES = _bits(_Key.BackendSelect, _Key.ADInplaceOrView)


#: Tensors that are no subclass with a mind of its own.
_PLAIN = (Tensor, torch.nn.Parameter)
_keys_of = torch._C._dispatch_keys


def attention(*inputs: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operator ``repro::flash_attention``; arguments as in its schema."""
    result: tuple[Tensor, Tensor] = _call("flash_attention", inputs)
    return result


def attention_again(tensors: Sequence[Tensor], options: Options) -> tuple[Tensor, Tensor] | None:
    """Replay a recorded call on q, k, v and the options' tensors; None where there is none, or
    where the dispatcher must see it."""
    if forward_ad._current_level >= 0 or torch.compiler.is_compiling() or not _direct(tensors):
        return None
    call = engine.recorded(tensors, options)
    if call is None:
        return None
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        result: tuple[Tensor, Tensor] = _Attention.apply(
            lambda *_: engine.repeat(call, tensors, options), *tensors[:3], *options
        )
        return result
    return engine.repeat(call, tensors, options)


def _call(name: str, inputs: tuple[Any, ...]) -> Any:
    """The operator with its gradient."""
    if torch.compiler.is_compiling():
        return getattr(torch.ops.repro, name).default(*inputs)
    if _direct(inputs):
        return _with_autograd(name, _KERNELS[name], inputs)
    if _differentiated_or_batched():
        return _TRANSFORMED[name].apply(*inputs)
    return getattr(torch.ops.repro, name).default(*inputs)


def _differentiated_or_batched() -> bool:
    """Whether the innermost transformation of torch.func is one of those: these have rules for a
    Function of their own kind, others see the operator."""
    if not torch._C._are_functorch_transforms_active():
        return False
    kind = torch._C._functorch.TransformType
    innermost = torch._C._functorch.peek_interpreter_stack()
    return innermost is not None and innermost.key() in (kind.Grad, kind.Vmap)


def _with_autograd(name: str, kernel: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    """``kernel`` is the operator without its gradient."""
    if torch.is_grad_enabled() and any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in inputs):
        return _FUNCTIONS[name].apply(kernel, *inputs)
    return kernel(*inputs)


def _direct(inputs: Sequence[Any]) -> bool:
    """Whether the dispatcher would only pass the call on.

    It would do more under a mode (a dispatch or fake-tensor mode, a functorch transformation, a
    profiler) and for tensors that are not plain memory (subclasses, conjugates, other devices).
    """
    modes = torch._C._dispatch_tls_local_include_set().raw_repr()
    if modes & ~_USUAL_MODES or torch._C._is_torch_function_mode_enabled():
        return False
    if torch.autograd._profiler_enabled():  # it lists operators
        return False
    found = 0
    for each in inputs:
        if type(each) in _PLAIN:
            found |= _keys_of(each).raw_repr()
        elif isinstance(each, Tensor):
            return False
    return not found & ~_USUAL_TENSOR


def _like(tensor: Tensor) -> Tensor:
    """An uninitialised tensor laid out like ``tensor`` where kernels can write that layout."""
    if tensor.stride(-1) == 1:
        return torch.empty_like(tensor)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _row_statistics(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    chosen = Options(*options)
    engine.check_tile(q, chosen, engine.shared_limit(q.device))
    out, lse = _like(q), _row_statistics(q)
    engine.forward(q, k, v, out, lse, chosen)
    return out, lse


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    engine.check_tile(q, Options(*options))
    return _like(q), _row_statistics(q)


def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    chosen, needed = Options(*options[:-1]), _of_all(options[-1])
    grads = _gradients(q, k, v, chosen, needed)
    engine.backward(dout, dlse, q, k, v, out, lse, grads, chosen, needed)
    return grads


def _fake_backward(*inputs: Any) -> tuple[Tensor, ...]:
    _dout, _dlse, q, k, v, _out, _lse, *options, needed = inputs
    return _gradients(q, k, v, Options(*options), _of_all(needed))


def _of_all(needed: Sequence[bool]) -> list[bool]:
    """Of q, k, v and each option that has a gradient; of options that a caller leaves out, False."""
    return [*needed, *[False] * (3 + len(DIFFERENTIABLE) - len(needed))]


def _gradients(q: Tensor, k: Tensor, v: Tensor, options: Options, needed: list[bool]) -> tuple[Tensor, ...]:
    """Memory for dq, dk, dv and those of the options. One that nobody needs has no elements: a
    schema has no optional results, so :class:`_Attention` turns it into None."""
    given = (getattr(options, name) for name in DIFFERENTIABLE)
    own = [
        q.new_empty(0) if tensor is None or not wanted else tensor.new_empty(tensor.shape)
        for tensor, wanted in zip(given, needed[3:], strict=True)
    ]
    dq, dk, dv = (
        _like(tensor) if wanted else tensor.new_empty(0) for tensor, wanted in zip((q, k, v), needed[:3], strict=True)
    )
    return dq, dk, dv, *own


class _Attention(torch.autograd.Function):
    """The forward operator below autograd, and its gradient."""

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Any], *inputs: Any) -> tuple[Tensor, Tensor]:
        out, lse = kernel(*inputs)
        _keep(ctx, inputs, (out, lse))
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *_pull_back(ctx, _needed(ctx.needs_input_grad[1:]), *grads))


def _keep(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, Tensor]) -> None:
    """What the backward needs. Tensors among the options are saved as such: kept elsewhere, one
    would dodge offloading and checkpoints."""
    q, k, v, *options = inputs
    tensors = {at: x for at, x in enumerate(options) if isinstance(x, Tensor)}
    ctx.save_for_backward(q, k, v, *results, *tensors.values())
    ctx.saved_at = tuple(tensors)
    ctx.options = [None if at in tensors else x for at, x in enumerate(options)]
    ctx.set_materialize_grads(False)


#: Where the options that have a gradient stand among the operator's inputs.
_WITH_GRADIENT = tuple(3 + Options._fields.index(name) for name in DIFFERENTIABLE)


def _needed(inputs: Sequence[bool]) -> list[bool]:
    """Of the inputs that need a gradient, those that have one: q, k, v and some options."""
    return [*inputs[:3], *(inputs[at] for at in _WITH_GRADIENT)]


def _pull_back(ctx: Any, needed: list[bool], dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of the operator's inputs: q, k, v and its options."""
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    options = list(ctx.options)
    for at, tensor in zip(ctx.saved_at, tensors, strict=True):
        options[at] = tensor
    found: list[Tensor | None] = [None] * (3 + len(options))
    if dout is None and dlse is None:
        return tuple(found)
    if dout is None:
        dout = torch.zeros_like(out)
    results = _call("flash_attention_backward", (dout, dlse, q, k, v, out, lse, *options, needed))
    kept = [grad if wanted else None for grad, wanted in zip(results, needed, strict=True)]
    for at, grad in zip((0, 1, 2, *_WITH_GRADIENT), kept, strict=True):
        found[at] = grad
    return tuple(found)


class _AttentionBackward(torch.autograd.Function):
    """The backward operator below autograd; it has no gradient."""

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Any], *inputs: Any) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = kernel(*inputs)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        _refuse_second_derivative()


class _TransformedAttention(torch.autograd.Function):
    """The same for transformations of torch.func, which ask for a forward without a context."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = torch.ops.repro.flash_attention.default(*inputs)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _pull_back(ctx, _needed(ctx.needs_input_grad), *grads)


class _TransformedBackward(torch.autograd.Function):
    """The backward operator likewise."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = torch.ops.repro.flash_attention_backward.default(*inputs)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept: there is no derivative."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        _refuse_second_derivative()


def _refuse_second_derivative() -> NoReturn:
    raise RuntimeError(
        "repro.flash_attention: second derivatives are not supported. Its backward recomputes "
        "the attention matrix and has no derivative of its own; use "
        "repro.attention.variants.standard where one is needed."
    )


_KERNELS: dict[str, Callable[..., Any]] = {"flash_attention": _forward, "flash_attention_backward": _backward}
_FAKES: dict[str, Callable[..., Any]] = {"flash_attention": _fake_forward, "flash_attention_backward": _fake_backward}
_FUNCTIONS: dict[str, Any] = {"flash_attention": _Attention, "flash_attention_backward": _AttentionBackward}

_TRANSFORMED: dict[str, Any] = {
    "flash_attention": _TransformedAttention,
    "flash_attention_backward": _TransformedBackward,
}


def _register(name: str, schema: str) -> None:
    _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    operator = getattr(torch.ops.repro, name).default

    def below_autograd(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    def with_autograd(*inputs: Any) -> Any:
        return _with_autograd(name, below_autograd, inputs)

    _LIBRARY.impl(name, _KERNELS[name], "CompositeExplicitAutograd")
    _LIBRARY.impl(name, with_autograd, "Autograd")
    torch.library.register_fake(f"repro::{name}", _FAKES[name], lib=_LIBRARY)


_LIBRARY = torch.library.Library("repro", "DEF")
_register("flash_attention", f"(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor, Tensor)")
_register(
    "flash_attention_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{SCHEMA}, bool[] needed) -> ({', '.join(['Tensor'] * (3 + len(DIFFERENTIABLE)))})",
)
