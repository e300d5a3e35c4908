"""Commands that run until they are stopped serve metrics, a pool's NDP worker, or a pool."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from cxlkv.errors import CXLKVError, PoolMissingError, SystemCallError
from cxlkv.machine.topology import probe
from cxlkv.ndp.worker import Choosers, cpus_near, pin, serve, stop_signals
from cxlkv.pool import CXLPool
from cxlkv.stats import find, pool_folders

PORT = 9464  # of a pool's metrics: of those that Prometheus leaves to exporters

PoolFile = Annotated[Path, typer.Argument(help="The pool's file or device.")]


def metrics(
    pools: Annotated[
        list[str] | None,
        typer.Argument(
            help="The pools' files; they may come later. Those that are there now if not given.",
            show_default=False,
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(help="Where to: HOST:PORT; port 0 takes a free one.")
    ] = f"127.0.0.1:{PORT}",
) -> None:
    """Serve Prometheus metrics of pools at /metrics, until Ctrl-C."""
    from cxlkv.ops.metrics import begin, until_stopped
    from cxlkv.transport.wire import parse_address

    address, port = parse_address(listen)
    paths = pools or [each.path for each in find(pool_folders()) if each.state in ("live", "idle")]
    if not paths:
        raise PoolMissingError(
            f"no pool in {' '.join(pool_folders())}: name the file of one that will come: "
            "cxlkv metrics /dev/shm/my.pool"
        )
    with listening(address, port):
        exporter = begin(paths, port, address)
    until_stopped(exporter)


@contextmanager
def listening(address: str, port: int) -> Iterator[None]:
    """Errors of a socket say which address it was, and what helps."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CXLKVError):
            raise
        what = {
            errno.EADDRINUSE: "another program listens there: stop it, or give another "
            f"--listen {address}:{port + 1}",
            errno.EADDRNOTAVAIL: "this machine has no such address: `ip addr` lists those it has",
            errno.EACCES: "ports below 1024 are root's: give one above",
        }.get(error.errno or 0, "is that an address of this machine?")
        number = error.errno or 0
        said = os.strerror(number) if number in errno.errorcode else error.strerror
        raise SystemCallError(f"{address}:{port}: {said or error}: {what}") from error


def ndp_worker(
    pool: PoolFile,
    node: Annotated[
        int | None,
        typer.Option(help="Run on the CPUs of this memory node, or those nearest to it."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads that work: the CPUs it may use if not given.", min=1),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Of docs/methods.md, that it may be asked for: retro,loki=loki.npy")
    ] = "",
) -> None:
    """Select and attend for the processes of a pool, near its memory, until SIGTERM or Ctrl-C.

    They ask for it with CXLPool.open(..., worker=True), and do it themselves while it is away.
    """
    if node is not None:
        pin(cpus_near(probe(), node))
    with CXLPool.open(pool, threads=threads) as opened:
        choose = Choosers(opened._handle, opened.layout, _words(methods))
        serve(opened._handle, lambda line: typer.echo(line), choose=choose)


def _words(methods: str) -> list[str]:
    return [word.strip() for word in methods.split(",") if word.strip()]


def serve_pool(
    pool: PoolFile,
    listen: Annotated[str, typer.Option(help="HOST:PORT of this machine's private network.")],
    secret: Annotated[Path, typer.Option(help="A file of mode 0600 that both sides have.")],
    device: Annotated[
        str | None, typer.Option(help="Also over this RDMA device; `rdma link` lists them.")
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Of docs/methods.md, that peers may ask for: mean,loki=loki.npy")
    ] = "",
) -> None:
    """Let other machines match, read, write and select in a pool, until SIGTERM or Ctrl-C.

    They use cxlkv.transport: docs/explanation/transport.md.
    """
    from cxlkv.transport import Server, read_secret
    from cxlkv.transport.wire import parse_address

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    known, where = read_secret(secret), parse_address(listen)
    with stop_signals() as stopped, CXLPool.open(pool) as opened:
        loaded = _words(methods)
        with listening(*where):
            server = Server(opened, where, known, device=device, methods=loaded)
        with server:
            typer.echo(f"serves {pool} on {server.address[0]}:{server.address[1]}")
            while not stopped:
                time.sleep(0.2)
