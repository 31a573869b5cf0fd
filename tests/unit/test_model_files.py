"""Models in folders: against the safetensors package in both directions, and files that are broken."""

from __future__ import annotations

import hashlib
import json
import struct

import pytest
import safetensors.torch
import torch

from dilated_attention_pytorch import LongNetConfig, LongNetDecoder, LongNetEncoder
from dilated_attention_pytorch.models.safetensors import DTYPES_BY_NAME, read_safetensors, write_safetensors

CONFIG = LongNetConfig.preset("tiny", vocab_size=11, num_layers=1)


def some_tensors() -> dict[str, torch.Tensor]:
    """One tensor of every dtype, a scalar, an empty one, and one that is not contiguous."""
    # Bytes of 0 and 1 are valid in every dtype, bool included.
    tensors = {
        name: torch.randint(0, 2, (3, 5 * dtype.itemsize), dtype=torch.uint8).view(dtype)
        for name, dtype in DTYPES_BY_NAME.items()
    }
    return tensors | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "view": torch.randn(4, 6).T,
        "a.é": torch.ones(1),
    }


def same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        own = actual[name]
        assert (own.dtype, own.shape) == (x.dtype, x.shape), name
        assert own.contiguous().reshape(-1).view(torch.uint8).equal(x.contiguous().reshape(-1).view(torch.uint8)), name


def known_to_the_package(tensors):
    return {name: x for name, x in tensors.items() if "FNUZ" not in name}


def test_the_package_reads_what_we_write(tmp_path):
    tensors = known_to_the_package(some_tensors())
    write_safetensors(tmp_path / "x", tensors, {"format": "pt"})
    same(safetensors.torch.load_file(tmp_path / "x"), tensors)
    raw = (tmp_path / "x").read_bytes()
    checksum = hashlib.sha256(raw[8 + int.from_bytes(raw[:8], "little") :]).hexdigest()
    with safetensors.safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == {"format": "pt", "sha256": checksum}


def test_a_changed_byte_of_the_data(tmp_path):
    path = tmp_path / "x"
    write_safetensors(path, {"a": torch.randn(3), "b": torch.randn(2, 2)}, {})
    raw = path.read_bytes()
    for place in range(len(raw) - 28, len(raw)):  # all 7 numbers
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 16]) + raw[place + 1 :])
        with pytest.raises(ValueError, match=f"{path} is not a valid .* another checksum than the one that was written"):
            read_safetensors(path)


def test_we_read_what_the_package_writes(tmp_path):
    tensors = {name: x.contiguous() for name, x in known_to_the_package(some_tensors()).items()}
    safetensors.torch.save_file(tensors, tmp_path / "x", {"a": "b"})
    read, metadata = read_safetensors(tmp_path / "x")
    same(read, tensors)
    assert metadata == {"a": "b"}


def test_we_read_what_we_write(tmp_path):
    for tensors in (some_tensors(), {}, {"empty": torch.empty(2, 0)}):
        write_safetensors(tmp_path / "x", tensors, {})
        read, metadata = read_safetensors(tmp_path / "x")
        same(read, tensors)
        assert metadata == {}


def file_of(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start=0, stop=8, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


BROKEN = {
    "empty": (b"", "it has 0 bytes"),
    "short": (b"\1\2\3", "it has 3 bytes"),
    "header longer than the file": (file_of({}, length=50), "its header should have 50; it is truncated"),
    "header larger than memory": (file_of({}, length=2**63), "it is truncated"),
    "not JSON": (file_of(b"{'x"), "its header is not valid JSON"),
    "not text": (file_of(b"\xff\xfe\xfa"), "its header is not valid JSON"),
    "a list": (file_of([]), "must be a JSON object, got list"),
    "a name twice": (file_of(b'{"a": 1, "a": 2}'), "these names occur twice: a"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), "its metadata must be strings"),
    "an entry without a shape": (
        file_of({"a": {"dtype": "F32"}}),
        "the entry of a must have dtype, shape and data_offsets",
    ),
    "unknown dtype": (file_of({"a": entry(dtype="F31")}, b"x" * 8), "a has the dtype 'F31'"),
    "negative size": (file_of({"a": entry(shape=(-2,))}, b"x" * 8), "the shape of a must be a list of sizes"),
    "offsets backwards": (file_of({"a": entry(8, 0)}, b"x" * 8), "must be two positions in the data"),
    "wrong size": (file_of({"a": entry(0, 4)}, b"x" * 4), r"a has 4 bytes, its shape \[2\] of F32 needs 8"),
    "overlap": (file_of({"a": entry(), "b": entry(4, 12)}, b"x" * 12), "b begins at byte 4 and overlaps with a"),
    "gap": (file_of({"a": entry(), "b": entry(12, 20)}, b"x" * 20), "b begins at byte 12 and leaves a gap behind a"),
    "truncated data": (file_of({"a": entry()}, b"x" * 7), "need 8 bytes of data, it has 7; it is truncated"),
    "more data": (file_of({"a": entry()}, b"x" * 9), "it has 9; there is more behind them"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_raise_and_name_themselves(name, tmp_path):
    data, error = BROKEN[name]
    path = tmp_path / "weights.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=error) as raised:
        read_safetensors(path)
    assert str(path) in str(raised.value)


def test_a_file_cut_anywhere_raises(tmp_path):
    path = tmp_path / "x"
    write_safetensors(path, {"a": torch.randn(3), "b": torch.randn(2, 2)}, {"format": "pt"})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="is not a valid safetensors file"):
            read_safetensors(path)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    write_safetensors(path, {"a": torch.ones(3)}, {})
    with pytest.raises(TypeError, match=r"x has torch.complex128"):
        write_safetensors(path, {"x": torch.zeros(2, dtype=torch.complex128)}, {})
    with pytest.raises(ValueError, match="dense tensors with values, x is"):
        write_safetensors(path, {"x": torch.zeros(2, device="meta")}, {})
    same(read_safetensors(path)[0], {"a": torch.ones(3)})

    class Broken(torch.Tensor):
        def detach(self):
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        write_safetensors(path, {"b": torch.ones(4), "a": torch.ones(3).as_subclass(Broken)}, {})
    same(read_safetensors(path)[0], {"a": torch.ones(3)})
    assert [x.name for x in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("tied", [True, False])
def test_models_come_back(tied, tmp_path):
    model = LongNetDecoder(CONFIG.replace(tie_embeddings=tied)).eval()
    model.save_pretrained(tmp_path / "a" / "b")
    assert sorted(x.name for x in (tmp_path / "a" / "b").iterdir()) == ["config.json", "model.safetensors"]
    again = LongNetDecoder.from_pretrained(tmp_path / "a" / "b").eval()
    assert again.config == model.config
    same(again.state_dict(), model.state_dict())
    tokens = torch.randint(0, 11, (2, 40))
    assert again(tokens).equal(model(tokens))
    stored = safetensors.torch.load_file(tmp_path / "a" / "b" / "model.safetensors")
    assert ("output_projection.weight" in stored) != tied
    half = LongNetDecoder.from_pretrained(tmp_path / "a" / "b", dtype=torch.bfloat16)
    assert {x.dtype for x in half.parameters()} == {torch.bfloat16}
    assert all(x.requires_grad for x in again.parameters())
    assert LongNetDecoder.from_pretrained(tmp_path / "a" / "b", device="meta").head_weight.is_meta
    # The parameters are not views of the file.
    model.save_pretrained(tmp_path / "a" / "b")
    with open(tmp_path / "a" / "b" / "model.safetensors", "r+b") as file:
        file.seek(2000)
        file.write(b"\0" * 2000)
    assert again(tokens).equal(model(tokens))


def test_a_tied_head_may_have_either_name():
    model = LongNetDecoder(CONFIG)
    state = model.state_dict()
    table = torch.randn_like(state["embed_tokens.weight"])
    rest = {name: x for name, x in state.items() if name != "embed_tokens.weight"}
    for names in (
        ["embed_tokens.weight"],
        ["output_projection.weight"],
        ["embed_tokens.weight", "output_projection.weight"],
    ):
        given = rest | {name: table.clone() for name in names}
        model.reset_parameters()
        model.load_state_dict(given)
        assert model.head_weight.equal(table)
        assert LongNetDecoder.from_tensors(CONFIG, given, "here").head_weight.equal(table)
        assert len(given) == len(rest) + len(names)  # the caller's dictionary is as it was
    with pytest.raises(ValueError, match="these tensors differ; use a config with tie_embeddings=False"):
        model.load_state_dict(rest | {"embed_tokens.weight": table, "output_projection.weight": table + 1})


def test_all_wrong_tensors_are_listed(tmp_path):
    LongNetDecoder(CONFIG).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: x.clone() for name, x in read_safetensors(path)[0].items()}
    del tensors["layer_norm.bias"], tensors["layers.0.ffn.fc1.weight"]
    tensors |= {"extra": torch.ones(2), "layers.0.ffn.fc2.bias": torch.ones(3)}
    write_safetensors(path, tensors, {})
    with pytest.raises(ValueError, match=r"model.safetensors does not have the tensors of this LongNetDecoder") as raised:
        LongNetDecoder.from_pretrained(tmp_path)
    for line in (
        "missing: layer_norm.bias (64,)", "missing: layers.0.ffn.fc1.weight (256, 64)", "unexpected: extra (2,)",
        "misshapen: layers.0.ffn.fc2.bias is (3,), the model has (64,)",
    ):  # fmt: skip
        assert line in str(raised.value)


def test_folders_that_are_not_models(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config.json; save_pretrained writes"):
        LongNetDecoder.from_pretrained(tmp_path)
    LongNetDecoder(CONFIG).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is of a LongNetDecoder; load it with LongNetDecoder.from_pretrained"):
        LongNetEncoder.from_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for text, error in (
        ("{", "config.json: "),
        (json.dumps(values | {"width": 1}), "config.json: LongNetConfig has no fields"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=error):
            LongNetDecoder.from_pretrained(tmp_path)
