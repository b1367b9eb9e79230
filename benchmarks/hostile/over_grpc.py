"""Hostile calls over gRPC: forged tensors, odd parameters, and messages that are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from random import Random

from tritonclient.grpc import service_pb2

from benchmarks.hostile import values
from inflight.contract import ENGINE

_SERVICE = "/inference.GRPCInferenceService/"
_UNARY, _STREAM = f"{_SERVICE}ModelInfer", f"{_SERVICE}ModelStreamInfer"


@dataclass(frozen=True)
class GrpcAttack:
    """One call."""

    kind: str
    method: str
    messages: tuple[bytes, ...]
    streams: bool
    metadata: tuple[tuple[str, str], ...] = ()


def _call(kind: str, random: Random, *requests: service_pb2.ModelInferRequest) -> GrpcAttack:
    streams = len(requests) > 1 or random.random() < 0.7
    # The header brings the server down by its errors, where it is not told to ignore it.
    metadata = (("triton_grpc_error", "true"),) if streams and random.random() < 0.2 else ()
    messages = tuple(request.SerializeToString() for request in requests)
    return GrpcAttack(kind, _STREAM if streams else _UNARY, messages, streams, metadata)


def _add(
    request: service_pb2.ModelInferRequest, name: str, datatype: str, shape: list[int], content: bytes | None
) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    if content is not None:
        request.raw_input_contents.append(content)


def _writable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _sound(random: Random) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name="ensemble", id=str(random.random()))
    _add(request, "text_input", "BYTES", [1, 1], b"\x05\0\0\0Hello")
    _add(request, "max_tokens", "INT32", [1, 1], b"\x02\0\0\0")
    return request


def _wild(random: Random) -> GrpcAttack:
    """A request that is sound but for some declared inputs: right types, shapes and lengths, and wild values."""
    request = _sound(random)
    request.model_name = model = random.choice(values.PUBLIC)
    if model == ENGINE:
        del request.inputs[:], request.raw_input_contents[:]
        _add(request, "input_ids", "INT32", [1, 3], b"\x05\0\0\0\x06\0\0\0\x07\0\0\0")
        _add(request, "request_output_len", "INT32", [1, 1], b"\x04\0\0\0")
    there = [tensor.name for tensor in request.inputs]
    for tensor in values.wild_inputs(random, model):
        dims = [1, *(random.choice([0, 1, 2, 3, 8]) if dim < 0 else dim for dim in tensor.dims)]
        content = values.packed(random, tensor.dtype, prod(dims))
        if tensor.name in there and random.random() < 0.8:
            request.raw_input_contents[there.index(tensor.name)] = content
            request.inputs[there.index(tensor.name)].shape[:] = dims
        else:
            _add(request, tensor.name, tensor.dtype, dims, content)
    return _call("declared inputs, wild values", random, request)


def _forged(random: Random) -> GrpcAttack:
    """Tensors that fit the stage's declaration, so that the stage itself has to judge them."""
    model = random.choice(values.MODELS)
    request = service_pb2.ModelInferRequest(model_name=model, id=random.choice(["", "1", "\N{BOM}"]))
    for _ in range(random.randint(1, 8)):
        _add(request, *values.forged(random, model))
    return _call("forged tensors to each stage", random, request)


def _shapes(random: Random) -> GrpcAttack:
    request = service_pb2.ModelInferRequest(model_name=random.choice(values.MODELS))
    for _ in range(random.randint(1, 4)):
        content = random.choice([b"", None, bytes(values.size(random, 100_000)), values.strings(random, 3)])
        shape = [max(-(2**63), min(2**63 - 1, dim)) for dim in values.shape(random)]
        _add(request, _writable(values.name(random)), random.choice(values.TYPES), shape, content)
    return _call("shapes, types, contents that do not fit", random, request)


def _typed(random: Random) -> GrpcAttack:
    """Contents in the typed fields, in too many of them, or beside raw ones."""
    request = _sound(random)
    if random.random() < 0.7:
        del request.raw_input_contents[:]
    for tensor in request.inputs:
        tensor.contents.int_contents.extend([1] * values.size(random, 1000))
        tensor.contents.bytes_contents.extend([b"x"] * random.randint(0, 3))
        tensor.contents.fp32_contents.extend([float("nan")] * random.randint(0, 2))
    return _call("typed contents", random, request)


def _large(random: Random) -> GrpcAttack:
    most = 26 << 20 if random.random() < 0.5 else 100_000
    length = max(values.size(random, most), most // 5)
    if random.random() < 0.5:
        request = service_pb2.ModelInferRequest(model_name="ensemble")
        _add(request, "text_input", "BYTES", [1, 1], length.to_bytes(4, "little") + b"x" * length)
    else:
        request = service_pb2.ModelInferRequest(model_name="tensorrt_llm")
        _add(request, "input_ids", "INT32", [1, length // 4], bytes(length // 4 * 4))
        _add(request, "request_output_len", "INT32", [1, 1], b"\x01\0\0\0")
    return _call("long tensors", random, request)


def _many(random: Random) -> GrpcAttack:
    request, count = _sound(random), values.size(random, 20_000)
    same = random.random() < 0.5
    if random.random() < 0.5:
        for index in range(count):
            _add(request, "max_tokens" if same else f"x{index}", "INT32", [1, 1], b"\x01\0\0\0")
    else:
        for index in range(count):
            request.outputs.add(name="text_output" if same else f"x{index}")
    return _call("many and repeated inputs and outputs", random, request)


def _parameters(random: Random) -> GrpcAttack:
    request = _sound(random)
    request.id = _writable(values.text(random, 1 << 20))
    names = "priority timeout sequence_id sequence_start sequence_end binary_data_output triton_x "
    names += (
        "triton_enable_empty_final_response shared_memory_region shared_memory_byte_size classification temperature"
    )
    for _ in range(random.randint(1, 6)):
        parameter = request.parameters[random.choice([*names.split(), _writable(values.name(random))])]
        kind = random.choice(["bool_param", "int64_param", "string_param", "double_param", "uint64_param"])
        odd = {"bool_param": True, "int64_param": -(2**63), "string_param": _writable(values.text(random, 1000))}
        setattr(parameter, kind, odd.get(kind, 1e308 if kind == "double_param" else 2**64 - 1))
    if random.random() < 0.3:
        asked = request.outputs.add(name="text_output")
        asked.parameters["classification"].int64_param = random.choice([-1, 2**62])
        asked.parameters["shared_memory_region"].string_param = "x"
    request.model_version = random.choice(["", "", "1", "-1", "9" * 30, "x", "\0"])
    return _call("ids, parameters, versions", random, request)


def _mixed(random: Random) -> GrpcAttack:
    models = ("ensemble", "tensorrt_llm", "detokenizer", "tokenizer", "", "nothing", "../x")
    requests = [_sound(random) for _ in range(random.randint(2, 12))]
    for request in requests:
        request.model_name = random.choice(models)
    return _call("streams of sound and bad requests", random, *requests)


def _noise(random: Random) -> GrpcAttack:
    message = bytearray(_sound(random).SerializeToString())
    for _ in range(random.randint(1, 9)):
        message[random.randrange(len(message))] = random.randrange(256)
    if random.random() < 0.3:
        message = bytearray(b"\x0a\x04" * values.size(random, 100_000))
    streams = random.random() < 0.5
    return GrpcAttack("messages that are none", _STREAM if streams else _UNARY, (bytes(message),), streams)


def _operators(random: Random) -> GrpcAttack:
    load = service_pb2.RepositoryModelLoadRequest(model_name=random.choice(["ensemble", "../x", "y"]))
    load.parameters["config"].string_param = random.choice(["{}", "[" * 9999, _writable(values.text(random, 9999))])
    load.parameters["file:1/../../../x"].bytes_param = b"x" * values.size(random, 99_999)
    register = service_pb2.SystemSharedMemoryRegisterRequest(name="x", key="/x", offset=2**63, byte_size=2**63)
    settings = service_pb2.TraceSettingRequest(model_name="ensemble")
    settings.settings["trace_file"].value.append("x")
    calls = {
        "RepositoryModelLoad": load,
        "RepositoryModelUnload": service_pb2.RepositoryModelUnloadRequest(model_name="ensemble"),
        "RepositoryIndex": service_pb2.RepositoryIndexRequest(repository_name=_writable(values.text(random, 99_999))),
        "SystemSharedMemoryRegister": register,
        "SystemSharedMemoryUnregister": service_pb2.SystemSharedMemoryUnregisterRequest(),
        "CudaSharedMemoryRegister": service_pb2.CudaSharedMemoryRegisterRequest(
            name="x", raw_handle=b"x" * 64, device_id=-1
        ),
        "TraceSetting": settings,
        "LogSettings": service_pb2.LogSettingsRequest(),
        "ModelConfig": service_pb2.ModelConfigRequest(name=_writable(values.name(random)), version="x"),
        "ModelMetadata": service_pb2.ModelMetadataRequest(name="ensemble", version="9" * 40),
        "ModelStatistics": service_pb2.ModelStatisticsRequest(name="nothing"),
        "Nothing": service_pb2.LogSettingsRequest(),
    }
    method = random.choice(sorted(calls))
    return GrpcAttack("operators' calls", _SERVICE + method, (calls[method].SerializeToString(),), streams=False)


_ALL: tuple[Callable[[Random], GrpcAttack], ...] = (
    _wild,
    _wild,
    _wild,
    _forged,
    _forged,
    _shapes,
    _typed,
    _large,
    _many,
    _parameters,
    _mixed,
    _noise,
    _operators,
)


def grpc_attack(random: Random) -> GrpcAttack:
    """Return a call of a random kind."""
    return random.choice(_ALL)(random)
