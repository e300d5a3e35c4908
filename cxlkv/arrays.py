"""Arrays of any library (numpy, torch, DLPack) as an address, byte strides and a dtype; no copy."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cxlkv.errors import BadArgumentError
from cxlkv.layout import DTYPES, STORED

if TYPE_CHECKING:
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

NUMPY_DTYPES = (
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(np.float16),
    np.dtype(np.float32),
)
_NUMPY_CODES = {dtype: code for code, dtype in enumerate(NUMPY_DTYPES)}
_NUMPY_BYTES = (np.dtype(np.uint8), np.dtype(ml_dtypes.float8_e4m3fn))
BYTES = STORED.index("uint8")
"""The dtype code of rows of one byte a channel, which a pool in fp8 takes as they are."""


class View(NamedTuple):
    """An array's memory: address, shape, byte strides, dtype code; keeps the array alive.

    Made by tuple.__new__, which takes no Python call: some of these are made in every append.
    """

    owner: object
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: int


def is_torch(array: object) -> bool:
    """True for a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def view(array: object, name: str) -> View:
    """`array` as a View; raises BadArgumentError naming `name` for what cannot be read in place."""
    if isinstance(array, np.ndarray):
        code = _NUMPY_CODES.get(array.dtype)
        if code is None:
            raise _wrong_dtype(name, array.dtype)
        address: int = array.__array_interface__["data"][0]
        return tuple.__new__(View, (array, address, array.shape, array.strides, code))
    if is_torch(array):
        return _torch_view(cast("torch.Tensor", array), name)
    if hasattr(array, "__dlpack__"):
        return view(_from_dlpack(array, name), name)
    raise BadArgumentError(
        f"{name} is a {type(array).__name__}: give a numpy array, a torch tensor or a DLPack object"
    )


def rows_or_bytes(array: object, name: str) -> View:
    """As view(), and of uint8 or float8_e4m3fn, too: their code is BYTES."""
    array = imported(array, name)
    if isinstance(array, np.ndarray) and array.dtype in _NUMPY_BYTES:
        return View(array, address_of(array), array.shape, array.strides, BYTES)
    if is_torch(array):
        tensor = cast("torch.Tensor", array)
        if tensor.is_cpu and str(tensor.dtype) in ("torch.uint8", "torch.float8_e4m3fn"):
            return View(tensor, tensor.data_ptr(), tensor.shape, tensor.stride(), BYTES)
    return view(array, name)


def imported(array: object, name: str) -> object:
    """A DLPack object as the array that can be indexed; others as they are."""
    if isinstance(array, np.ndarray) or is_torch(array) or not hasattr(array, "__dlpack__"):
        return array
    return _from_dlpack(array, name)


def _torch_view(tensor: torch.Tensor, name: str) -> View:
    code = _torch_codes().get(tensor.dtype)
    if code is None:
        raise _wrong_dtype(name, tensor.dtype)
    if not tensor.is_cpu:
        raise BadArgumentError(f"{name} lies on {tensor.device}: bring it to the CPU first")
    size = NUMPY_DTYPES[code].itemsize
    strides = tuple([stride * size for stride in tensor.stride()])
    return tuple.__new__(View, (tensor, tensor.data_ptr(), tensor.shape, strides, code))


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


def address_of(array: object) -> int:
    """Of the first element of what view() takes."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    if is_torch(array):
        return cast("torch.Tensor", array).data_ptr()
    return view(array, "").address


def forms(*arrays: object) -> tuple[object, ...] | None:
    """What a call into the core takes of torch tensors but their addresses: where it is equal, what
    was found right of others is so of these. None where one is something else."""
    found: list[object] = []
    for array in arrays:
        if array is None:
            found.append(None)
        elif is_torch(array):
            tensor = cast("torch.Tensor", array)
            found.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.is_cpu))
        else:
            return None
    return tuple(found)


def empty_like_kind(kind: object, shape: tuple[int, ...], dtype: int) -> Array:
    """An uninitialised array of dtype code `dtype`: torch if `kind` is torch, else numpy."""
    if not is_torch(kind):
        return np.empty(shape, NUMPY_DTYPES[dtype])
    import torch

    return torch.empty(shape, dtype=(torch.bfloat16, torch.float16, torch.float32)[dtype])
