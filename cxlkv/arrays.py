"""Arrays of any library (numpy, torch, DLPack) as an address, byte strides and a dtype; no copy."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, NoReturn, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cxlkv.errors import BadArgumentError
from cxlkv.layout import DTYPES, STORED
from cxlkv.numbers import FLOAT32_MAX

if TYPE_CHECKING:
    from typing import TypeGuard

    import torch

    # float32 stands for every stored dtype: numpy's types have no bfloat16.
    Array = npt.NDArray[np.float32] | torch.Tensor
else:
    Array = object

# What numpy arrays hold: here alone, so that a name means one thing in all files.
Bytes = npt.NDArray[np.uint8]
RecordBytes = npt.NDArray[np.uint8]  # [n, record_bytes]
Hashes = npt.NDArray[np.uint8]  # [n, 16]: keys of pages or objects
Names = npt.NDArray[np.uint8]  # [n, 16]: what the index has of pages
Mask = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int32]  # of each page or record, how it went
Starts = npt.NDArray[np.int32]  # of sequence i are the rows from starts[i] to starts[i + 1]
PageIndices = npt.NDArray[np.int32]  # of pages in a sequence, from 0
PageIds = npt.NDArray[np.uint32]  # of pages in the pool
Counts = npt.NDArray[np.uint32]
UInt32s = npt.NDArray[np.uint32]
Generations = npt.NDArray[np.uint64]
Addresses = npt.NDArray[np.uint64]  # of memory, and its bytes, as the core takes them
Pointers = npt.NDArray[np.int64]  # the same as CUDA and torch take them
Offsets = npt.NDArray[np.int64]
Sizes = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int64]  # ids or numbers of tokens
Units = npt.NDArray[np.int64]  # of a local tier: a page, layer and kv head
Halves = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


def leading(right: Mask) -> int:
    """How many values are true before the first false one."""
    return len(right) if right.all() else int(np.argmin(right))


NUMPY_DTYPES = (
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(np.float16),
    np.dtype(np.float32),
)
_NUMPY_CODES = {dtype: code for code, dtype in enumerate(NUMPY_DTYPES)}
_NUMPY_BYTES = (np.dtype(np.uint8), np.dtype(ml_dtypes.float8_e4m3fn))
BYTES = STORED.index("uint8")
"""The dtype code of rows of one byte a channel, which a pool in fp8 takes as they are."""
_CODE_BYTES = (*(dtype.itemsize for dtype in NUMPY_DTYPES), 1)
NEAR = 1 << 44
"""Below are few addresses of a process, and all of elements that have no storage."""
FLOAT32_LEAST = 2.0**-149


def positive_float32(value: object, name: str) -> float:
    """`value`, of a scale or a softcap, as a float; raises BadArgumentError for what float32 has
    not above 0."""
    try:
        found = float(value) if math.isfinite(value) else -1.0  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last by torch
        found = -1.0
    if isinstance(value, bool) or not FLOAT32_LEAST <= found <= FLOAT32_MAX:
        raise BadArgumentError(f"{name}={value!r} must be positive and finite, in float32, too")
    return found


def softcap_of(softcap: object) -> float:
    """The softcap as the core takes it: 0 where there is none. Raises BadArgumentError."""
    is_none = softcap is None or (isinstance(softcap, (int, float)) and softcap == 0)
    return 0.0 if is_none else positive_float32(softcap, "softcap")


class View(NamedTuple):
    """An array's memory: address, shape, byte strides, dtype code; keeps the array alive.

    Made by tuple.__new__, which takes no Python call: some of these are made in every append.
    """

    owner: object
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: int


_tensors: tuple[type, ...] = ()  # torch.Tensor, once somebody has imported torch


class BudgetRow(NamedTuple):
    """A budget of one sequence in one layer, as the core takes it; kind by its number."""

    kind: int
    pages: int
    amount: float
    sinks: int
    recent: int


def is_torch(array: object) -> TypeGuard[torch.Tensor]:
    """True for a torch tensor; does not import torch."""
    global _tensors
    if not _tensors and hasattr(sys.modules.get("torch"), "Tensor"):
        _tensors = (sys.modules["torch"].Tensor,)
    return isinstance(array, _tensors)


def view(array: object, name: str) -> View:
    """`array` as a View; raises BadArgumentError naming `name` for what cannot be read in place.

    Of a tensor with torch's negative bit, whose memory has the other sign, it is a copy."""
    if isinstance(array, np.ndarray):
        code = _NUMPY_CODES.get(array.dtype)
        if code is None:
            raise _wrong_dtype(name, array.dtype)
        address: int = array.__array_interface__["data"][0]
        return tuple.__new__(View, (array, address, array.shape, array.strides, code))
    if is_torch(array):
        return _torch_view(array, name)
    if hasattr(array, "__dlpack__"):
        return view(_from_dlpack(array, name), name)
    raise BadArgumentError(
        f"{name} is a {type(array).__name__}: give a numpy array, a torch tensor or a DLPack object"
    )


def rows_or_bytes(array: object, name: str) -> View:
    """view(), which also takes uint8 or float8_e4m3fn: their code is BYTES."""
    array = imported(array, name)
    if isinstance(array, np.ndarray) and array.dtype in _NUMPY_BYTES:
        address: int = array.__array_interface__["data"][0]
        return View(array, address, array.shape, array.strides, BYTES)
    if is_torch(array) and str(array.dtype) in ("torch.uint8", "torch.float8_e4m3fn"):
        return _torch_view(array, name, BYTES)
    return view(array, name)


def target(array: object, name: str) -> View:
    """rows_or_bytes() of what is to be written; raises BadArgumentError where that would be lost,
    or gradients would not know of it."""
    if is_torch(array):
        memory_of(array, name)
        if array.requires_grad:
            raise BadArgumentError(f"{name} requires grad and is to be written: give it detached")
    got = rows_or_bytes(array, name)
    if isinstance(got.owner, np.ndarray) and not got.owner.flags.writeable:
        raise BadArgumentError(f"{name} is read-only")
    return got


def imported(array: object, name: str) -> object:
    """A DLPack object as the array that can be indexed; others as they are."""
    if isinstance(array, np.ndarray) or is_torch(array) or not hasattr(array, "__dlpack__"):
        return array
    return _from_dlpack(array, name)


def _torch_view(tensor: torch.Tensor, name: str, code: int | None = None) -> View:
    if code is None and (code := _torch_codes().get(tensor.dtype)) is None:
        raise _wrong_dtype(name, tensor.dtype)
    if not tensor.is_cpu and not tensor.is_meta:
        raise BadArgumentError(f"{name} lies on {tensor.device}: bring it to the CPU first")
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    size = _CODE_BYTES[code]
    try:
        address, steps = tensor.data_ptr(), tensor.stride()
    except RuntimeError:
        _no_memory(tensor, name)
    if address < NEAR:
        _check_near(tensor, address, name)
    strides = tuple([stride * size for stride in steps])
    return tuple.__new__(View, (tensor, address, tensor.shape, strides, code))


def memory_of(tensor: torch.Tensor, name: str) -> int:
    """The address of a tensor's elements, on any device: other files take it here, or by a view.
    Raises BadArgumentError where what lies there is not its values."""
    if values_of(tensor, name) is not tensor:
        raise BadArgumentError(
            f"{name} has torch's negative or conjugate bit, its memory other values: give "
            f"{name}.resolve_conj().resolve_neg()"
        )
    return address_of(tensor, name)


def values_of(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor, or a copy where torch's negative or conjugate bit says that its memory has other
    values. Raises BadArgumentError for what needs more than memory."""
    if tensor.is_nested or tensor.is_quantized:
        _no_memory(tensor, name)
    if tensor.is_neg() or tensor.is_conj():
        return tensor.resolve_conj().resolve_neg()
    return tensor


def check_memory(tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Check by memory_of() the tensors, by name, that kernels read."""
    for name, tensor in tensors.items():
        try:
            if tensor is None or tensor.is_meta:  # no kernel runs there
                continue
            if tensor.is_neg() or tensor.data_ptr() < NEAR:
                memory_of(tensor, name)
        except RuntimeError:
            _no_memory(cast("torch.Tensor", tensor), name)


def _check_near(tensor: torch.Tensor, address: int, name: str) -> None:
    """Elements of no storage begin at their offset in it."""
    if address == tensor.storage_offset() * tensor.element_size() and tensor.numel():
        _no_memory(tensor, name)


def _no_memory(tensor: torch.Tensor, name: str) -> NoReturn:
    raise BadArgumentError(
        f"{name} is a {type(tensor).__name__} that has no plain memory of its own (traced, wrapped,"
        " batched, nested, sparse, quantized, meta, freed, or zeros that torch does not store): "
        "give a plain tensor with its values"
    ) from None


@cache
def _torch_codes() -> dict[torch.dtype, int]:
    import torch

    return {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def _from_dlpack(array: object, name: str) -> object:
    """numpy's importer knows no bfloat16; torch's does, where torch is already in use."""
    errors = (TypeError, RuntimeError, BufferError, ValueError)
    torch = sys.modules.get("torch")
    try:
        return np.from_dlpack(array)  # type: ignore[arg-type]
    except errors as error:
        if torch is None:
            raise _no_capsule(name, error) from error
    try:
        return cast(object, torch.from_dlpack(array))
    except errors as error:
        raise _no_capsule(name, error) from error


def _no_capsule(name: str, error: Exception) -> BadArgumentError:
    return BadArgumentError(f"{name}: its DLPack capsule cannot be read: {error}")


def _wrong_dtype(name: str, dtype: object) -> BadArgumentError:
    return BadArgumentError(f"{name} has dtype {dtype}: use one of {', '.join(DTYPES)}")


def address_of(array: object, name: str) -> int:
    """Address of the first element of what view() takes; of a tensor, of what forms() knows."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    if not is_torch(array):
        return view(array, name).address
    try:
        address = array.data_ptr()
    except RuntimeError:
        _no_memory(array, name)
    if address < NEAR:
        _check_near(array, address, name)
    return address


def forms(*arrays: object) -> tuple[object, ...] | None:
    """What a call into the core takes of torch tensors but their addresses: where it is equal, what
    was found right of others is so of these. None where one is something else, or view() copies it.
    """
    found: list[object] = []
    try:
        for array in arrays:
            if array is None:
                found.append(None)
            elif is_torch(array) and not array.is_neg():
                found.append((array.shape, array.stride(), array.dtype, array.is_cpu))
            else:
                return None
    except RuntimeError:  # of what is sparse or nested
        return None
    return tuple(found)


def empty_like_kind(kind: object, shape: tuple[int, ...], dtype: int) -> Array:
    """An uninitialised array of dtype code `dtype`: torch if `kind` is torch, else numpy."""
    if not is_torch(kind):
        return np.empty(shape, NUMPY_DTYPES[dtype])
    import torch

    return torch.empty(shape, dtype=(torch.bfloat16, torch.float16, torch.float32)[dtype])
