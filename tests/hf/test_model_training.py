"""Training of LongNet models with transformers: Trainer, checkpointing of activations, and models over devices."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from dilated_attention_pytorch import LongNetDecoder
from dilated_attention_pytorch.integrations.transformers import (
    LongNetForCausalLM,
    LongNetForMaskedLM,
    LongNetPreTrainedConfig,
)
from dilated_attention_pytorch.models.layers import LongNetLayer
from hf_longnet import VOCABULARY, config, decoder, encoder, in_transformers, ragged


def arguments(folder, **options):
    return TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, learning_rate=1e-2, lr_scheduler_type="constant",
        logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, optim="adamw_torch", weight_decay=0.0,
        max_grad_norm=0.0, disable_tqdm=True, seed=0, **options,
    )  # fmt: skip


class InOrder(Trainer):
    """Batches in the order of the data."""

    def _get_train_sampler(self, *args, **kwargs):
        return None


def collate(examples):
    _, batch, mask = ragged([len(x["input_ids"]) for x in examples])
    for row, own, example in zip(batch, mask, examples, strict=True):
        row[own.bool()] = torch.tensor(example["input_ids"])
    return {"input_ids": batch, "attention_mask": mask, "labels": batch.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_does_what_a_loop_of_this_library_does(tmp_path, checkpointing):
    plain = decoder("untied")
    model = in_transformers(plain, LongNetForCausalLM)
    samples = ragged([40, 25, 33, 12, 31, 38])[0]
    options = {"gradient_checkpointing": True} if checkpointing else {}
    trainer = InOrder(
        model=model, args=arguments(tmp_path, max_steps=3, **options), data_collator=collate,
        train_dataset=[{"input_ids": x.tolist()} for x in samples],
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    plain.train()
    optimiser = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0, eps=1e-8)
    expected = []
    for i in range(0, 6, 2):
        optimiser.zero_grad()
        own = [plain.loss(x[None, :-1], x[None, 1:], reduction="sum") for x in samples[i : i + 2]]
        # Trainer counts every label that is not -100, also that of the first token behind padding.
        longest = max(len(x) for x in samples[i : i + 2])
        loss = sum(own) / sum(len(x) - (len(x) == longest) for x in samples[i : i + 2])
        loss.backward()
        optimiser.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, abs=2e-4)
    assert len(losses) == 3
    for (name, x), y in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-4, msg=name)

    trainer.save_model(tmp_path / "out")
    again = LongNetDecoder.from_pretrained(tmp_path / "out").eval()
    ids = torch.randint(0, VOCABULARY, (1, 20))
    assert again(ids).equal(model.eval()(ids).logits)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = loaded.generate(ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert found.past_key_values is not None  # Trainer writes use_cache=False into the config


def gradients(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: x.grad.clone() for name, x in model.named_parameters()}


@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [
        (LongNetForCausalLM, None),
        (LongNetForCausalLM, {"use_reentrant": True}),
        (LongNetForMaskedLM, {"use_reentrant": False}),
    ],
)
def test_checkpointing_gives_the_same_gradients(cls, kwargs):
    changes = {"dropout": 0.1, "attention_dropout": 0.2, "drop_path": 0.3}
    plain = decoder(**changes) if cls is LongNetForCausalLM else encoder(**changes)
    model = in_transformers(plain, cls).train()
    _, batch, mask = ragged([41, 30])
    calls = count_layers(model)
    results = []
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        torch.manual_seed(5)
        calls.clear()
        results.append(gradients(model, input_ids=batch, attention_mask=mask, labels=batch))
        assert len(calls) == (4 if enable else 2)  # each of the two layers is computed again
    assert results[0][0].equal(results[1][0])
    for name, x in results[0][1].items():
        assert x.equal(results[1][1][name]), name
    model.gradient_checkpointing_disable()
    calls.clear()
    gradients(model, input_ids=batch, labels=batch)
    assert len(calls) == 2
    torch.manual_seed(6)
    assert not gradients(model, input_ids=batch, attention_mask=mask, labels=batch)[0].equal(results[0][0])


def count_layers(model):
    calls = []
    for module in model.modules():
        if isinstance(module, LongNetLayer):
            module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def test_checkpointing_of_some_layers_and_by_the_config():
    made = LongNetPreTrainedConfig.of(config(num_layers=4, checkpoint_layers=True))
    model = LongNetForCausalLM(made)
    calls, batch = count_layers(model), torch.randint(0, VOCABULARY, (1, 20))
    for change, count in (
        (lambda: None, 8),
        (lambda: model._set_gradient_checkpointing(every_n_layers=2), 6),
        (lambda: model.gradient_checkpointing_disable(), 4),
    ):
        change()
        calls.clear()
        gradients(model, input_ids=batch, labels=batch)
        assert len(calls) == count


@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_layers_on_several_devices(tmp_path, tied):
    """The disk stands for a second device: hooks of accelerate move the weights of a layer and its inputs."""
    plain = decoder(tied)
    plain.save_pretrained(tmp_path / "a")
    names = {"embed_tokens": "cpu", "layers.0": "cpu", "layers.1": "disk", "layer_norm": "cpu", "output_projection": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", device_map=names, offload_folder=tmp_path / "b")
    assert model.layers[1].ffn.fc1.weight.is_meta
    samples, batch, mask = ragged([30, 11])
    logits = model(batch, attention_mask=mask).logits
    for own, valid, sample in zip(logits, mask.bool(), samples, strict=True):
        torch.testing.assert_close(own[valid], plain(sample[None])[0], rtol=0, atol=1e-5)
    expected = plain.generate(samples, max_new_tokens=8).tokens
    assert model.generate(batch, attention_mask=mask, max_new_tokens=8, do_sample=False)[:, -8:].equal(expected)
    for device_map in ("cpu", "auto", {"": "cpu"}):
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "a", device_map=device_map)
        assert whole(batch, attention_mask=mask).logits.equal(logits)
    no_split = LongNetForCausalLM(LongNetPreTrainedConfig.of(config()))._no_split_modules
    assert no_split == {"LongNetLayer"}


def test_a_copy_of_a_model_is_a_model_of_its_own():
    model = in_transformers(decoder(), LongNetForCausalLM)
    other, batch = copy.deepcopy(model), torch.randint(0, VOCABULARY, (1, 20))
    expected = model(batch).logits
    assert other(batch).logits.equal(expected)
    with torch.no_grad():
        other.embed_tokens.weight.add_(1.0)
    assert other.output_projection.weight is other.embed_tokens.weight
    assert model(batch).logits.equal(expected)
    assert not other(batch).logits.equal(expected)
