"""A pickle reader for tensors, numbers, text and containers, which never imports or calls anything from the pickle.

Checkpoints of other programs are pickles, and Python's unpickler runs code from them. A restricted subclass of it can
refuse to, but it still allocates whatever memory the pickle asks for, and crashes on hashing deeply nested tuples.
Therefore this module interprets the opcodes, decoded by `pickletools`, and supports only those that checkpoints use.
"""

from __future__ import annotations

import dataclasses
import io
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from megatron.errors import InputError
from megatron.files import MAX_BYTES


@dataclasses.dataclass(eq=False, repr=False)  # a repr could be endless
class Record:
    """An object of an allowed class, as the pickle describes it.

    Attributes:
        kind: full name of the class.
        args: arguments of the constructor.
        state: attributes, a dict; a tuple for NumPy's classes.
    """

    kind: str
    args: tuple = ()
    state: Any = None

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, or `default` if the object does not have it."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


MAX_LINE = 1 << 20  # bytes


class LimitedReader(io.BufferedReader):
    """A file of which no read takes more than `MAX_BYTES`, and no line more than `MAX_LINE`, whatever it states.

    The size of the file is no limit, since a file with a hole takes no space on the disk.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_BYTES:
            raise ValueError(f"a part of {size} bytes, more than {MAX_BYTES}")
        return super().read(size)

    def readline(self, size: int | None = -1, /) -> bytes:
        return super().readline(MAX_LINE)


def open_limited(path: Path) -> LimitedReader:
    """Open a file with a limit for each read."""
    return LimitedReader(io.FileIO(path))


def shown_value(value: Any) -> str:
    """Show a value from a pickle in a message. Containers and long integers are shown as their type, because a few
    bytes can describe a list with an endless repr."""
    if isinstance(value, str):
        return repr(value[:40])
    if value is None or isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 64):
        return str(value)
    return f"of type {value.kind if isinstance(value, Record) else type(value).__name__}"


@dataclasses.dataclass(frozen=True)
class Global:
    """The name of an allowed class or function."""

    name: str


DCP = "torch.distributed.checkpoint."
# Classes that become a `Record`: those of a run's flags, of random generators' states, and of the metadata of
# torch.distributed.checkpoint.
RECORDS = {
    "argparse.Namespace",
    "types.SimpleNamespace",
    "torch.device",
    "numpy.ndarray",
    "numpy.dtype",
    "signal.Signals",
    "pathlib.PosixPath",
    "_io.BytesIO",
    *(
        f"{DCP}metadata.{name}"
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "BytesStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    f"{DCP}filesystem._StorageInfo",
    *(f"{DCP}planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
}
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
# Names that stand for values. A storage class stands for its dtype.
VALUES = {f"torch.{name}": getattr(torch, name) for name in DTYPES} | {
    f"torch.{storage}Storage": getattr(torch, name) for storage, name in zip(STORAGES, DTYPES, strict=True)
}
VALUES["torch.Tensor"] = torch.Tensor


def _ordered_dict() -> dict:
    """Make an empty dict, to which further opcodes add the items."""
    return {}


def _encode(text: str, encoding: str) -> bytes:
    """Decode bytes as pickle protocol 2 writes them."""
    if encoding != "latin1":
        raise ValueError(f"bytes have the encoding {shown_value(encoding)}")
    return text.encode("latin1")


def _numpy_array(kind: Global, shape: tuple, code: bytes) -> Record:
    return Record(kind.name)


def _numpy_scalar(dtype: Record, content: bytes) -> int | float | bool:
    code = dtype.args[0]
    if code not in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "b1"):
        raise ValueError(f"a NumPy scalar has the dtype {shown_value(code)}")
    (value,) = np.frombuffer(content, dtype=np.dtype(code).newbyteorder("<"))
    return value.item()


def _parameter(data: Any, requires_grad: bool, hooks: dict) -> Any:
    return data


REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
# Allowed functions, each with the function that replaces it.
FUNCTIONS: dict[str, Callable] = {
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": tuple,
    "torch.serialization._get_layout": lambda name: name,
    "torch._utils._rebuild_parameter": _parameter,
    "_codecs.encode": _encode,
    "numpy.core.multiarray._reconstruct": _numpy_array,
    "numpy._core.multiarray._reconstruct": _numpy_array,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
}


def unpickle(
    stream: BinaryIO, where: str, *, tensor: Callable[..., Any], storage: Callable[[tuple], Any]
) -> Any:
    """Read one pickle from the stream, which is then positioned after it.

    Args:
        where: the file, for messages.
        tensor: makes a tensor from its storage, offset, size, stride and torch's further arguments.
        storage: makes a tensor's storage from its persistent id.

    Raises:
        InputError: the pickle is damaged, or holds objects that no checkpoint needs.
    """

    def tensor_with_attributes(function: Any, kind: Any, args: tuple, attributes: Any) -> Any:
        if function != Global(REBUILD_TENSOR) or kind is not torch.Tensor:
            raise ValueError("a tensor of a class other than torch.Tensor")
        return tensor(*args)

    functions = {REBUILD_TENSOR: tensor, "torch._tensor._rebuild_from_type_v2": tensor_with_attributes}
    machine = _Machine(FUNCTIONS | functions, storage)
    begin = stream.tell()
    try:
        for opcode, arg, _ in pickletools.genops(stream):
            machine.do(opcode.name, arg)
            if machine.copied > stream.tell() - begin:
                raise ValueError("it makes more bytes than it has")
        return machine.stack.pop()
    except _Refused as refused:
        raise InputError(f"{where}: holds {refused}, which no checkpoint needs, so it is not read") from None
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
        MemoryError,
        RecursionError,
    ) as error:
        raise InputError(f"{where}: is damaged ({' '.join(str(error).split())[:200]})") from None


class _Refused(Exception):
    """Raised for an object that is not allowed."""


PUSHED = """
    INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE
    SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8
""".split()
MAX_NAME = 200  # characters
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class _Machine:
    """The stack machine that executes a pickle's opcodes."""

    def __init__(self, functions: dict[str, Callable], storage: Callable[[tuple], Any]) -> None:
        self.functions, self.storage = functions, storage
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks below the marks
        self.memo: dict[int, Any] = {}
        # Bytes and items that calls copied. A program that writes its data once has as many bytes; one
        # that calls a function again and again on a remembered text takes all memory.
        self.copied = 0

    def do(self, opcode: str, arg: Any) -> None:
        stack = self.stack
        match opcode:
            case _ if opcode in PUSHED:
                stack.append(arg)
            case _ if opcode in CONSTANTS:
                stack.append(CONSTANTS[opcode])
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "MARK":
                self.below.append(stack)
                self.stack = []
            case "TUPLE" | "LIST":
                items = self.pop_mark()
                self.stack.append(tuple(items) if opcode == "TUPLE" else items)
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = self.pop(int(opcode[5:]))
                stack.append(tuple(items))
            case "APPEND" | "APPENDS":
                items = self.pop(1) if opcode == "APPEND" else self.pop_mark()
                _list(self.stack[-1]).extend(items)
            case "DICT":
                items = self.pop_mark()
                self.stack.append(_with_items({}, items))
            case "SETITEM" | "SETITEMS":
                items = self.pop(2) if opcode == "SETITEM" else self.pop_mark()
                _with_items(self.stack[-1], items)
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memo[arg] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self.memo[arg])
            case "GLOBAL":
                stack.append(self.named(arg.replace(" ", ".")))
            case "STACK_GLOBAL":
                stack.append(self.named(".".join(self.pop(2))))
            case "REDUCE" | "NEWOBJ":
                callee, args = self.pop(2)
                stack.append(self.call(callee, args))
            case "BUILD":
                (state,) = self.pop(1)
                if isinstance(stack[-1], Record):
                    stack[-1].state = state
                elif not isinstance(stack[-1], dict):  # an OrderedDict's attributes are ignored
                    raise ValueError("attributes for an object without any")
            case "BINPERSID":
                (name,) = self.pop(1)
                stack.append(self.storage(name))
            case "PROTO" | "FRAME" | "STOP":
                pass
            case _:
                raise _Refused(f"the opcode {opcode}")

    def pop(self, count: int) -> list[Any]:
        """Pop the topmost objects."""
        if len(self.stack) < count:
            raise ValueError("the stack is empty")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def pop_mark(self) -> list[Any]:
        """Pop the objects above the last mark."""
        items, self.stack = self.stack, self.below.pop()
        return items

    def named(self, name: str) -> Any:
        if name in VALUES:
            return VALUES[name]
        # Megatron-LM's flags include a few enumerations of its own.
        is_megatrons = name.startswith("megatron.") and len(name) <= MAX_NAME
        if name not in self.functions and name not in RECORDS and not is_megatrons:
            raise _Refused(name[:80])
        return Global(name)

    def call(self, callee: Any, args: Any) -> Any:
        if not isinstance(callee, Global):
            raise _Refused("a call of an object that is not a function")
        if not isinstance(args, tuple):
            raise ValueError("arguments that are not a tuple")
        if callee.name in self.functions:
            result = self.functions[callee.name](*args)
            self.copied += len(result) if isinstance(result, (bytes, tuple)) else 0
            return result
        return Record(callee.name, args)


def _list(value: Any) -> list:
    if not isinstance(value, list):
        raise ValueError("items for an object that is not a list")
    return value


def _with_items(target: Any, items: list[Any]) -> dict:
    """Add alternating keys and values to a dict. Only keys that are safe to hash are allowed."""
    if not isinstance(target, dict) or len(items) % 2:
        raise ValueError("items for an object that is not a dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        parts = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(part, (str, int, float, Record, type(None))) for part in parts):
            raise ValueError(f"a key that is a {type(key).__name__}")
        target[key] = value
    return target
