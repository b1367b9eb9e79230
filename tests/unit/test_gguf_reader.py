"""The GGUF container: what is written is read, and whatever else is there is one clear error."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import DeploymentError
from inflight.gguf.files import is_gguf, locate_model
from inflight.gguf.reader import GgufModel
from inflight.gguf.types import TENSOR_TYPES

METADATA = {
    "u8": (gguf.GGUFValueType.UINT8, 200),
    "i8": (gguf.GGUFValueType.INT8, -3),
    "u16": (gguf.GGUFValueType.UINT16, 65_000),
    "i16": (gguf.GGUFValueType.INT16, -300),
    "u32": (gguf.GGUFValueType.UINT32, 4_000_000_000),
    "i32": (gguf.GGUFValueType.INT32, -70_000),
    "u64": (gguf.GGUFValueType.UINT64, 1 << 60),
    "i64": (gguf.GGUFValueType.INT64, -(1 << 60)),
    "f32": (gguf.GGUFValueType.FLOAT32, 1e-5),
    "f64": (gguf.GGUFValueType.FLOAT64, 0.1),
    "bool": (gguf.GGUFValueType.BOOL, True),
    "text": (gguf.GGUFValueType.STRING, "größer ▁ 😀"),
}
WORDS, NUMBERS, FLAGS = ["", "a", "▁b"], [3, 1, 2], [True, False]


def _write(path: Path, tensors: int = 3, split: tuple[int, int, int] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, (kind, value) in METADATA.items():
        writer.add_key_value(key, value, kind)
    for key, values in (("words", WORDS), ("numbers", NUMBERS), ("flags", FLAGS)):
        writer.add_array(key, values)
    if split is not None:
        for key, number in zip(("split.no", "split.count", "split.tensors.count"), split, strict=True):
            writer.add_key_value(key, number, gguf.GGUFValueType.UINT16)
    first = 0 if split is None else split[0] * tensors
    for number in range(first, first + tensors):
        writer.add_tensor(f"t{number}", np.full((3, 2 + number), number, np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    model = GgufModel(_write(tmp_path / "m.gguf"))
    for key, (_, value) in METADATA.items():
        assert model.metadata[key] == value
        assert type(model.metadata[key]) is type(value)
    assert model.metadata["words"] == WORDS
    assert model.metadata["numbers"].tolist() == NUMBERS
    assert model.metadata["flags"].tolist() == FLAGS
    for number in range(3):
        tensor = model.tensors[f"t{number}"]
        assert (tensor.shape, tensor.type.name) == ((3, 2 + number), "F32")
        assert (tensor.data.view(np.float32) == number).all()


def test_a_file_larger_than_memory_is_read(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.gguf")
    try:
        with path.open("r+b") as file:
            file.truncate(4 << 40)
    except OSError:
        pytest.skip("the file system has no files of 4 TB")
    model = GgufModel(path)
    assert (model.tensors["t2"].data.view(np.float32) == 2).all()
    model.tensors["t2"].data[0, 0] = 7  # PyTorch asks for memory that can be written; the file stays as it is
    assert (GgufModel(path).tensors["t2"].data.view(np.float32) == 2).all()


def test_sizes_of_blocks_are_the_packages() -> None:
    """``Q8_1`` is never in a file; the package has its size of before."""
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items() if kind.name != "Q8_1"}
    assert {number: tuple(TENSOR_TYPES[number]) for number in theirs} == theirs


def test_a_model_in_parts(tmp_path: Path) -> None:
    paths = [_write(tmp_path / f"m-{part + 1:05}-of-00002.gguf", 2, (part, 2, 4)) for part in range(2)]
    for path in paths:
        model = GgufModel(path)
        assert model.path == paths[0]
        assert sorted(model.tensors) == ["t0", "t1", "t2", "t3"]
    assert locate_model(tmp_path) == paths[0]
    paths[1].unlink()
    with pytest.raises(DeploymentError, match="m-00002-of-00002.gguf: missing; the model is in 2 files"):
        GgufModel(paths[0])


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ((0, 3, 4), "split.count is 3, and the name stands for 2"),
        ((1, 2, 4), "split.no is 1; by its name the file is number 0"),
        ((0, 2, 5), "its parts have 4 tensors; split.tensors.count is 5"),
    ],
)
def test_parts_that_do_not_belong_together(tmp_path: Path, split: tuple[int, int, int], message: str) -> None:
    path = _write(tmp_path / "m-00001-of-00002.gguf", 2, split)
    _write(tmp_path / "m-00002-of-00002.gguf", 2, (1, 2, 4))
    if split[0]:  # its tensors would be those of the other
        path = _write(tmp_path / "m-00001-of-00002.gguf", 0, split)
    with pytest.raises(DeploymentError, match=message):
        GgufModel(path)


def test_the_same_tensor_in_two_parts(tmp_path: Path) -> None:
    for part in range(2):
        _write(tmp_path / f"m-{part + 1:05}-of-00002.gguf", 1)
    with pytest.raises(DeploymentError, match="tensor 't0' is in another part"):
        GgufModel(tmp_path / "m-00001-of-00002.gguf")


def test_which_model_a_directory_has(tmp_path: Path) -> None:
    assert locate_model(tmp_path) == tmp_path
    one = _write(tmp_path / "a.gguf")
    assert locate_model(tmp_path) == locate_model(one) == one
    assert is_gguf(one)
    assert not is_gguf(tmp_path)
    _write(tmp_path / "b.gguf")
    with pytest.raises(DeploymentError, match=r"it has several models, a\.gguf, b\.gguf; name the one to serve"):
        locate_model(tmp_path)
    (tmp_path / "b.gguf").rename(tmp_path / "mmproj-b.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert locate_model(tmp_path) == one
    (tmp_path / "model.safetensors").touch()
    assert locate_model(tmp_path) == tmp_path


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _head(tensors: int = 0, entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def _tensor(name: str = "t", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    numbers = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return _text(name) + numbers


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"GGUX" + bytes(40), "does not begin with GGUF"),
        (_head(version=1), "GGUF version 1 is not supported"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "it is big endian"),
        (b"GGUF\x03\x00", "version: the file ends before it does"),
        (_head(entries=1 << 62), "entries of metadata: 4611686018427387904 are announced"),
        (_head(tensors=1 << 40), "tensors: 1099511627776 are announced"),
        (_head(entries=1) + struct.pack("<Q", 1 << 50) + bytes(20), "a key: 1125899906842624 are announced"),
        (_head(entries=1) + _text("k") + struct.pack("<I", 13) + bytes(8), "k: type 13 of metadata is unknown"),
        (_head(entries=1) + _text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(8), "k: an array of type 9"),
        (_head(entries=1) + _text("k") + struct.pack("<IIQ", 9, 10, 1 << 61) + bytes(8), "k: 2305843009213693952 are"),
        (_head(entries=1) + _text("k") + struct.pack("<IQ", 8, 2) + b"\xff\xfe", "k: b'\\\\xff\\\\xfe' is not UTF-8"),
        (_head(entries=2) + 2 * (_text("k") + struct.pack("<IB", 0, 1)), "key 'k' is there twice"),
        (
            _head(entries=1) + _text("k") + struct.pack("<IIQ", 9, 8, 2) + _text("a") + bytes(7),
            "k: the file ends before",
        ),
        (
            _head(entries=1) + _text("k") + struct.pack("<IIQQ", 9, 8, 1, 2) + b"\xff\xfe",
            r"k: b'\\xff\\xfe' is not UTF-8",
        ),
        (
            _head(entries=1) + _text("k") + struct.pack("<IIQ", 9, 0, 1 << 22) + bytes(1 << 22),
            "k: 4194304 are announced; no more than 2097152 are read",
        ),
        (_head(1) + _tensor(kind=4) + bytes(99), "tensor 't': type 4 is unknown"),
        (_head(1) + _tensor(shape=(1,) * 5) + bytes(99), "tensor 't' has 5 dimensions"),
        (_head(1) + _tensor(shape=(0, 3)) + bytes(99), r"tensor 't' is \[3, 0\]"),
        (_head(1) + _tensor(shape=(33,), kind=8) + bytes(99), "Q8_0 has rows of whole blocks of 32"),
        (_head(1) + _tensor(shape=(1 << 63, 1 << 63)) + bytes(99), "it must begin at a multiple of 32 and end within"),
        (_head(1) + _tensor(offset=1 << 40) + bytes(99), "begins at 1099511627776"),
        (_head(1) + _tensor(offset=3) + bytes(99), "begins at 3 and takes 16 bytes"),
        (_head(2) + _tensor() + _tensor("u") + bytes(99), "tensor 'u' lies partly where another one does"),
        (_head(2) + _tensor() + _tensor(offset=32) + bytes(99), "tensor 't' is there twice"),
        (
            _head(entries=1) + _text("general.alignment") + struct.pack("<II", 4, 24) + bytes(64),
            "general.alignment is 24; it must be a power of two",
        ),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_what_is_wrong_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(DeploymentError, match=message) as error:
        GgufModel(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match=r"none\.gguf: cannot be read: No such file"):
        GgufModel(tmp_path / "none.gguf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("gguf") / "m.gguf")


_Change = Callable[[bytearray], None]


def _at(draw: Callable[[st.SearchStrategy[float]], float], content: bytearray) -> int:
    return int(draw(st.floats(0, 1, exclude_max=True)) * len(content))


@given(data=st.data())
def test_whatever_bytes_are_there(whole: Path, data: st.DataObject) -> None:
    """Numbers in a row are overwritten with what hurts most, and the end may be missing."""
    content = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = _at(data.draw, content)
        value = data.draw(st.sampled_from([0, 1, 9, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1]))
        content[at : at + 8] = struct.pack("<Q", value)[: data.draw(st.integers(1, 8))]
    if data.draw(st.booleans()):
        del content[_at(data.draw, content) :]
    path = whole.with_name("changed.gguf")
    path.write_bytes(content)
    tracemalloc.start()
    with suppress(DeploymentError):
        model = GgufModel(path)
        assert all(tensor.data.size <= len(content) for tensor in model.tensors.values())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
