"""Reads, writes and scores in a pool of another machine: docs/explanation/transport.md."""

from cxlkv.transport.client import Remote, RemoteHit
from cxlkv.transport.server import Server
from cxlkv.transport.transfer import Moved, pull, push
from cxlkv.transport.wire import read_secret

__all__ = ["Moved", "Remote", "RemoteHit", "Server", "pull", "push", "read_secret"]
