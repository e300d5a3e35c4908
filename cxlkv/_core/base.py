"""What every section of the binding needs: errors, what the core makes, arrays as pointers."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cxlkv import errors
from cxlkv._core import abi
from cxlkv.arrays import Units

with abi.finding_the_core():
    from cxlkv._native import ffi, lib

abi.check(lib)  # before anything of the core is used

FORMAT_VERSION: int = lib.CXLKV_FORMAT_VERSION
_EXCEPTIONS: Mapping[int, type[errors.CXLKVError]] = {
    lib.CXLKV_E_NOT_A_POOL: errors.NotAPoolError,
    lib.CXLKV_E_VERSION: errors.VersionError,
    lib.CXLKV_E_GEOMETRY: errors.GeometryError,
    lib.CXLKV_E_CORRUPT: errors.CorruptError,
    lib.CXLKV_E_TRUNCATED: errors.TruncatedError,
    lib.CXLKV_E_POOL_EXISTS: errors.PoolExistsError,
    lib.CXLKV_E_POOL_FULL: errors.PoolFullError,
    lib.CXLKV_E_STALE: errors.StaleError,
    lib.CXLKV_E_CLOSED: errors.ClosedError,
    lib.CXLKV_E_RELEASED: errors.ReleasedError,
    lib.CXLKV_E_ORDER: errors.OrderError,
    lib.CXLKV_E_UNEVEN: errors.UnevenError,
    lib.CXLKV_E_POISON: errors.PoisonError,
    lib.CXLKV_E_BUSY: errors.BusyError,
    lib.CXLKV_E_TIMEOUT: errors.LockTimeoutError,
    lib.CXLKV_E_PROCESSES: errors.BusyError,
    lib.CXLKV_E_ARGUMENT: errors.BadArgumentError,
    lib.CXLKV_E_FENCED: errors.FencedError,
    lib.CXLKV_E_HOST: errors.HostError,
    lib.CXLKV_E_WORKER: errors.WorkerError,
    errno.ETIMEDOUT: errors.PeerError,
    errno.ECANCELED: errors.PeerError,
    errno.ENOENT: errors.PoolMissingError,
    errno.ENOMEM: errors.MemoryShortError,
    errno.ENOSPC: errors.MemoryShortError,
}
E_ROOM: int = -lib.CXLKV_E_ROOM
E_STALE: int = -lib.CXLKV_E_STALE
E_CORRUPT: int = -lib.CXLKV_E_CORRUPT
E_GEOMETRY: int = -lib.CXLKV_E_GEOMETRY
E_BUSY: int = -lib.CXLKV_E_BUSY
HASH_BYTES = 16
VISIBILITY_MODES = ("coherent", "fast", "strict")  # by the core's number
_BYTES = ffi.typeof("uint8_t *")

Handle = Any  # a cffi pointer to an opaque struct of the core
Made = TypeVar("Made")


def check(code: int) -> int:
    """`code` if it is >= 0, else the exception that its number stands for."""
    if code >= 0:
        return code
    raise error_of(code, lib.cxlkv_error_text())


def error_of(code: int, text: Any) -> errors.CXLKVError:
    """The exception that a negative code stands for; text: what the core says of it."""
    said = ffi.string(text).decode(errors="replace")
    return _EXCEPTIONS.get(-code, errors.SystemCallError)(said)


def checked(call: Callable[..., int]) -> Callable[..., int]:
    """A function of the core as it is, but that raises what a negative code stands for."""

    def checks(*arguments: Any) -> int:
        code = call(*arguments)
        return code if code >= 0 else check(code)

    return checks


def new_place(kind: str, destroy: Any, size: int = 0) -> Any:
    """Where a call of the core puts the object that it makes: a pointer, NULL before.

    It has its destructor before the call. An interrupt (Ctrl-C) may come behind any bytecode: were
    the pointer taken out first and given a destructor then, one in between would leave an object
    that nobody can release. The destructor is a function of the core, in which none can come.
    """
    return ffi.gc(ffi.new(kind), destroy, size)


def handle_of(place: Any) -> Handle:
    """The object at a place, which lives as long as the handle, or until ffi.release().

    The handle's destructor is a comparison: it does nothing, and belongs to the place, which is so
    kept for as long as the handle. (Of what does nothing and holds a reference it is the fastest.)
    """
    return ffi.gc(place[0], place.__eq__)


def made(kind: str, destroy: Any, make: Callable[..., int], *arguments: Any) -> Handle:
    """What a function of the core makes and gives back by its last argument."""
    out = new_place(kind, destroy)
    code = make(*arguments, out)
    return handle_of(out) if code >= 0 else check(code)


def keep(into: list[Made], make: Callable[..., Made], *arguments: Any) -> None:
    """into.append(make(*arguments)), of a function in C: no interrupt comes between the two.

    Python asks for signals between bytecodes, and this is one call. A caller that looks into the
    list in a `finally` knows whether something was made that is to be given back.
    """
    into.extend(map(make, *((argument,) for argument in arguments)))


def with_capacity(fill: Callable[[int], tuple[Made, int]], capacity: int = 0) -> Made:
    """Call fill(capacity) with more and more until it is enough: what it reads may grow in between.
    It returns what it made, and the capacity for all of it."""
    while True:
        found, wanted = fill(capacity)
        if wanted <= capacity:
            return found
        capacity = wanted + wanted // 8


def version() -> str:
    """The version of the C core."""
    return str(ffi.string(lib.cxlkv_version()).decode())


def isa() -> str:
    """The instruction set that scoring uses now: "serial", "avx2", "avx512_bf16", "neon" ..."""
    name = ffi.new("const char **")
    check(lib.cxlkv_isa(ffi.NULL, name))
    return str(ffi.string(name[0]).decode())


def isa_force(name: str) -> None:
    """Force one of them for this process, or "auto"; raises UnsupportedError when CPU or build lack
    it, BadArgumentError when there is none of that name."""
    code = lib.cxlkv_isa(name.encode(), ffi.NULL)
    if code == -errno.ENOTSUP:
        raise errors.UnsupportedError(ffi.string(lib.cxlkv_error_text()).decode())
    check(code)


def crc32c(data: bytes | npt.NDArray[np.uint8], crc: int = 0) -> int:
    """CRC32C (Castagnoli) of `data`, continuing from `crc`."""
    buffer = ffi.from_buffer(data)
    return int(lib.cxlkv_crc32c(crc, buffer, len(buffer)))


Numbers = Callable[[Handle], dict[str, int]]


def numbers_from(kind: str, fill: Callable[..., int], *arguments: Any) -> dict[str, int]:
    """Numbers of a struct that a function of the core fills, its last argument."""
    got = ffi.new(kind)
    check(fill(*arguments, got))
    return numbers_of(got[0])


def numbers_of(struct: Any, prefix: str = "") -> dict[str, int]:
    names = _number_names(ffi.typeof(struct), prefix)
    return {name: int(getattr(struct, field)) for name, field in names}


@cache
def _number_names(kind: Any, prefix: str) -> list[tuple[str, str]]:
    """Keys and fields: cffi makes its list of fields anew each time, as slowly as all the rest."""
    fields = [name for name, field in kind.fields if field.type.kind == "primitive"]
    return [(prefix + name, name) for name in fields if name != "reserved"]


def state_folder() -> int:
    """A descriptor of this user's folder of host states, which other users cannot enter."""
    return int(check(lib.cxlkv_state_folder()))


def dtype_of(struct: str) -> np.dtype[np.void]:
    """The numpy dtype of a struct of the core: its names, its offsets."""
    rows = ((name, field, field.type) for name, field in ffi.typeof(struct).fields)
    names, formats, offsets = [], [], []
    for name, field, kind in rows:
        count = (kind.length,) if kind.kind == "array" else ()
        cell = kind.item if count else kind
        names.append(name)
        formats.append((f"{cell.cname[0]}{ffi.sizeof(cell)}", count))
        offsets.append(field.offset)
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": ffi.sizeof(struct)}
    )


def view_of(
    address: int, size: int, kept: tuple[object, ...]
) -> tuple[memoryview, weakref.ref[object]]:
    """A view of memory that lasts as long as `kept` does, and a weak reference to its buffer."""
    # As handle_of() does: it compares two pointers with a third, when the memory has no view left.
    memory = ffi.buffer(ffi.gc(ffi.cast(_BYTES, address), kept.__contains__), size)
    return memoryview(memory), weakref.ref(memory)


def flat(kind: str, array: npt.NDArray[Any], writable: bool = False) -> Any:
    return ffi.from_buffer(f"{kind}[]", array, writable)


def int32s(array: npt.NDArray[np.int32], writable: bool = False) -> Any:
    return ffi.from_buffer("int32_t[]", array, writable)


def int64s(array: Units, writable: bool = False) -> Any:
    return ffi.from_buffer("int64_t[]", array, writable)


def word_wait(address: int, old: int, timeout_s: float) -> tuple[bool, int]:
    """Waits for another value than `old` at an address that stays mapped: (whether it came, it)."""
    found = ffi.new("int64_t *")
    word = ffi.cast("int64_t *", address)
    return check(lib.cxlkv_word_wait(word, old, timeout_s, found)) == 1, int(found[0])


def word_store(address: int, value: int) -> None:
    """Stores it after all that was written before."""
    check(lib.cxlkv_word_store(ffi.cast("int64_t *", address), value))
