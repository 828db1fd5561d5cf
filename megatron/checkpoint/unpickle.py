"""Reads pickles that hold tensors, numbers, text and containers; nothing in one is ever imported or called.

Checkpoints of other programs are pickles, and Python's own reader of them runs what they ask for. A subclass of it can
refuse to, but not to take the memory that a pickle asks for, nor to hash tuples nested so deep that the interpreter
crashes. So the opcodes, which `pickletools` decodes, are carried out here, as few of them as such files need.
"""

from __future__ import annotations

import dataclasses
import pickletools
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
import torch

from megatron.flags import InputError


@dataclasses.dataclass(eq=False, repr=False)  # its text could be without end
class Record:
    """An object of a class that is admitted, as what the pickle says of it.

    Attributes:
        kind: full name of the class.
        args: what it was to be made from.
        state: its attributes, a dict; numpy's classes have a tuple.
    """

    kind: str
    args: tuple = ()
    state: Any = None

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, if the object has it."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


def shown_value(value: Any) -> str:
    """What a pickle holds, for a message: of a container or a long number its type, for a few bytes can make a list
    whose text has no end."""
    if isinstance(value, str):
        return repr(value[:40])
    if value is None or isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 64):
        return str(value)
    return f"of type {value.kind if isinstance(value, Record) else type(value).__name__}"


@dataclasses.dataclass(frozen=True)
class Global:
    """The name of an admitted class or function."""

    name: str


DCP = "torch.distributed.checkpoint."
# Classes that become a `Record`: what holds the flags of a run, the states of its random generators, and the table of
# contents of torch.distributed.checkpoint.
RECORDS = {
    "argparse.Namespace",
    "types.SimpleNamespace",
    "torch.device",
    "numpy.ndarray",
    "numpy.dtype",
    "signal.Signals",
    "pathlib.PosixPath",
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
# Names that are values in themselves. A class of storage says no more than a dtype.
VALUES = {f"torch.{name}": getattr(torch, name) for name in DTYPES} | {
    f"torch.{storage}Storage": getattr(torch, name) for storage, name in zip(STORAGES, DTYPES, strict=True)
}


def _ordered_dict() -> dict:
    """Its items follow, each by an opcode."""
    return {}


def _encode(text: str, encoding: str) -> bytes:
    """How protocol 2 writes bytes."""
    if encoding != "latin1":
        raise ValueError(f"bytes are written in {shown_value(encoding)}")
    return text.encode("latin1")


def _numpy_array(kind: Global, shape: tuple, code: bytes) -> Record:
    return Record(kind.name)


def _numpy_scalar(dtype: Record, content: bytes) -> int | float | bool:
    code = dtype.args[0]
    if code not in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "b1"):
        raise ValueError(f"a number of numpy has the dtype {shown_value(code)}")
    (value,) = np.frombuffer(content, dtype=np.dtype(code).newbyteorder("<"))
    return value.item()


def _parameter(data: Any, requires_grad: bool, hooks: dict) -> Any:
    return data


# Functions that are admitted, and what is done in place of calling them.
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
    """The object whose pickle begins at the place where `stream` stands, which is left behind its end.

    Args:
        where: the file, for messages.
        tensor: called for a tensor, with its storage, offset, size, stride, and what else torch writes.
        storage: called for what a pickle calls its persistent ids, the storages of tensors.

    Raises:
        InputError: it is damaged, or holds what no checkpoint needs.
    """
    machine = _Machine(FUNCTIONS | {"torch._utils._rebuild_tensor_v2": tensor}, storage)
    try:
        for opcode, arg, _ in pickletools.genops(stream):
            machine.do(opcode.name, arg)
        return machine.stack.pop()
    except _Refused as refused:
        raise InputError(
            f"{where}: holds {refused}, which no checkpoint of weights needs; it is not read"
        ) from None
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
    """Something that is not admitted; what it is."""


PUSHED = """
    INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE
    SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8
""".split()
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class _Machine:
    """The stack machine whose program a pickle is."""

    def __init__(self, functions: dict[str, Callable], storage: Callable[[tuple], Any]) -> None:
        self.functions, self.storage = functions, storage
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks beneath the marks
        self.memo: dict[int, Any] = {}

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
                elif not isinstance(stack[-1], dict):  # an OrderedDict's attributes are not wanted
                    raise ValueError("attributes of what has none")
            case "BINPERSID":
                (name,) = self.pop(1)
                stack.append(self.storage(name))
            case "PROTO" | "FRAME" | "STOP":
                pass
            case _:
                raise _Refused(f"the opcode {opcode}")

    def pop(self, count: int) -> list[Any]:
        """The topmost objects, which must be there."""
        if len(self.stack) < count:
            raise ValueError("the stack is empty")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def pop_mark(self) -> list[Any]:
        """The objects above the last mark."""
        items, self.stack = self.stack, self.below.pop()
        return items

    def named(self, name: str) -> Any:
        if name in VALUES:
            return VALUES[name]
        # NVIDIA's flags hold a few enumerations of its own.
        if name not in self.functions and name not in RECORDS and not name.startswith("megatron."):
            raise _Refused(name[:80])
        return Global(name)

    def call(self, callee: Any, args: Any) -> Any:
        if not isinstance(callee, Global):
            raise _Refused("a call of what is no function")
        if not isinstance(args, tuple):
            raise ValueError("arguments that are no tuple")
        if callee.name in self.functions:
            return self.functions[callee.name](*args)
        return Record(callee.name, args)


def _list(value: Any) -> list:
    if not isinstance(value, list):
        raise ValueError("items of what is no list")
    return value


def _with_items(target: Any, items: list[Any]) -> dict:
    """Put keys and values, by turns, into a dict. Keys must be such that hashing them ends."""
    if not isinstance(target, dict) or len(items) % 2:
        raise ValueError("items of what is no dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        parts = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(part, (str, int, float, Record, type(None))) for part in parts):
            raise ValueError(f"a key that is a {type(key).__name__}")
        target[key] = value
    return target
