"""The store door of a pool of objects: put, get, read ranges and lease by key, in batches.

A key is the name of an object, text or bytes, under which every process of the pool finds it. What
is stored is its hash: BLAKE2s of root(salt) + name, 16 bytes, person=b"cxlkvobj" (RFC 7693). An
object never changes: put(replace=True) stores another one under its key.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from cxlkv import _core, _io_hooks
from cxlkv._core import reclaim
from cxlkv.arrays import Addresses, Sizes, address_of, is_torch, memory_of, values_of
from cxlkv.errors import BadArgumentError, CorruptError, ReleasedError
from cxlkv.layout import DTYPES, ENCODINGS, dtype_name, format_bytes
from cxlkv.machine.lifetime import Closing
from cxlkv.numbers import array_of, is_whole
from cxlkv.pool.base import Pool
from cxlkv.prefix import PageKey, PageKeys, key_hashes, root

if TYPE_CHECKING:
    import torch

ABSENT, DAMAGED, HELD = _core.ABSENT, _core.DAMAGED, _core.HELD
"""In place of a size: no object has this key; its bytes are not what was put, or cannot be read:
then forget() it, and it can be put again; of admin.remove_objects(): somebody reads or leases
it."""

Keys = Iterable[str | bytes]


class RowForm(NamedTuple):
    """A buffer of rows, of `dim` channels of dtype each, one behind the other, that objects keep
    encoded, as KVLayout.k_encoding says: "int8", "int4" or "fp8_e4m3". Rows that are got are what
    is kept, in dtype."""

    encoding: str
    dtype: str
    dim: int

    def stored_bytes(self, size: int) -> int:
        """What a buffer of so many bytes takes in an object. Raises BadArgumentError for what is no
        whole number of rows, and for forms that there are not."""
        if not is_whole(size):
            raise BadArgumentError(f"rows of {size!r:.40} bytes: a whole number, 0 or more")
        return _core.row_form_bytes(*self.codes(), size)

    def codes(self) -> tuple[int, int, int]:
        """The form's codes in the core. Raises BadArgumentError."""
        if self.encoding not in ENCODINGS:
            raise BadArgumentError(f"encoding {self.encoding!r}: objects keep rows as {KEPT_AS}")
        if not is_whole(self.dim, 1, 2**32 - 1):
            raise BadArgumentError(f"rows of {self.dim!r:.40} channels: a whole number, above 0")
        return ENCODINGS.index(self.encoding), DTYPES.index(dtype_name(self.dtype)), self.dim


KEPT_AS = "int8, int4 or fp8_e4m3"


class Buffers(NamedTuple):
    """Memory of several objects by its addresses, for engines that know them: nothing is checked.

    addresses and sizes in bytes are integers [m]; of object i are those from starts[i] to
    starts[i + 1], one behind the other; None: one each. forms: how the first buffers of each object
    are encoded, in order; the others' bytes stay as they are. To get an object its buffers, so
    encoded, must have its size exactly.
    """

    addresses: npt.ArrayLike
    sizes: npt.ArrayLike
    starts: npt.ArrayLike | None = None
    forms: Sequence[RowForm] = ()

    def stored_bytes(self) -> npt.NDArray[np.int64]:
        """[m]: what each buffer takes in its object. Raises BadArgumentError."""
        sizes = np.asarray(self.sizes, np.int64)
        stored = sizes.copy()
        starts = np.arange(len(sizes) + 1) if self.starts is None else np.asarray(self.starts)
        for place, form in enumerate(self.forms):
            its = starts[:-1][np.diff(starts) > place] + place
            for size in np.unique(sizes[its]):
                stored[its[sizes[its] == size]] = form.stored_bytes(int(size))
        return stored


def object_keys(names: Iterable[str | bytes], salt: bytes = b"") -> PageKeys:
    """Keys of objects, hashed at once, for calls that take keys; salt keeps tenants apart."""
    given = list_of_keys(names)
    try:
        joined = "".join(cast("list[str]", given)).encode("ascii")
    except (TypeError, UnicodeEncodeError):  # bytes among them, or letters of several bytes
        joined, given = _encoded(given)
    ends = np.fromiter(accumulate(map(len, given)), np.uint64, len(given))
    return PageKeys(_core.object_keys(joined, ends, root(salt)), 1)


class ObjectPool(Pool, stores="objects"):
    """Whole objects in far memory, put and got by their keys, by any number of processes."""

    def _hashes(self, keys: Keys, strict: bool) -> bytes:
        return hashes_of(keys)

    def _holds(self, pages: int, parts: int) -> str:
        return ""  # an object has a page

    def put(self, key: str | bytes, buffers: object, *, replace: bool = False) -> bool:
        """Store one object; False when its key is there already, whose bytes stay.

        buffers: one, or a list whose bytes are joined; anything contiguous in the CPU's memory
        (bytes, a numpy array, a torch tensor). replace: in place of one that is there, once it is
        whole: who reads the old one, or has a lease, keeps it; the new one has its pin and its
        priority. Room for both is needed. Raises PoolFullError, BadArgumentError.
        """
        return bool(self.put_batch([key], [buffers], replace=replace)[0])

    def get_into(self, key: str | bytes, buffers: object) -> int | None:
        """Copy an object to buffers that are at least as large; returns its bytes, None: absent.

        Every byte is verified in a pool with checksums. Raises CorruptError, BadArgumentError.
        """
        size = int(self.get_batch_into([key], [buffers])[0])
        if size == DAMAGED:
            raise CorruptError(
                f"the object {key!r} is not what was put: forget() it and put it again"
            )
        return None if size == ABSENT else size

    def put_batch(
        self, keys: Keys, buffers: Buffers | Sequence[object], *, replace: bool = False
    ) -> npt.NDArray[np.bool_]:
        """put() of several in one call: bool [n], which are new. All of them fit or none.

        buffers: for each key what put() takes, or Buffers.
        """
        hashes = hashes_of(keys)
        given, kept = _memory(buffers, len(hashes) // _core.HASH_BYTES, False)
        transfer = _io_hooks.begin(self._handle) if _io_hooks.subscriber else None
        size = _core.HASH_BYTES
        codes = reclaim.retry(
            lambda: _core.objects_put(self._handle, hashes, given, replace),
            self._handle,
            lambda: self._slots(
                given, {hashes[at : at + size]: at // size for at in range(0, len(hashes), size)}
            ),
        )
        new: npt.NDArray[np.bool_] = codes == 0
        del kept
        if transfer:
            transfer.end("append", _moved(buffers, given, new))
        return new

    def _slots(self, memory: _core.Memory, objects: Mapping[bytes, int]) -> int:
        """How many the objects take: their places in `memory`, by key."""
        if self.layout.object_limit is None:
            return len(objects)
        sizes = sums_of(memory.sizes, memory.starts)[list(objects.values())]
        return int((-(-sizes // self.layout.page_tokens)).sum())

    def get_batch_into(self, keys: Keys, buffers: Buffers | Sequence[object]) -> Sizes:
        """get_into() of several: int64 [n], the bytes of each object, ABSENT or DAMAGED.

        All memory given for a damaged one is zeros. Nothing is copied when one does not fit:
        BadArgumentError.
        """
        hashes = hashes_of(keys)
        given, kept = _memory(buffers, len(hashes) // _core.HASH_BYTES, True)
        transfer = _io_hooks.begin(self._handle) if _io_hooks.subscriber else None
        sizes = _core.objects_get(self._handle, hashes, given)
        del kept
        if transfer:
            transfer.end("fetch", int(sizes[sizes > 0].sum()))
        return sizes

    def get_ranges(self, keys: Keys, ranges: npt.ArrayLike, out: object) -> Sizes:
        """Copy parts of objects: ranges is whole numbers [m, 4], of each the index of its key, the
        offset in the object, bytes, and the offset in `out`.

        Returns int64 [m]: the bytes, ABSENT or DAMAGED. In a pool with checksums an object is
        verified whole when this process reads it first. Raises BadArgumentError for what lies
        outside of an object or of `out`.
        """
        wanted = np.ascontiguousarray(_numbers(ranges, "ranges"))
        if not wanted.size:
            wanted = wanted.reshape(0, 4)
        if wanted.ndim != 2 or wanted.shape[1] != 4:
            raise BadArgumentError(f"ranges of shape {wanted.shape}: [m, 4] is wanted")
        address, size, kept = _place(out, True)
        transfer = _io_hooks.begin(self._handle)
        sizes = _core.objects_ranges(self._handle, hashes_of(keys), wanted, address, size)
        del kept
        if transfer:
            transfer.end("fetch", int(sizes[sizes > 0].sum()))
        return sizes

    def object_sizes(self, keys: Keys) -> Sizes:
        """int64 [n]: the bytes of each object, ABSENT or DAMAGED; no use of it is counted."""
        return _core.objects_sizes(self._handle, hashes_of(keys))

    def chain(self, keys: Keys) -> int:
        """Say that these objects follow each other in a text, from its beginning or any part of it;
        how many of them are there.

        Each is of use only with all before it. So tiers evict a text's end before its beginning,
        and take who gets one as if all before it were got, too. It is said of objects that are
        there: after they were put, or came back; of a text that is put in several calls with the
        last object of the call before at first. What was said of an object ends with it.
        """
        return _core.objects_chain(self._handle, hashes_of(keys))

    def lease(self, keys: Keys) -> Lease:
        """Hold objects, to read them where they lie; each is verified first. One in several slots
        is held as well, but has no view: get_into() copies it."""
        hashes = hashes_of(keys)
        transfer = _io_hooks.begin(self._handle)
        lease = Lease(self._handle, *_core.lease_take(self._handle, hashes))
        if transfer:  # each byte is read once, here or where it lies
            transfer.end("fetch", int(lease.sizes[lease.sizes > 0].sum()))
        return lease

    def reserve(self, sizes: npt.ArrayLike) -> Reserved:
        """Memory for objects of these sizes, each of one slot, to be written where it lies, and
        then published.

        All or none: PoolFullError.
        """
        wanted = _numbers(sizes, "sizes")
        if wanted.ndim != 1:
            raise BadArgumentError(f"sizes of shape {wanted.shape}: [n] is wanted")
        handle, addresses = reclaim.retry(
            lambda: _core.lease_reserve(self._handle, wanted), self._handle, lambda: len(wanted)
        )
        return Reserved(self._handle, handle, addresses, wanted.astype(np.int64))


class _Leased(Closing):
    """Objects that this process holds. They lie in the pool's memory until they are released, or
    the process ends: a pool with leases refuses close().

    views: of each its memory, or None; whoever keeps a view keeps the lease, and the pool open.
    After release() a view raises ValueError. What was made of it (a slice, an array) still shows
    the object as it is: pages of which there is something then are given back when the last of all
    that was made of this lease's views is gone.
    """

    _instead = "pass the keys on, and lease() them there"

    _writable = False

    def __init__(
        self,
        pool: _core.Handle,
        handle: _core.Handle,
        addresses: Addresses,
        sizes: Sizes,
    ):
        self._pool = pool
        self._handle: _core.Handle | None = handle  # None: the views have it
        self.sizes = sizes
        self.addresses = addresses
        self._published: set[int] = set()
        self._returned: set[int] = set()
        self._views: list[memoryview | None] | None = None  # made when they are asked for
        self._memory: list[weakref.ref[object] | None] = []

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        there = int((self.sizes >= 0).sum())
        count = f"{there:,}" if there == len(self) else f"{there:,} of {len(self):,}"
        parts = [f"{count} objects ({format_bytes(int(self.sizes.clip(0).sum()))})"]
        if damaged := int((self.sizes == DAMAGED).sum()):
            parts.append(f"{damaged:,} damaged")
        if self._published:
            parts.append(f"{len(self._published):,} published")
        back = len(self._returned)
        parts.append("held" if not back else "released")
        if 0 < back < len(self):
            parts[-1] = f"{back:,} released"
        return f"<{type(self).__name__}: {', '.join(parts)}>"

    @property
    def views(self) -> list[memoryview | None]:
        if self._views is None:
            if self._handle is None:
                return [None] * len(self)
            places = list(zip(self.addresses.tolist(), self.sizes.tolist(), strict=True))
            if apart := [index for index, (at, size) in enumerate(places) if size > 0 and not at]:
                raise BadArgumentError(
                    f"object {apart[0]} of this lease, {places[apart[0]][1]} bytes, lies in "
                    "several slots, so it has no view. get_into() copies it"
                )
            for index in self._returned:
                places[index] = (0, 0)
            made = _core.lease_views(self._pool, self._handle, places, self._writable)
            self._views, self._memory = made
            self._no_writing()
        return self._views

    def _no_writing(self) -> None:
        """Through views of what is published; an array that was made of one still could."""
        if self._views is not None:
            for index in self._published:
                view = self._views[index]
                if view is not None and not view.readonly:
                    self._views[index] = view.toreadonly()
                    _end(view)

    def _is_seen(self, index: int) -> bool:
        """Whether somebody has a view of it, when this object has none."""
        memory = self._memory[index] if self._memory else None
        return memory is not None and memory() is not None

    def release(self) -> None:
        """Give all back; a second time does nothing."""
        self._returned.update(range(len(self)))
        for view in self._views or ():
            _end(view)
        self._views = None
        if self._handle is None:
            return
        if not any(memory is not None and memory() is not None for memory in self._memory):
            _core.lease_release(self._handle, None)
            return
        unseen = [index for index in range(len(self)) if not self._is_seen(index)]
        _core.lease_release(self._handle, np.array(unseen, np.uint32))
        self._handle = None

    def release_one(self, index: int) -> None:
        """Give one back; a second time does nothing."""
        place = range(len(self))[index]
        self._returned.add(place)
        if self._views is not None:
            _end(self._views[place])
            self._views[place] = None
        if self._handle is not None and not self._is_seen(place):
            _core.lease_release(self._handle, np.array([place], np.uint32))

    close = release


class Lease(_Leased):
    """Objects that are read where they lie. sizes: int64 [n], ABSENT or DAMAGED where there is
    none; addresses: uint64 [n], 0 there; views are read-only."""


class Reserved(_Leased):
    """Memory reserved for objects: write to its views; no lookup finds them yet."""

    _writable = True

    def publish(self, keys: Keys, places: Sequence[int] | None = None) -> npt.NDArray[np.bool_]:
        """Make objects of what was written; bool [n], which are new, as put() says.

        places: which ones, as keys go; None: all. Their bytes must not change from now on: readers
        verify them. So `views` has them read-only then; an array that was made of a view before can
        still write, and must not. They stay held until they are released. Raises ReleasedError for
        places that were given back.
        """
        given = range(len(self)) if places is None else places
        chosen = _numbers(given, "places")
        hashes = hashes_of(keys)
        if len(hashes) != len(chosen) * _core.HASH_BYTES:
            raise BadArgumentError(
                f"{len(hashes) // _core.HASH_BYTES} keys for {len(chosen)} places"
            )
        if len(chosen) and not chosen.max() < len(self):
            raise BadArgumentError(f"places {chosen.tolist()} of {len(self)}")
        given_back = self._returned.intersection(chosen.tolist())
        if given_back or self._handle is None:
            raise ReleasedError(
                f"place {min(given_back, default=0)} of a reservation of {len(self)} was given back"
            )
        transfer = _io_hooks.begin(self._pool)
        codes = _core.lease_publish(self._handle, np.ascontiguousarray(chosen, np.uint32), hashes)
        new: npt.NDArray[np.bool_] = codes == 0
        self._published.update(chosen[new].tolist())
        self._no_writing()
        if transfer:
            transfer.end("append", int(self.sizes[chosen[new].astype(np.int64)].sum()))
        return new


def _end(view: memoryview | None) -> None:
    """End a view: it raises from now on, unless an array was made of it, which still reads by
    it."""
    if view is not None:
        # contextlib.suppress would take three times as long as the rest.
        try:  # noqa: SIM105
            view.release()
        except BufferError:
            pass


# ---- what callers give ----


def list_of_keys(keys: Keys) -> list[str | bytes]:
    """Raises BadArgumentError for what is none."""
    if not isinstance(keys, Iterable):
        raise BadArgumentError(f"keys are a list of text or bytes, not {type(keys).__name__}")
    return list(keys)


def hashes_of(keys: Keys) -> bytes:
    """Hashes of names, 16 bytes each, joined; object_keys() are hashes already."""
    if isinstance(keys, (str, bytes)):
        raise BadArgumentError("one key where several are wanted: put it into a list")
    if isinstance(keys, PageKeys):
        return key_hashes(keys)
    given = list_of_keys(keys)
    if any(isinstance(key, PageKey) for key in given):  # of object_keys(), taken out one by one
        return b"".join(k if isinstance(k, PageKey) else hashes_of((k,)) for k in given)
    return object_keys(given).packed.tobytes()


def _encoded(names: list[str | bytes]) -> tuple[bytes, list[str | bytes]]:
    """All in a row, and each of them, as bytes."""
    given = [name.encode() if isinstance(name, str) else name for name in names]
    try:
        return b"".join(given), [*given]
    except TypeError as error:
        raise BadArgumentError(f"keys are text or bytes: {error}") from None


def _numbers(given: npt.ArrayLike, name: str) -> Addresses:
    """Whole numbers, none of them negative."""
    found = array_of(given, name)
    if found.size and (found.dtype.kind not in "iu" or (found < 0).any()):
        raise BadArgumentError(f"{name}: whole numbers from 0 are wanted, not {found.dtype}")
    return found.astype(np.uint64)


def _memory(
    buffers: Buffers | Sequence[object], count: int, writable: bool
) -> tuple[_core.Memory, list[object]]:
    """Memory of so many objects, and what must stay alive meanwhile."""
    if isinstance(buffers, Buffers):
        return _given_memory(buffers, count), []
    if len(buffers) != count:
        raise BadArgumentError(f"buffers of {len(buffers)} objects for {count} keys")
    kept: list[object] = []
    addresses: list[int] = []
    sizes: list[int] = []
    starts = [0]
    for given in buffers:
        if isinstance(given, Buffers):
            raise BadArgumentError("Buffers stand for all objects of a call, not for one of them")
        for one in given if isinstance(given, (list, tuple)) else (given,):
            address, size, held = _place(one, writable)
            addresses.append(address)
            sizes.append(size)
            kept.append(held)
        starts.append(len(addresses))
    ends = None if starts == list(range(count + 1)) else np.array(starts, np.uint64)
    return _core.Memory(np.array(addresses, np.uint64), np.array(sizes, np.uint64), ends), kept


def _given_memory(buffers: Buffers, count: int) -> _core.Memory:
    forms = None
    if buffers.forms:
        forms = np.array([form.codes() for form in buffers.forms], np.uint32)
    addresses = _numbers(buffers.addresses, "addresses")
    sizes = _numbers(buffers.sizes, "sizes")
    if addresses.ndim != 1 or addresses.shape != sizes.shape:
        raise BadArgumentError(
            f"addresses of shape {addresses.shape}, sizes of {sizes.shape}: [m] and [m] are wanted"
        )
    if buffers.starts is None:
        if len(addresses) != count:
            raise BadArgumentError(f"{len(addresses)} buffers for {count} keys, and no starts")
        return _core.Memory(addresses, sizes, None, forms)
    starts = _numbers(buffers.starts, "starts")
    rising = starts.shape == (count + 1,) and bool((starts[1:] >= starts[:-1]).all())
    if not rising or starts[0] != 0 or starts[-1] != len(addresses):
        raise BadArgumentError(
            f"starts {starts.tolist()[:8]}: {count + 1} rising numbers are wanted, from 0 to "
            f"{len(addresses)}"
        )
    return _core.Memory(addresses, sizes, starts, forms)


def _place(given: object, writable: bool) -> tuple[int, int, object]:
    """Address, bytes, and what must stay alive."""
    if is_torch(given):
        return _tensor_place(given, writable)
    if not isinstance(given, np.ndarray):
        try:
            given = np.frombuffer(cast(bytes, given), np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise BadArgumentError(
                f"{type(given).__name__} is no buffer of contiguous bytes: {error}"
            ) from None
    if given.dtype.hasobject:
        raise BadArgumentError("an array of Python objects: of these no bytes can be stored")
    if not given.flags.c_contiguous:
        raise BadArgumentError(f"an array of strides {given.strides}: contiguous memory is wanted")
    if writable and not given.flags.writeable:
        raise BadArgumentError("the buffer is read-only, and is to be written")
    return int(given.__array_interface__["data"][0]), given.nbytes, given


def _tensor_place(tensor: torch.Tensor, writable: bool) -> tuple[int, int, object]:
    if not tensor.is_cpu and not tensor.is_meta:
        raise BadArgumentError(f"the tensor lies on {tensor.device}: bring it to the CPU first")
    if writable and tensor.requires_grad:
        raise BadArgumentError("the tensor requires grad, and is to be written: give it detached")
    if writable:
        address = memory_of(tensor, "the tensor")
    else:
        tensor = values_of(tensor, "the tensor")
        address = address_of(tensor, "the tensor")
    if not tensor.is_contiguous():
        raise BadArgumentError(f"a tensor of strides {tensor.stride()}: contiguous is wanted")
    return address, tensor.nbytes, tensor


def _moved(
    buffers: Buffers | Sequence[object], given: _core.Memory, new: npt.NDArray[np.bool_]
) -> int:
    """Bytes in the pool of the objects that are new."""
    sizes: npt.ArrayLike = given.sizes
    if isinstance(buffers, Buffers) and buffers.forms:
        sizes = buffers.stored_bytes()
    return int(sums_of(sizes, given.starts)[new].sum())


def sums_of(sizes: npt.ArrayLike, starts: npt.ArrayLike | None) -> npt.NDArray[np.int64]:
    """Bytes of each object, of those of its buffers: Buffers.sizes and starts."""
    each = np.asarray(sizes, np.int64)
    if starts is None:
        return each
    sums: npt.NDArray[np.int64] = np.append(0, np.cumsum(each))[np.asarray(starts, np.int64)]
    return np.diff(sums)
