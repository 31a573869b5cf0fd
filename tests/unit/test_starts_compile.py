"""``starts`` under PyTorch's compilers: one graph for all values."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from block_cases import config
from dilated_attention_pytorch import BlockSparse, Dilated, attention, operators

PATTERN = Dilated([8, 16], [1, 2])
pytestmark = pytest.mark.slow


def inputs(n, m):
    q = torch.randn(2, n, 4, 8, dtype=torch.float64, requires_grad=True)
    return [q, *(torch.randn(2, m, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))]


@pytest.mark.parametrize(("backend", "lengths", "n"), [("sdpa", None, 12), ("eager", torch.tensor([11, 20]), 30)])
def test_opcheck(backend, lengths, n):
    q, k, v = inputs(n, 30)
    options = PATTERN.spec, True, 0.3, 0.0, False, False, backend
    constants = (*[None] * 6, *options, torch.tensor([17, 3]))
    torch.library.opcheck(operators.attend, (q, k, v, lengths, *constants))
    out, lse = operators.attend(q, k, v, lengths, *constants)
    saved = [x.detach() for x in (q, k, v, out, lse)]
    for dlse in (None, torch.randn_like(lse)):
        torch.library.opcheck(operators.attend_backward, (torch.randn_like(out), dlse, *saved, lengths, *constants))
    spec = BlockSparse.from_config(config("adaptive")).spec
    rows = q.detach(), k.detach()
    torch.library.opcheck(operators.choose_blocks, (*rows, lengths, None, spec, True, 0.3, torch.tensor([17, 3])))


@pytest.mark.parametrize("pattern", [PATTERN, BlockSparse.from_config(config("adaptive"))], ids=["dilated", "adaptive"])
def test_one_graph_serves_all_starts_and_lengths(pattern):
    """Decoding: the keys get longer, other samples begin elsewhere, and nothing is compiled again."""

    def layer(q, k, v, starts, lengths):
        return attention(q * 2, k, v, pattern, is_causal=True, starts=starts, lengths=lengths).sin()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    compiled(*inputs(3, 60), torch.tensor([17, 0]), torch.tensor([13, 60]))
    graphs = counter.frame_count
    for m, starts, lengths in ((61, [60, 2], [1, 29]), (64, [0, 64], [64, 0]), (90, [40, 41], [50, 30])):
        arguments, samples = inputs(3, m), (torch.tensor(starts), torch.tensor(lengths))
        out = compiled(*arguments, *samples)
        expected = layer(*arguments, *samples)
        torch.testing.assert_close(out, expected)
        dout = torch.randn_like(out)
        found, wanted = (torch.autograd.grad(y, arguments, dout) for y in (out, expected))
        torch.testing.assert_close(found, wanted)
    assert counter.frame_count == graphs
