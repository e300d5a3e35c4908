"""The exceptions of cxlkv. Each is also the builtin that a caller would expect."""

from __future__ import annotations


class CXLKVError(Exception):
    """Root of all errors that cxlkv raises on purpose; the text names cause and remedy.

    good: of Batch.fetch_blocks(), how many blocks of each sequence are right, from the first on.
    appended: of Batch.decode(), whether the step's tokens are there all the same.
    """

    good: tuple[int, ...] = ()
    appended: bool = False


class BadArgumentError(CXLKVError, ValueError):
    """An argument has a wrong value, shape, dtype or layer; nothing was changed."""


class UnsupportedError(CXLKVError, NotImplementedError):
    """The request is well formed, but this release, build or machine cannot serve it."""


class NotAPoolError(CXLKVError, ValueError):
    """The file is not a cxlkv pool."""


class VersionError(CXLKVError, ValueError):
    """The pool, or a peer, has another version than this build understands."""


class GeometryError(CXLKVError, ValueError):
    """The layout and the capacity, or a pool and what was asked for, do not fit each other."""


class CorruptError(CXLKVError, RuntimeError):
    """Bytes in the pool are not what was written: a CRC is wrong."""


class TruncatedError(CXLKVError, EOFError):
    """The pool's file is shorter than its superblock says."""


class PoolExistsError(CXLKVError, FileExistsError):
    """Something lies at the path already; it is not overwritten unless forced."""


class PoolMissingError(CXLKVError, FileNotFoundError):
    """There is no file at the path."""


class PoolFullError(CXLKVError, MemoryError):
    """Not enough free pages; nothing was written, all other sequences go on."""


class QuotaError(CXLKVError, MemoryError):
    """A tenant may have no more pages published, and those that it has are in use."""


class MemoryShortError(CXLKVError, MemoryError):
    """The machine, the file system or a limit does not have the memory that was asked for."""


class StaleError(CXLKVError, LookupError):
    """A handle or hit names pages that were freed since, or its lease has ended."""


class ClosedError(CXLKVError, ValueError):
    """The pool was closed."""


class ReleasedError(CXLKVError, ValueError):
    """The sequence was released."""


class OrderError(CXLKVError, ValueError):
    """A layer was appended ahead of the layer before it."""


class UnevenError(CXLKVError, ValueError):
    """The layers of a sequence have different lengths: a step is half done."""


class PoisonError(CXLKVError, OSError):
    """The pool's memory failed under an access (poison, truncation); its pages were retired."""


class BusyError(CXLKVError, BlockingIOError):
    """Other processes use the pool in a way that excludes the request."""


class LockTimeoutError(CXLKVError, TimeoutError):
    """The pool's lock did not come free in bounded time."""


class HostError(CXLKVError, ConnectionRefusedError):
    """Another machine uses this host's number in the pool."""


class FencedError(CXLKVError, ConnectionAbortedError):
    """This host was declared dead by another while it ran; what it published is still there."""


class PeerError(CXLKVError, ConnectionError):
    """The other host did not come, went silent, or gave up."""


class SecretError(CXLKVError, PermissionError):
    """The peer does not know the secret, or the file that holds it is not fit to be one."""


class RdmaError(CXLKVError, OSError):
    """There is no RDMA device to use, or it does not register the memory; the text has a remedy."""


class WorkerError(CXLKVError, ConnectionError):
    """The worker near the memory is not there, died, was too slow, or has no slot free."""


class GpuError(CXLKVError, RuntimeError):
    """The CUDA driver refused a call, or a kernel failed; the text names it and a remedy."""


class GpuMemoryError(GpuError, MemoryError):
    """The GPU, or the driver for it, does not have the memory that was asked for."""


class RegistrationError(GpuError):
    """The driver does not register the pool's memory: read it through cxlkv.gpu.staging."""


class ColdError(CXLKVError, OSError):
    """The cold tier's file cannot be made, opened or written; the text says what mends it."""


class DiskFullError(ColdError):
    """There is no room on the disk for the file that was asked for."""


class NotAColdFileError(ColdError, ValueError):
    """Something else lies at the path; it was not changed."""


class SystemCallError(CXLKVError, OSError):
    """The operating system refused; the text says what and why."""


class PlacementWarning(UserWarning):
    """Pages of a pool are not on the NUMA nodes that it is bound to; they are as right as ever."""
