"""transformers models over a sharded sequence: rows, losses and gradients of every rank are those of one process."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import types

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

import hf_models
import ranks
from dilated_attention_pytorch import Sharding
from dilated_attention_pytorch.distributed import Shards, gather_sequence
from dilated_attention_pytorch.integrations.transformers import DilatedCache, apply, remove

# Ranks are forks of a process that has imported these. With a GPU it leaves out what may initialise CUDA.
if not torch.cuda.is_available():
    multiprocessing.set_forkserver_preload([*ranks.PRELOAD, "transformers.trainer", "accelerate", "hf_models"])

N = 23  # neither 2 nor 3 divides it


def exact(model):
    """Norms in float64: those of transformers round to float32 and hide errors."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.forward = types.MethodType(forward, module)
    return model


def llama(**more):
    return exact(hf_models.llama(**more))


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def masked(front, lengths):
    mask = torch.zeros(len(lengths), N, dtype=torch.int64)
    for row, length in zip(mask, lengths, strict=True):
        row[N - length if front else 0 :][:length] = 1
    return {"attention_mask": mask}


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def added(group, own, names):
    """The sums over ranks. A rank without gradients of a parameter adds 0."""
    assert set(own) == set(names)
    for x in own.values():
        dist.all_reduce(x, group=group)
    return own


CASES = {
    "whole": {},
    "left": masked(True, [N, 9]),
    "right": masked(False, [6, 5]),  # the last ranks have only padding
    "positions": {"position_ids": torch.arange(N).expand(2, -1) + 11},
    "packed": {"position_ids": torch.cat([torch.arange(8), torch.arange(9), torch.arange(N - 17)]).expand(2, -1)},
    "packed and padded": {
        "position_ids": torch.cat([torch.arange(8), torch.arange(9), torch.arange(N - 17)]).expand(2, -1),
        **masked(True, [N, 11]),
    },
}  # fmt: skip


def check_rows(group, name, layout, cases) -> None:
    one = {"llama": llama, "gpt2": hf_models.gpt2, "bert": hf_models.bert}[name]()
    many = hf_models.dilated(copy.deepcopy(one), group=Sharding(group, layout))
    one = hf_models.dilated(one)
    tokens = hf_models.tokens(2, N)
    for case in cases:
        options = CASES[case]
        expected, out = one(tokens, **options)[0], many(tokens, **options)[0]
        assert out.shape[1] == Shards.even(N, group.size(), layout).rows(dist.get_rank(group)), case
        whole = gather_sequence(out, group, layout=layout)
        close(whole, expected)
        weights = torch.randn_like(expected)
        names = gradients(one, (expected * weights).sum())
        # Every rank computes the loss of the whole sequence.
        own = gradients(many, (whole * weights).sum() / group.size())
        for x, y in zip(added(group, own, names).values(), names.values(), strict=True):
            close(x, y, 1e-9)


@pytest.mark.parametrize(
    ("name", "layout", "world", "cases"),
    [
        pytest.param("llama", "contiguous", 3, list(CASES), marks=pytest.mark.hf),
        ("llama", "zigzag", 2, ["left", "packed and padded"]),
        ("gpt2", "contiguous", 2, ["whole", "right", "packed"]),
        pytest.param("bert", "zigzag", 3, ["whole", "left", "right"], marks=pytest.mark.hf),
    ],
)
def test_rows_and_gradients(on_ranks, name, layout, world, cases):
    on_ranks(world, check_rows, name, layout, cases)


def check_further_inputs(group) -> None:
    """Documents of cu_seq_lens, embeddings, fewer rows than ranks, a mesh, and models that are copied."""
    one, mesh = llama(), dist.device_mesh.init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "cp"))
    many = hf_models.dilated(copy.deepcopy(one), group=mesh)
    one, many = hf_models.dilated(one), copy.deepcopy(many)
    tokens = hf_models.tokens(1, N)
    bounds = torch.tensor([0, 4, 15, N])
    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 11, "max_length_k": 11}
    close(gather_sequence(many(tokens, **packed).logits, group), one(tokens, **packed).logits)
    assert (one(tokens, **packed).logits - one(tokens).logits).abs().max() > 1e-3
    x = torch.randn(2, N, 32, dtype=torch.float64)
    out = many(inputs_embeds=x, output_hidden_states=True)
    close(gather_sequence(out.logits, group), one(inputs_embeds=x).logits)
    assert [h.shape[1] for h in out.hidden_states] == [out.logits.shape[1]] * 3
    short = tokens[:, :2]
    out = many(short, labels=short)
    assert out.logits.shape[1] == (0 if dist.get_rank(group) == 2 else 1)
    expected = one(short, labels=short)
    close(gather_sequence(out.logits, group), expected.logits)
    close(out.loss, expected.loss, 1e-6)
    names = gradients(one, expected.loss)
    for x, y in zip(added(group, gradients(many, out.loss), names).values(), names.values(), strict=True):
        close(x / 3, y, 1e-6)
    remove(many)
    close(many(tokens).logits, remove(one)(tokens).logits)


def test_further_inputs(on_ranks):
    on_ranks(3, check_further_inputs)


def check_loss(group) -> None:
    """The mean over all targets of the batch on every rank; means of gradients are those of one process."""
    from transformers import BertConfig, BertForMaskedLM

    masked_lm = BertForMaskedLM(BertConfig(**hf_models._sizes(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)))
    for one in (llama(), hf_models._ready(masked_lm)):
        many = hf_models.dilated(copy.deepcopy(one), group=group)
        one = hf_models.dilated(one)
        tokens = hf_models.tokens(2, N)
        labels = tokens.masked_fill(torch.arange(N) > 9, -100)  # the last ranks have no targets
        labels[0, 3] = -100
        expected, out = one(tokens, labels=labels), many(tokens, labels=labels)
        close(out.loss, expected.loss, 1e-6)
        assert next(iter(out)) == "loss"
        names = gradients(one, expected.loss)
        for x, y in zip(added(group, gradients(many, out.loss), names).values(), names.values(), strict=True):
            close(x / group.size(), y, 1e-6)
        total = many(tokens, labels=labels, num_items_in_batch=torch.tensor(10)).loss
        dist.all_reduce(total, group=group)
        targets = (labels[:, 1:] if one is not masked_lm else labels).ne(-100).sum()
        close(total * 10 / targets, expected.loss, 1e-6)
        wrapped = DistributedDataParallel(many)
        many.gradient_checkpointing_enable()
        own = gradients(many, wrapped(input_ids=tokens, labels=labels).loss)
        for x, y in zip(own.values(), names.values(), strict=True):
            close(x, y, 1e-6)


def test_loss(on_ranks):
    on_ranks(3, check_loss)


def check_dropout(group) -> None:
    """Dropout of attention is that of one process with the generator of the first rank."""
    one = llama(attention_dropout=0.3).train()
    many = hf_models.dilated(copy.deepcopy(one), group=group)
    one, tokens = hf_models.dilated(one), hf_models.tokens(2, N)
    torch.manual_seed(5)
    expected = one(tokens).logits
    torch.manual_seed(5 + dist.get_rank(group))
    close(gather_sequence(many(tokens).logits, group), expected)
    assert (one(tokens).logits - expected).abs().max() > 1e-3


def test_attention_dropout(on_ranks):
    on_ranks(2, check_dropout)


def check_refusals(group) -> None:
    from transformers import BertModel, LlamaForSequenceClassification, RobertaConfig, RobertaModel

    rank, tokens = dist.get_rank(group), hf_models.tokens(2, N)
    model = hf_models.dilated(llama(), group=group)
    expected = model(tokens).logits

    def refused(match, *args, model=model, **kwargs):
        with pytest.raises(ValueError, match=match):
            model(*args, **kwargs)

    refused(r"the same one: rank . got input_ids \(2, 23\), and rank . got another batch.*SequenceTrainer", tokens + rank)
    refused("another batch", tokens[:, : N - rank])
    refused("another batch", tokens, labels=tokens.roll(rank))
    refused("rank 1 refused its arguments|does not take use_cache", tokens, use_cache=rank == 1)
    refused(
        "does not take past_key_values: a sharded sequence has no cache", tokens, past_key_values=DilatedCache(model.config)
    )
    refused("does not take output_attentions", tokens, output_attentions=True)
    refused("does not take logits_to_keep", tokens, logits_to_keep=1)
    refused("got the tensor pixel_values", tokens, pixel_values=torch.zeros(1))
    refused(r"attention_mask \(2, 1, 23, 23\)", tokens, attention_mask=torch.ones(2, 1, N, N))
    refused(r"position_ids must be those of the whole", tokens, position_ids=torch.arange(5)[None])
    with pytest.raises(TypeError, match="pass return_dict=True"):
        model(tokens, return_dict=False)
    refused("masked rows between", tokens, attention_mask=torch.arange(N).expand(2, -1) % 7 != 3)
    with pytest.raises(ValueError, match=r"past_key_values|use_cache"):
        model.generate(tokens, max_new_tokens=2, do_sample=False)
    with pytest.raises(ValueError, match="logits_to_keep"):
        model.generate(tokens, max_new_tokens=2, do_sample=False, use_cache=False)
    close(model(tokens).logits, expected)  # the group is not broken

    sizes = hf_models._sizes()
    pooled = hf_models.dilated(BertModel(hf_models.bert().config), group=group)
    refused("pooler_output is computed from rows", tokens, model=pooled)
    classes = hf_models.dilated(LlamaForSequenceClassification(hf_models.llama().config), group=group)
    refused("outputs of a model with a group must be outputs of rows", tokens, model=classes)
    refused("loss is not known to be a mean over rows", tokens, model=classes, labels=tokens)
    counting = hf_models.dilated(RobertaModel(RobertaConfig(**sizes), add_pooling_layer=False), group=group)
    refused("makes position_ids from tokens", tokens, model=counting)
    refused("a window of 8", tokens, model=hf_models.dilated(hf_models.mistral(sliding_window=8), group=group))
    packed = torch.arange(N).expand(2, -1) % 9
    refused("packed documents in causal models only", tokens, model=hf_models.dilated(hf_models.bert(), group=group),
            position_ids=packed)  # fmt: skip
    with pytest.raises(ValueError, match=r"ViTModel\.forward does not take"):
        hf_models.dilated(hf_models.vit(), group=group)
    layers = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    with pytest.raises(ValueError, match="layers of the kind 'sliding_attention'"):
        hf_models.dilated(hf_models.qwen3(**layers), group=group)
    with pytest.raises(TypeError, match="must be a name"):
        hf_models.dilated(llama(), group=Sharding(group, Shards.of([3, 5], "contiguous")))
    with pytest.raises(TypeError, match="group must be a ProcessGroup"):
        hf_models.dilated(llama(), group="all")
    model.set_attn_implementation("sdpa")
    refused("call remove", tokens)
    assert remove(model)(tokens).logits.shape[1] == N
    assert hf_models.dilated(model, group=group)(tokens).logits.shape[1] == N - N // 2 - rank
    assert apply(model, [N], [1])(tokens).logits.shape[1] == N


def test_what_is_refused(on_ranks):
    on_ranks(2, check_refusals)


class Samples(IterableDataset):
    def __init__(self, count, padded=True):
        self.rows = [
            {"input_ids": row, "labels": row, "attention_mask": (torch.arange(N) < (N - 3 * i if padded else N)).long()}
            for i, row in enumerate(hf_models.tokens(count, N))
        ]
        for row in self.rows:
            row["labels"] = row["labels"].masked_fill(row["attention_mask"] == 0, -100)

    def __iter__(self):
        return iter(self.rows)


@contextlib.contextmanager
def one_process():
    """No variables of torchrun, and no state of accelerate afterwards."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    yield
    reset()


def reset():
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def train(kind, model, folder, samples, evaluated, **options):
    from transformers import TrainingArguments

    torch.manual_seed(1)
    given = {
        "max_steps": 3, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 0.05,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "optim": "sgd",
        "logging_strategy": "steps", "seed": 3, "max_grad_norm": 0.5, "lr_scheduler_type": "constant",
    }  # fmt: skip

    def metrics(prediction):
        found = torch.as_tensor(prediction.predictions)
        return {"sum": float(found.double().sum()), "rows": found.shape[0], "length": found.shape[1]}

    trainer = kind(
        model=model, args=TrainingArguments(folder, **given | options), train_dataset=samples, eval_dataset=evaluated,
        compute_metrics=metrics,
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = trainer.evaluate()
    return losses, {name: found[f"eval_{name}"] for name in ("loss", "sum", "rows", "length")}, trainer


def check_trainer(group, folder, groups) -> None:
    """Steps and evaluation of ``SequenceTrainer`` are those of ``Trainer`` in one process with the same batches."""
    from transformers import Trainer

    from dilated_attention_pytorch.integrations.transformers.sequence_trainer import SequenceTrainer

    rank, world = str(dist.get_rank(group)), str(group.size())
    os.environ |= {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    ready, mesh = llama(), dist.device_mesh.init_device_mesh("cpu", (groups, 2), mesh_dim_names=("data", "cp"))
    many = hf_models.dilated(copy.deepcopy(ready), group=mesh["cp"])
    # One process makes batches of the same samples. The last one may be smaller if there is one group.
    samples, evaluated = (Samples(7).rows, Samples(5).rows) if groups == 1 else (Samples(8).rows, Samples(8).rows)
    batches = {"per_device_train_batch_size": 2 * groups, "per_device_eval_batch_size": 2 * groups}
    got = train(SequenceTrainer, many, folder, samples, evaluated, gradient_accumulation_steps=2)
    assert got[2].get_total_train_batch_size(got[2].args) == 4 * groups
    streamed, stream = [], Samples(5 if groups == 1 else 8)
    if groups == 1:
        with pytest.raises(ValueError, match="accelerator_config"):
            train(SequenceTrainer, many, folder, stream, evaluated)
        with pytest.raises(ValueError, match="label_smoothing_factor"):
            train(SequenceTrainer, many, folder, samples, evaluated, label_smoothing_factor=0.1)
        with pytest.raises(ValueError, match="takes a model with a group"):
            train(SequenceTrainer, copy.deepcopy(ready), folder, samples, evaluated)
    else:
        with pytest.raises(ValueError, match="groups of SequenceTrainer are consecutive ranks"):
            train(SequenceTrainer, hf_models.dilated(copy.deepcopy(ready), group=mesh["data"]), folder, samples, evaluated)
    streamed = train(SequenceTrainer, many, folder, stream, evaluated, accelerator_config={"dispatch_batches": False})
    reset()
    dist.destroy_process_group()
    with one_process():
        if rank == "0":
            one = hf_models.dilated(ready)
            expected = train(Trainer, one, folder, samples, evaluated, gradient_accumulation_steps=2, **batches)
            again = train(Trainer, one, folder, stream, evaluated, **batches)
            for (losses, metrics, _), (other_losses, others, _) in ((got, expected), (streamed, again)):
                close(torch.tensor(losses), torch.tensor(other_losses), 1e-6)
                assert len(losses) == 3
                assert metrics == pytest.approx(others, rel=1e-6)
            for x, y in zip(many.parameters(), one.parameters(), strict=True):
                close(x, y, 1e-6)


@pytest.mark.hf
@pytest.mark.parametrize("groups", [1, 2])
def test_trainer(on_ranks, tmp_path, groups):
    on_ranks(2 * groups, check_trainer, str(tmp_path), groups)
