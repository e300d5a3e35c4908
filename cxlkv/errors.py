"""The exceptions of cxlkv. Each is also the builtin that a caller would expect."""

from __future__ import annotations

SHOWN_LETTERS_MAX = 60  # of a value that a message repeats


class CXLKVError(Exception):
    """Root of all errors that cxlkv raises on purpose; the text names cause and remedy.

    good: of Batch.fetch_blocks(), how many blocks of each sequence are right, from the first on.
    appended: of Batch.decode(), whether the step's tokens are there all the same.
    """

    good: tuple[int, ...] = ()
    appended: bool = False


def shown(value: object) -> str:
    """Writes a value for a message, never long, in words that YAML, JSON and Python share."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", False: "false", True: "true"}[value]
    text = repr(value) if isinstance(value, (str, list, dict)) else str(value)
    return text if len(text) <= SHOWN_LETTERS_MAX else text[:SHOWN_LETTERS_MAX] + "..."


def state_of(error: CXLKVError) -> str:
    """The state of what raised it, in a word, for a repr: closed, released, fenced, stale."""
    return type(error).__name__.removesuffix("Error").lower()


class BadArgumentError(CXLKVError, ValueError):
    """An argument has a wrong value, shape, dtype or layer; nothing was changed.

    Remedy: Correct what the text names; it says what is allowed.
    """


class UnsupportedError(CXLKVError, NotImplementedError):
    """The request is well formed, but this release, build or machine cannot serve it.

    Remedy: The text names what is missing: another version, a build option, a device, or a form
    that works.
    """


class NotAPoolError(CXLKVError, ValueError):
    """The file is not a cxlkv pool.

    Remedy: Check the path. To put a pool there, create(force=True) overwrites what it is.
    """


class VersionError(CXLKVError, ValueError):
    """The pool, or a peer, has another version than this build understands.

    Remedy: Use the release that made it, or upgrade both ends: docs/reference/releases.md says
    which release reads which version.
    """


class GeometryError(CXLKVError, ValueError):
    """The layout does not fit the capacity, or the pool was made with another layout.

    Remedy: Open the pool with the layout and capacity it was made with, or make another one;
    `cxlkv pool remove` removes an unused pool first.
    """


class CorruptError(CXLKVError, RuntimeError):
    """Bytes in the pool are not what was written: a CRC is wrong.

    Remedy: Compute what was stored again; engines do so by themselves. `cxlkv pool check
    --deep` finds all damage in a pool. If more comes, test the memory.
    """


class TruncatedError(CXLKVError, EOFError):
    """The pool's file is shorter than its superblock says.

    Remedy: Something cut the file short, or a copy of it was not finished. Remove it, and make
    the pool again.
    """


class PoolExistsError(CXLKVError, FileExistsError):
    """Something lies at the path already; it is not overwritten unless forced.

    Remedy: Open the pool; or give another path, replace=True for an unused pool, or force=True
    for a file that is no pool.
    """


class PoolMissingError(CXLKVError, FileNotFoundError):
    """There is no file at the path.

    Remedy: Check the path, or make the pool (CXLPool.create).
    """


class PoolFullError(CXLKVError, MemoryError):
    """Not enough free pages; nothing was written, all other sequences go on.

    Remedy: Release sequences, unpin or forget prefixes, add a cold tier so that pages make room
    by themselves, or make a larger pool (`cxlkv pool top` shows who holds what).
    """


class QuotaError(CXLKVError, MemoryError):
    """A tenant may have no more pages published, and those that it has are in use.

    Remedy: Raise the quota, or let fewer of the tenant's requests run at once.
    """


class MemoryShortError(CXLKVError, MemoryError):
    """The machine, the file system or a limit does not have the memory that was asked for.

    Remedy: The text names which. Make the pool smaller, raise the limit (`ulimit -l`, the
    container's memory, the size of /dev/shm), or free memory; `cxlkv doctor` says what there
    is.
    """


class StaleError(CXLKVError, LookupError):
    """A handle or hit names pages that were freed since, a page was freed while it was read, or a
    lease has ended.

    Remedy: Match the prefix, or make the handle, anew.
    """


class ClosedError(CXLKVError, ValueError):
    """The pool was closed.

    Remedy: Use the pool inside its `with`, or open it again.
    """


class ReleasedError(CXLKVError, ValueError):
    """The sequence was released.

    Remedy: Fork or adopt before the release, if the pages are wanted after it.
    """


class OrderError(CXLKVError, ValueError):
    """A layer was appended ahead of the layer before it.

    Remedy: Append each step's tokens to layer 0 first, then to the next.
    """


class UnevenError(CXLKVError, ValueError):
    """The layers of a sequence have different lengths: a step is half done.

    Remedy: Append the step's tokens to the layers that lack them.
    """


class PoisonError(CXLKVError, OSError):
    """The pool's memory failed under an access (poison, truncation); its pages were retired.

    Remedy: Pages elsewhere are good. Release the sequence and compute it again; look for memory
    errors in the kernel's log, and at docs/explanation/failures.md.
    """


class BusyError(CXLKVError, BlockingIOError):
    """Other processes use the pool in a way that excludes the request.

    Remedy: Close the pool in the other processes (`cxlkv pool top` names them), or try again
    when they are done.
    """


class LockTimeoutError(CXLKVError, TimeoutError):
    """The pool's lock did not come free in bounded time.

    Remedy: Try again. If it goes on, a process is stopped (SIGSTOP, a debugger) while it has
    the lock: let it go on, or end it.
    """


class HostError(CXLKVError, ConnectionRefusedError):
    """Another machine uses this host's number in the pool.

    Remedy: Give each machine a number of its own, or host="auto".
    """


class FencedError(CXLKVError, ConnectionAbortedError):
    """This host was declared dead by another while it ran; what it published is still there.

    Remedy: Close the pool, open it again, and match what is needed; engines do so by
    themselves. If the host was only slow, raise lease_s.
    """


class PeerError(CXLKVError, ConnectionError):
    """The other host did not come, went silent, or gave up.

    Remedy: Check that the other side runs, its address, and the network between; then try
    again. Engines compute instead.
    """


class SecretError(CXLKVError, PermissionError):
    """The peer does not know the secret, or the file that holds it is not fit to be one.

    Remedy: Give both sides the same secret, in a file of mode 0600 that belongs to its user.
    """


class RdmaError(CXLKVError, OSError):
    """There is no RDMA device to use, or it does not register the memory.

    Remedy: The text names it. `rdma link` lists devices, `ulimit -l` must allow the size of the
    pool; TCP needs no device (tcp://HOST:PORT).
    """


class WorkerError(CXLKVError, ConnectionError):
    """The worker near the memory is not there, died, was too slow, or has no slot free.

    Remedy: Start `cxlkv ndp-worker`, or leave the worker out: what it was to do is then done
    here.
    """


class GpuError(CXLKVError, RuntimeError):
    """The CUDA driver refused a call, or a kernel failed; the text names it.

    Remedy: The text has it. `nvidia-smi` says whether the GPU is there and in order.
    """


class GpuMemoryError(GpuError, MemoryError):
    """The GPU, or the driver for it, does not have the memory that was asked for.

    Remedy: Use fewer hot pages, requests or pages_max, or a GPU with more free memory.
    """


class RegistrationError(GpuError):
    """The driver does not register the pool's memory for the GPU.

    Remedy: Read it through cxlkv.gpu.staging.
    """


class ColdError(CXLKVError, OSError):
    """The cold tier's file cannot be made, opened or written.

    Remedy: The text has it: mostly the path, a permission, or the disk.
    """


class DiskFullError(ColdError):
    """There is no room on the disk for the file that was asked for.

    Remedy: Free space there, or give a smaller cold_capacity or another disk.
    """


class NotAColdFileError(ColdError, ValueError):
    """Something else lies at the path; it was not changed.

    Remedy: Give another path, or remove what lies there.
    """


class SystemCallError(CXLKVError, OSError):
    """The operating system refused; the text says what and why.

    Remedy: Change what it names: mostly a permission, a limit, or a path.
    """


class PlacementWarning(UserWarning):
    """Pages of a pool are not on the NUMA nodes that it is bound to; they are as right as ever.

    Remedy: Turn off what moved them (/sys/kernel/mm/numa/demotion_enabled, a cpuset,
    migratepages); make the pool anew to have it on other nodes: docs/how-to/placement.md.
    """
