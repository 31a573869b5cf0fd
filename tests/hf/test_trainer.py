"""``Trainer`` with padded and with packed batches: the same losses, and those of sdpa for one segment."""

from __future__ import annotations

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import hf_models
from dilated_attention_pytorch.integrations.transformers import apply
from hf_models import FULL, RATES, SEGMENTS, VOCABULARY

LENGTHS = [31, 9, 20, 1 + 11, 40, 25, 17, 30]


def samples():
    generator = torch.Generator().manual_seed(0)
    for n in LENGTHS:
        yield {"input_ids": torch.randint(2, VOCABULARY, (n,), generator=generator).tolist()}


def collate(kind):
    """Two samples as a padded batch, or as packed documents."""
    flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=kind == "cu_seq_lens")
    if kind in ("flattened", "cu_seq_lens"):
        return flatten

    def pad(features):
        rows = [torch.tensor(x["input_ids"]) for x in features]
        n = max(map(len, rows))
        x, labels, mask = (torch.full((len(rows), n), value) for value in (0, -100, 0))
        for b, row in enumerate(rows):
            where = slice(n - len(row), n) if kind == "left" else slice(0, len(row))
            x[b, where], labels[b, where], mask[b, where] = row, row, 1
            labels[b, where.start] = -100  # no row of the sample predicts its first token
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return {"input_ids": x, "attention_mask": mask, "labels": labels, "position_ids": positions}

    return pad


def losses(folder, kind, pattern=(SEGMENTS, RATES), dtype=torch.float64, **more):
    model = hf_models.llama()
    model = model.to(dtype) if pattern is None else apply(model, *pattern).to(dtype)
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=4, logging_steps=1, learning_rate=1e-2,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, remove_unused_columns=False, seed=3, **more,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=list(samples()), data_collator=collate(kind))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_padded_and_packed_batches_have_the_same_losses(tmp_path):
    expected = losses(tmp_path, "right")
    assert len(expected) == 4
    for kind in ("left", "flattened", "cu_seq_lens"):
        assert losses(tmp_path, kind) == pytest.approx(expected, abs=2e-5)
    one_segment, dense = losses(tmp_path, "left", FULL), losses(tmp_path, "left", None)
    assert one_segment == pytest.approx(dense, abs=2e-5)
    assert max(abs(a - b) for a, b in zip(dense, expected, strict=True)) > 0.01


def test_checkpointing_in_float32(tmp_path):
    plain = losses(tmp_path, "flattened", dtype=torch.float32)
    checkpointed = losses(tmp_path, "flattened", dtype=torch.float32, gradient_checkpointing=True)
    assert checkpointed == pytest.approx(plain, abs=1e-5)
