"""A peer's process as the runner sees it: started, asked with a time limit, stopped for good."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from pydantic import BaseModel, ValidationError

HERE = Path(__file__).resolve().parent
OURS = ("ours", "objects", "plain")  # they run in the Python that runs this
LINE_BYTES_MAX = 1 << 20
Kind = TypeVar("Kind", bound=BaseModel)


class ContenderError(Exception):
    """A peer is not there, died, hangs, or gave no answer: the run goes on without it."""


@dataclass(frozen=True)
class Program:
    """How a peer is started. env: what it sees of the environment."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]


def program_of(name: str, environments: Path) -> Program:
    """Raises ContenderError with the reason for a peer that has no environment."""
    if name in OURS:
        return Program(name, (sys.executable, str(HERE), name), dict(os.environ))
    python = environments / name / "bin" / "python"
    failed = environments / f"{name}.failed"
    if failed.is_file():
        raise ContenderError(f"not installed: {failed.read_text(errors='replace').strip()[-300:]}")
    if not (environments / name / ".installed").is_file():
        raise ContenderError(f"no environment in {environments / name}: make build/peers/{name}")
    # What is on our path is for our Python.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return Program(name, (str(python), str(HERE), name), env)


class Conversation:
    """One peer, running. Its processes are a group of their own and end with it."""

    def __init__(self, program: Program, log: Path, limit_s: float) -> None:
        self.name, self.log, self.limit_s = program.name, log, limit_s
        self._unread = b""
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                program.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(program.env),
                start_new_session=True,
            )
        try:
            hello = self._answer()
            self.version = str(hello["version"])
            forms = cast("dict[str, list[str]]", hello["forms"])
            self.forms = {str(form): [str(case) for case in forms[form]] for form in forms}
        except BaseException as error:
            self.stop()
            if isinstance(error, (KeyError, TypeError)):
                raise ContenderError("its first line does not say version and forms") from error
            raise

    def ask(self, request: Mapping[str, object]) -> dict[str, object]:
        """The answer; ContenderError when there is none in time, or it says what went wrong."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ContenderError(self._death()) from None
        return self._answer()

    def seconds(self, request: Mapping[str, object], wanted_bytes: int) -> float:
        """Seconds of a run; ContenderError when it moved more or fewer bytes."""
        answer = self.ask(request)
        seconds, moved = answer.get("seconds"), answer.get("bytes")
        if moved != wanted_bytes:
            raise ContenderError(f"it moved {moved!r} bytes of {wanted_bytes}")
        if not (isinstance(seconds, float) and 0 < seconds < math.inf):
            raise ContenderError(f"seconds that are none: {str(seconds)[:80]}")
        return seconds

    def _answer(self) -> dict[str, object]:
        try:
            found = json.loads(self._line())
        except ValueError as error:
            raise ContenderError(f"its answer is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise ContenderError("its answer is no JSON object")
        if "error" in found:
            raise ContenderError(str(found["error"])[:300])
        return found

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        source, until = self._process.stdout.fileno(), time.monotonic() + self.limit_s
        while b"\n" not in self._unread:
            left = until - time.monotonic()
            if left <= 0 or not select.select([source], [], [], left)[0]:
                raise ContenderError(f"no answer in {self.limit_s:g} s: it hangs, or is too slow")
            more = os.read(source, 1 << 16)
            if not more:
                raise ContenderError(self._death())
            self._unread += more
            if len(self._unread) > LINE_BYTES_MAX:
                raise ContenderError(f"a line of more than {LINE_BYTES_MAX} bytes")
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _death(self) -> str:
        """Its exit code and last words."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it closed its output and runs on"
        words = self.log.read_text(errors="replace").strip().splitlines()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"it died with {how}: {words[-1][-200:] if words else 'it said nothing'}"

    def stop(self) -> None:
        """Ends all its processes; a second time does nothing."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):  # of a request that it did not live for
                    pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def checked(kind: type[Kind], answer: Mapping[str, object]) -> Kind:
    """Raises ContenderError for an answer that is not of this kind."""
    try:
        return kind.model_validate(answer)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ContenderError(f"its answer: {where}: {first['msg']}") from None
