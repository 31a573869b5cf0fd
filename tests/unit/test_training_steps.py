"""What a step of training and a score compute, against plain PyTorch; settings, learning rates and operation counts."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import training_cases
from dilated_attention_pytorch import Dilated
from dilated_attention_pytorch.models import LongNetConfig, LongNetDecoder
from dilated_attention_pytorch.training import Corpus, ScoreBins, Trainer, load_decoder, log_probabilities
from dilated_attention_pytorch.training.costs import attention_flops, peak_of, window_flops
from dilated_attention_pytorch.training.data import IGNORED, batch_of
from training_cases import curve, finish, make_settings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")


def test_losses_and_gradients_are_those_of_plain_pytorch(tmp_path, text):
    """Three steps of a loop of its own: the mean over all targets, torch's clipping and AdamW, the cosine written out."""
    settings = make_settings(text, accumulate=2, steps=3, warm_up=1, clip=0.5)
    trainer = finish(settings, tmp_path / "out")
    torch.manual_seed(0)
    fresh = Trainer(settings, tmp_path / "fresh", CPU)
    model = fresh.model
    decay = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95), fused=False
    )
    for step, rate in enumerate((1e-2, 1e-2, 1e-3)):
        tokens, targets = batch_of(fresh.corpus, fresh.training.starts(step, 4), 64)
        assert (targets != IGNORED).all()
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for values in optimizer.param_groups:
            values["lr"] = rate
        optimizer.step()
        line = curve(tmp_path / "out")[step]
        assert line["learning_rate"] == pytest.approx(rate, rel=1e-12)
        assert line["loss"] == pytest.approx(float(loss), rel=1e-5)
        assert line["gradient_norm"] == pytest.approx(float(norm), rel=1e-4)
    for name, parameter in trainer.model.state_dict().items():
        torch.testing.assert_close(parameter, model.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_held_out_loss_is_that_of_plain_pytorch(tmp_path, text):
    trainer = finish(make_settings(text, evaluate_windows=3), tmp_path / "out")
    starts = trainer.held_out.spread(3)
    assert min(starts) >= trainer.training.last
    model = load_decoder(tmp_path / "out", CPU)
    with torch.no_grad():
        pairs = [trainer.corpus.pair(first, 64) for first in starts]
        loss = sum(cross_entropy(model(tokens[None])[0], targets) for tokens, targets in pairs) / len(starts)
    assert curve(tmp_path / "out")[-1]["held_out_loss"] == pytest.approx(float(loss), rel=1e-5)


def test_documents_do_not_predict_one_another(tmp_path):
    """Targets that are the first token of a file do not count, and the mean is over those that do."""
    paths = [tmp_path / f"{i}.txt" for i in range(40)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([65 + i]) * 50)
    settings = make_settings(paths[0], data=tuple(map(str, paths)), batch=2, accumulate=2, steps=1)
    trainer = Trainer(settings, tmp_path / "out", CPU)
    starts = trainer.training.starts(0, 2)
    tokens, targets = batch_of(trainer.corpus, starts, 64)
    assert (targets == IGNORED).sum() == sum((s + 1 + i) % 50 == 0 for s in starts for i in range(64)) > 0
    with torch.no_grad():
        expected = cross_entropy(trainer.model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    (point,) = trainer.run()
    assert point.loss == pytest.approx(float(expected), rel=1e-5)


def test_operations_of_a_window():
    """Dense attention over one segment: the closed form of a decoder."""
    config = LongNetConfig.from_dict(training_cases.MODEL | {"segment_lengths": (64,), "dilation_rates": (1,)})
    pairs = 64 * 65 // 2
    assert attention_flops(config, 64) == 2 * 2 * pairs * 8 * (4 + 10)  # layers, heads, D, forward and backward
    sparse = config.replace(segment_lengths=(16, 64), dilation_rates=(1, 4))
    met = sum(1 for q in range(64) for k in range(q + 1) if q // 16 == k // 16) + 16 * 17 // 2
    assert attention_flops(sparse, 64) == 2 * 2 * met * 8 * 14
    for tied in (True, False):
        chosen = config.replace(tie_embeddings=tied)
        model = LongNetDecoder(chosen)
        count = sum(p.numel() for name, p in model.named_parameters() if tied or name != "embed_tokens.weight")
        assert window_flops(model, chosen, 64) == 6 * 64 * count + attention_flops(config, 64)


def test_rates_of_gpus(monkeypatch):
    """Names as the driver reports them. A GPU whose name only begins like another one has no rate."""
    for name, expected in (
        ("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA L40", None), ("NVIDIA A10G", None),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found = peak_of(torch.device("cuda"))
        assert (None if found is None else found[1]) == expected, name
    assert peak_of(CPU) is None


def test_settings_are_checked(text):
    for changes, reason in (
        ({"steps": 0}, "steps"), ({"seed": -1}, "seed"), ({"batch": 3, "accumulate": 2}, "multiple of accumulate"),
        ({"held_out": 0.9}, "held_out"), ({"learning_rate": math.nan}, "learning_rate"), ({"clip": 0.0}, "clip"),
        ({"dtype": "float16"}, "dtype"), ({"kind": "words"}, "kind"), ({"betas": (0.9, 1.0)}, "betas"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            make_settings(text, **changes)
    with pytest.raises(ValueError, match="start it with torchrun"):
        Trainer(make_settings(text, sequence_ranks=2), text.parent / "out", CPU)


def test_learning_rates():
    settings = make_settings(Path("x"), steps=10, warm_up=4, learning_rate=1.0, last_rate=0.2)
    rates = [settings.rate(step) for step in range(10)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[9] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[4] - rates[5] < rates[6] - rates[7]  # slow at both ends


@pytest.mark.parametrize("chunk", [7, 100, 10_000])
def test_scores_are_those_of_one_forward(tmp_path, chunk):
    paths = [tmp_path / "a.fa", tmp_path / "b.fa.gz"]
    bases = "".join("ACGT"[i] for i in torch.randint(4, (500,), generator=torch.Generator().manual_seed(1)))
    paths[0].write_text(f">a\n{bases[:300]}\n")
    paths[1].write_bytes(gzip.compress(f">b\n{bases[300:]}\n".encode()))
    torch.manual_seed(0)
    config = LongNetConfig.from_dict(training_cases.MODEL | {"vocab_size": 5})
    model = LongNetDecoder(config, dtype=torch.float64).eval()
    corpus = Corpus.of(paths, tmp_path / "cache")
    bins = ScoreBins(len(corpus), 10)
    values = []
    for first, some in log_probabilities(model, corpus, chunk):
        assert first == 1 + len(values)
        values += some.tolist()
        bins.add(first, some)
    tokens = torch.tensor(["ACGT".index(letter) for letter in bases])
    with torch.no_grad():
        expected = model(tokens[None, :-1])[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    assert math.isnan(values[299])  # token 300 is the first of its document
    del values[299]
    expected = torch.cat((expected[:299], expected[300:]))
    torch.testing.assert_close(torch.tensor(values, dtype=torch.float64), expected, rtol=1e-6, atol=1e-6)
    assert bins.tokens == 498
    assert bins.bits == pytest.approx(-float(expected.mean()) / math.log(2), rel=1e-6)
    assert bins.means[0] == pytest.approx(-float(expected[:49].mean()) / math.log(2), rel=1e-6)
    assert bins.positions[0] == 25.0


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no model"):
        load_decoder(tmp_path, CPU)


def test_saved_models_are_loaded(tmp_path):
    model = LongNetDecoder(LongNetConfig.from_dict(training_cases.MODEL))
    model.save_pretrained(tmp_path / "model")
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(load_decoder(tmp_path / "model", CPU)(tokens), model.eval()(tokens))
    assert model.config.pattern == Dilated([16, 64], [1, 4])
