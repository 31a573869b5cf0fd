"""The custom operators: schema, fake, backward operator and autograd, so that compilers see one opaque node.

The pattern travels as a string and the tile kernel is chosen when the operator runs: the graph knows neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import backends, fused
from dilated_attention_pytorch.backends import eager, sdpa
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.execute import loop as tiles
from dilated_attention_pytorch.execute.loop import TileKernel
from dilated_attention_pytorch.execute.merge import accumulate_dtype
from dilated_attention_pytorch.plan.dropout import Dropout
from dilated_attention_pytorch.plan.problem import Problem


def tile_kernel(backend: str, query: Tensor) -> TileKernel:
    """The tile kernel of a backend that works by tiles."""
    kernel = {"sdpa": sdpa.kernel, "eager": eager.kernel}[backend]
    return kernel(Request.of(query, dropout_p=0.0))


def kernel_name(backend: str, query: Tensor, tables: str = "launch tables") -> str:
    """What computes the tiles."""
    if backend in ("hopper", "triton"):
        return {"hopper": "warp-specialised", "triton": "Triton"}[backend] + f" kernels over {tables}"
    return "dense, from the definition" if backend == "reference" else tile_kernel(backend, query).name


def drawn_seed(seed: int | Tensor | None, dropout_p: float, query: Tensor) -> Tensor | None:
    """The seed as operators take it: drawn from the generator of the query's device if none is given."""
    if dropout_p == 0.0:
        return None
    if seed is None:
        return torch.randint(0, 2**62, (), dtype=torch.int64, device=query.device)
    return torch.as_tensor(seed, dtype=torch.int64, device=query.device)


def rows_contiguous(x: Tensor) -> Tensor:
    """Kernels read rows of D consecutive elements; other layouts (rare) are copied once."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def row_positions(positions: Tensor | None, query: Tensor) -> Tensor | None:
    """(B, N) as kernels read it: one row of positions for each sample, in 32 bits."""
    return None if positions is None else positions.to(torch.int32).expand(query.shape[:2]).contiguous()


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    positions: Tensor | None,
    pattern: str,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    detach_mixing: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))`` of a dilated pattern.

    With ``positions`` (N,) or (B, N), each row sees only rows whose positions are not larger than its own.
    """
    query, key, value = map(rows_contiguous, (query, key, value))
    positions = row_positions(positions, query)
    problem = Problem.of(query, key, pattern, is_causal, lengths, cu_seqlens)
    backend = backends.fastest(backend, problem, query, backward=False)
    if backend == "triton":
        from dilated_attention_pytorch.backends.triton import run  # imports triton

        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # Triton launches on the current device
            return run.forward(problem, query, key, value, scale=scale, dropout_p=dropout_p, seed=seed, positions=positions)
    dropout = Dropout(dropout_p, seed) if dropout_p > 0.0 else None
    if backend == "hopper":
        from dilated_attention_pytorch.backends.hopper import run as hopper_run

        assert dropout is None, "refused by why_not"
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            return hopper_run.forward(problem, query, key, value, scale=scale)
    kernel = tile_kernel(backend, query)
    if backend == "sdpa" and fused.serves(query) and fused.few_pieces(problem, query.shape[-1]):
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            return fused.forward(problem, query, key, value, scale=scale, kernel=kernel)
    return tiles.forward(problem, query, key, value, scale=scale, kernel=kernel, dropout=dropout, positions=positions)


def attend_fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Shapes and types of a forward."""
    batch, n, heads, _d = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty((batch, heads, n), dtype=accumulate_dtype(query.dtype))


def _attend_backward(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    positions: Tensor | None,
    pattern: str,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    detach_mixing: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` from the merged ``out`` and ``lse``: each tile's ordinary backward is its exact share."""
    query, key, value, dout = map(rows_contiguous, (query, key, value, dout))
    positions = row_positions(positions, query)
    problem = Problem.of(query, key, pattern, is_causal, lengths, cu_seqlens)
    backend = backends.fastest(backend, problem, query, backward=True)
    tensors = (dout, dlse, query, key, value, out, lse)
    if backend == "triton":
        from dilated_attention_pytorch.backends.triton import run  # imports triton

        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            return run.backward(
                problem,
                *tensors,
                scale=scale,
                dropout_p=dropout_p,
                seed=seed,
                positions=positions,
                detach_mixing=detach_mixing,
            )
    if backend == "hopper":
        from dilated_attention_pytorch.backends.hopper import run as hopper_run

        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            return hopper_run.backward(problem, *tensors, scale=scale, detach_mixing=detach_mixing)
    kernel, dropout = tile_kernel(backend, query), Dropout(dropout_p, seed) if dropout_p > 0.0 else None
    if backend == "sdpa" and fused.serves(query) and fused.few_pieces(problem, query.shape[-1]):
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            return fused.backward(problem, *tensors, scale=scale, detach_mixing=detach_mixing, kernel=kernel)
    return tiles.backward(
        problem, *tensors, scale=scale, detach_mixing=detach_mixing, kernel=kernel, dropout=dropout, positions=positions
    )


def attend_backward_fake(
    dout: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    """Shapes and types of a backward."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, lengths, cu_seqlens, seed, positions, *ctx.constants = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, *output, lengths, cu_seqlens, seed, positions)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, *optional = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 13
    if dout is None:
        dout = torch.zeros_like(out)
    grads = call_attend_backward(dout, dlse, query, key, value, out, lse, *optional, *ctx.constants)
    return (*grads, *(None,) * 10)


def no_second_derivative(ctx: Any, *grads: Tensor) -> None:
    """Raise: the backward of a backward."""
    raise RuntimeError(
        "second derivatives of this backend are not supported; backend='reference' has them, for short sequences"
    )


def define_operator(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> torch._ops.OpOverload:
    """Define an operator for every device.

    ``torch.library.custom_op`` does the same and imports all of ``torch._dynamo`` at the first call.
    """
    qualified = f"dilated_attention::{name}"
    schema = torch.library.infer_schema(function, mutates_args=())
    # Launch tables live outside the memory of a captured graph: compilers must not capture the operator by themselves.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
    torch.library.define(qualified, schema, tags=tags)
    torch.library.impl(qualified, "default", function)
    torch.library.register_fake(qualified, fake)
    operator: torch._ops.OpOverload = getattr(torch.ops.dilated_attention, name).default
    return operator


# Types of arguments of which nothing but autograd knows.
_PLAIN = {Tensor, torch.nn.Parameter, type(None), str, bool, int, float}


def _observed(inputs: tuple[Any, ...]) -> bool:
    """Whether something besides autograd looks at operators: a compiler, a mode, a transformation, a class of tensors."""
    return (
        torch.compiler.is_compiling()
        or not {type(x) for x in inputs} <= _PLAIN
        or inputs[0].is_meta
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._profiler_enabled()  # which shows operators by their names
        or torch._C._is_tracing()
    )


def with_gradient(
    operator: torch._ops.OpOverload,
    function: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """Register the gradient of an operator, and return a function that does the same as the operator in less time.

    PyTorch's dispatcher takes longer for an operator with a Python gradient than a kernel over a short sequence runs. So
    where nobody would see the operator, its function is called as it is, within an ``autograd.Function``.
    """
    torch.library.register_autograd(operator, backward, setup_context=setup_context)

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = function(*inputs)
            if setup_context is not None:
                setup_context(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, *grads)

    def call(*inputs: Any) -> Any:
        if _observed(inputs):
            return operator(*inputs)
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs if isinstance(x, Tensor)):
            return Direct.apply(*inputs)  # type: ignore[no-untyped-call]
        return function(*inputs)

    return call


attend = define_operator("attend", _attend, attend_fake)
attend_backward = define_operator("attend_backward", _attend_backward, attend_backward_fake)
call_attend = with_gradient(attend, _attend, _backward, _setup_context)
call_attend_backward = with_gradient(attend_backward, _attend_backward, no_second_derivative)
