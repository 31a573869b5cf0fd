"""LongNet models over a sharded sequence: rows, losses and gradients of every rank are those of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import model_oracle
from dilated_attention_pytorch import Hilbert, LongNetConfig, LongNetDecoder, LongNetEncoder
from dilated_attention_pytorch.distributed import Shards, gather_sequence, shard_sequence

SIZES = {
    "embed_dim": 16, "num_layers": 2, "num_heads": 4, "ffn_dim": 24, "vocab_size": 11, "segment_lengths": (4, 32),
    "dilation_rates": (1, 3), "num_kv_heads": 2,
}  # fmt: skip
ROWS = {"whole": {}, "lengths": {"lengths": [23, 9]}, "starts": {"starts": [3, 0]}, "packed": {"cu_seqlens": [0, 6, 6, 23]}}


def make(kind, **options):
    """The same numbers on every rank."""
    torch.manual_seed(0)
    changes = {name: options.pop(name) for name in [*options] if name not in ("group", "layout")}
    model = kind(LongNetConfig(**SIZES | changes), dtype=torch.float64, **options)
    model_oracle.perturb(model)
    return model


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def check_decoder(group, layout, rows, positions) -> None:
    one, many = (make(LongNetDecoder, positions=positions, **own) for own in ({}, {"group": group, "layout": layout}))
    tokens, targets = torch.randint(0, 11, (2, 2, 23))
    targets[:, 5] = -100
    options = ROWS[rows]
    own, ids = (shard_sequence(x, group, layout=layout) for x in (tokens, targets))
    close(gather_sequence(many(own, **options), group, layout=layout), one(tokens, **options))
    expected, loss = one.loss(tokens, targets, **options), many.loss(own, ids, **options)
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    close(total / group.size(), expected.detach())
    expected.backward()
    loss.backward()
    for (name, x), y in zip(many.named_parameters(), one.parameters(), strict=True):
        dist.all_reduce(x.grad, group=group)
        close(x.grad / group.size(), y.grad), name


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("rows", ROWS)
def test_decoders(on_ranks, layout, rows):
    on_ranks(3 if layout == "zigzag" else 2, check_decoder, layout, rows, "xpos" if rows == "whole" else "rotary")


def check_encoder(group, layout) -> None:
    order, x = Hilbert.grid(4, 6), torch.randn(2, 24, 16, dtype=torch.float64)
    one, many = make(LongNetEncoder, vocab_size=None), make(LongNetEncoder, vocab_size=None, group=group, layout=layout)
    own = shard_sequence(x, group, layout=layout, order=order)
    out, states = many(own, order=order, return_all_layers=True)
    close(gather_sequence(out, group, layout=layout, order=order), one(x, order=order))
    assert [state.shape for state in states] == [own.shape] * 3
    shards = Shards.of([20, 4], layout)
    rows = make(LongNetEncoder, vocab_size=None, group=group, layout=shards)
    first = sum(map(len, shards.chunks[0]))
    if layout == "contiguous":
        own = x[:, :first] if dist.get_rank(group) == 0 else x[:, first:]
        close(gather_sequence(rows(own), group), one(x))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_encoders_with_an_order(on_ranks, layout):
    on_ranks(2, check_encoder, layout)


def check_drop_path(group) -> None:
    """A sample is dropped on all ranks or on none, although the generators of the ranks differ."""
    model = make(LongNetEncoder, vocab_size=None, drop_path=0.5, final_norm=False, group=group).train()
    torch.manual_seed(dist.get_rank(group))
    x = torch.randn(64, 6, 16, dtype=torch.float64)
    _, states = model(x, return_all_layers=True)
    dropped = (states[2] == states[1]).all(-1)
    assert 4 < dropped[:, 0].sum() < 32
    every = gather_sequence(dropped.double(), group)
    assert (every == every[:, :1]).all()


def test_drop_path_is_the_same_on_all_ranks(on_ranks):
    on_ranks(2, check_drop_path)


def check_wrappers(group) -> None:
    tokens, targets = torch.randint(0, 11, (2, 2, 20))
    own, ids = (shard_sequence(x, group) for x in (tokens, targets))
    one = make(LongNetDecoder)
    one.loss(tokens, targets).backward()
    expected = {name: x.grad for name, x in one.named_parameters()}
    wrapped = DistributedDataParallel(make(LongNetDecoder, group=group, checkpoint_layers=True))
    wrapped(own, targets=ids).backward()
    for name, x in wrapped.module.named_parameters():
        close(x.grad, expected[name])
    sharded = make(LongNetDecoder, group=group, checkpoint_layers=True)
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    sharded(own, targets=ids).backward()
    for name, x in sharded.named_parameters():
        close(x.grad.full_tensor(), expected[name])


def test_ddp_and_fsdp(on_ranks):
    on_ranks(2, check_wrappers)


def check_mistake(group) -> None:
    model = make(LongNetDecoder, group=group)
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"lengths must have one entry per sample|rank 1"):
        model(tokens, lengths=[5] if dist.get_rank(group) == 1 else [5, 5])
    with pytest.raises(ValueError, match="these differ:\n  lengths"):
        model(tokens, lengths=[10, 10 - dist.get_rank(group)])
    with pytest.raises(ValueError, match="a sharded sequence has no caches"):
        model(tokens, caches=model.new_caches(2))
    assert model(tokens).shape == (2, 5, 11)


def test_a_mistake_of_one_rank_is_an_error_on_every_rank(on_ranks):
    on_ranks(2, check_mistake)
