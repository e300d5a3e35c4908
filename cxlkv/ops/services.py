"""Commands that run until they are stopped serve metrics, a pool's NDP worker, or a pool."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Annotated

import typer

from cxlkv.machine.topology import probe
from cxlkv.ndp.worker import cpus_near, pin, serve, stop_signals
from cxlkv.ops.console import HostNumber
from cxlkv.pool import CXLPool


def metrics(
    pools: Annotated[list[str], typer.Argument(help="The pools' files; they may come later.")],
    port: Annotated[int, typer.Option(help="TCP port; 0 takes a free one.", min=0, max=65535)],
    address: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Serve Prometheus metrics of pools at /metrics, until Ctrl-C."""
    from cxlkv.ops.metrics import serve as serve_metrics

    serve_metrics(pools, port, address)


def ndp_worker(
    pool: Annotated[Path, typer.Option(help="The pool's file or device.")],
    node: Annotated[
        int | None,
        typer.Option(help="Run on the CPUs of this memory node, or those nearest to it."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads that work: the CPUs it may use if not given.", min=1),
    ] = None,
    slots: Annotated[int, typer.Option(help="Processes that it serves.", min=1, max=64)] = 8,
    host: HostNumber = None,
) -> None:
    """Select and attend for the processes of a pool, near its memory, until SIGTERM or Ctrl-C.

    They ask for it with CXLPool.open(..., worker=True), and do it themselves while it is away.
    """
    if node is not None:
        pin(cpus_near(probe(), node))
    with CXLPool.open(pool, host=host, threads=threads) as opened:
        serve(opened._handle, lambda line: typer.echo(line), slots=slots)


def serve_pool(
    pool: Annotated[Path, typer.Argument(help="The pool's file or device.")],
    listen: Annotated[str, typer.Option(help="HOST:PORT of this machine's private network.")],
    secret: Annotated[Path, typer.Option(help="A file of mode 0600 that both sides have.")],
    device: Annotated[
        str | None, typer.Option(help="Also over this RDMA device; `rdma link` lists them.")
    ] = None,
    connections: Annotated[int, typer.Option(help="Peers at the same time.", min=1)] = 32,
    host: HostNumber = None,
) -> None:
    """Let other machines match, read, write and select in a pool, until SIGTERM or Ctrl-C.

    They use cxlkv.transport: docs/explanation/transport.md.
    """
    from cxlkv.transport import Server, read_secret
    from cxlkv.transport.wire import parse_address

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    known, where = read_secret(secret), parse_address(listen)
    with (
        stop_signals() as stopped,
        CXLPool.open(pool, host=host) as opened,
        Server(opened, where, known, device=device, connections=connections) as server,
    ):
        typer.echo(f"serves {pool} on {server.address[0]}:{server.address[1]}")
        while not stopped:
            time.sleep(0.2)
