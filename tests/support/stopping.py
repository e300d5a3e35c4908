"""Stops a child process and waits until it is stopped."""

from __future__ import annotations

import os
import signal
from subprocess import Popen


def stop(process: Popen[str] | Popen[bytes]) -> None:
    """SIGSTOP, until the kernel says so: until then one of its threads may still answer."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
