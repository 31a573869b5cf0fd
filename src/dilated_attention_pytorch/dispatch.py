"""Custom operators: their definition, and a shortcut for eager calls that nothing but autograd observes.

PyTorch's dispatcher takes longer for an operator with a Python gradient than a kernel over a short sequence runs:
``benchmarks/launch_gpu.py`` measures the difference. The shortcut calls the function of the operator directly, inside an
``autograd.Function``. It is taken only if no compiler, mode, transformation, tensor subclass or profiler would see the
operator. PyTorch answers these questions by private functions, which are resolved here at import. If one of them is
missing, every call goes through the operator.

An operator with a registered gradient refuses the transformations of ``torch.func``. Under these, a call goes through an
``autograd.Function`` with a rule for ``vmap``, whose forward calls the operator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from dilated_attention_pytorch.batching import BatchRule, map_operator

# Types of arguments that only autograd looks at.
_PLAIN_TYPES = {Tensor, torch.nn.Parameter, type(None), str, bool, int, float}
# Functions of torch._C; each returns a true value if something observes operators.
PRIVATE_QUERIES = (
    "_len_torch_dispatch_stack",
    "_len_torch_function_stack",
    "_are_functorch_transforms_active",
    "_autograd._profiler_enabled",  # the profiler shows operators by their names
    "_is_tracing",
)


def _resolve(name: str) -> Callable[[], Any] | None:
    found: Any = torch._C
    for attribute in name.split("."):
        found = getattr(found, attribute, None)
    return found if callable(found) else None


def find_queries() -> tuple[Callable[[], Any], ...] | None:
    """The private queries of this version of PyTorch; None if one of them is missing."""
    found = [_resolve(name) for name in PRIVATE_QUERIES]
    queries = tuple(query for query in found if query is not None)
    return queries if len(queries) == len(found) else None


_queries = find_queries()
_transforms_active = _resolve("_are_functorch_transforms_active") or (lambda: False)


def _observed(inputs: tuple[Any, ...]) -> bool:
    """Whether something besides autograd looks at operators, or this version of PyTorch cannot say so."""
    return (
        _queries is None
        or torch.compiler.is_compiling()
        or not _PLAIN_TYPES.issuperset(map(type, inputs))
        or inputs[0].is_meta
        or any(query() for query in _queries)
    )


def define_operator(
    name: str, function: Callable[..., Any], fake: Callable[..., Any], schema: str | None = None
) -> torch._ops.OpOverload:
    """Define the operator ``dilated_attention::name`` for every device; the schema is that of the function by default.

    ``torch.library.custom_op`` does the same, but it imports all of ``torch._dynamo`` at the first call.
    """
    qualified = f"dilated_attention::{name}"
    schema = torch.library.infer_schema(function, mutates_args=()) if schema is None else schema
    # Launch tables live outside the memory of a captured graph, so compilers must not capture the operator by themselves.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
    torch.library.define(qualified, schema, tags=tags)
    torch.library.impl(qualified, "default", function)
    torch.library.register_fake(qualified, fake)
    operator: torch._ops.OpOverload = getattr(torch.ops.dilated_attention, name).default
    return operator


def _register_flops(operator: torch._ops.OpOverload, formula: Callable[..., int]) -> None:
    """Let ``FlopCounterMode`` know the formula of an operator.

    Importing the module of this mode imports triton, so nothing is registered before somebody else has imported it. A mode
    copies the registry when it is made, so modes that are active already get the formula themselves.
    """
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    packet = operator.overloadpacket
    if packet not in module.flop_registry:
        module.register_flop_formula(packet, get_raw=True)(formula)
    for mode in getattr(_python_dispatch, "_get_current_dispatch_mode_stack", list)():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, module.FlopCounterMode):
            counter.flop_registry.setdefault(packet, formula)


def under_transforms(
    operator: torch._ops.OpOverload,
    gradient: Callable[..., Any],
    save: Callable[..., None],
    rules: Sequence[BatchRule],
) -> Callable[..., Any]:
    """A function that calls an operator and that the transformations of ``torch.func`` accept.

    ``gradient`` and ``save`` are its ``backward`` and ``setup_context``. ``rules`` has a rule of vmap for each argument.
    """

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            return operator(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            save(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return gradient(ctx, *grads)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise NotImplementedError("forward-mode derivatives need backend='reference' (short sequences)")

        @staticmethod
        def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
            return map_operator(call, rules, info.batch_size, dims, inputs)

    def call(*inputs: Any) -> Any:
        if _transforms_active() and not torch.compiler.is_compiling():
            return Transformed.apply(*inputs)  # type: ignore[no-untyped-call]
        return operator(*inputs)

    return call


def with_gradient(
    operator: torch._ops.OpOverload,
    function: Callable[..., Any],
    gradient: Callable[..., Any],
    save: Callable[..., None],
    rules: Sequence[BatchRule],
    flops: Callable[..., int],
) -> Callable[..., Any]:
    """Register the gradient of an operator, and return a function that takes the shortcut where it can."""
    torch.library.register_autograd(operator, gradient, setup_context=save)
    through_operator = under_transforms(operator, gradient, save, rules)

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = function(*inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return gradient(ctx, *grads)

    def call(*inputs: Any) -> Any:
        if _observed(inputs):
            if not torch.compiler.is_compiling():
                _register_flops(operator, flops)
            return through_operator(*inputs)
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs if isinstance(x, Tensor)):
            return Direct.apply(*inputs)  # type: ignore[no-untyped-call]
        return function(*inputs)

    return call
