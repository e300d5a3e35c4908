"""`cxlkv bench prefill-decode`: prefill in one vLLM, decode in another, beside one for both."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cxlkv.bench.lab.texts import beginnings
from cxlkv.bench.peers.running import SideBySide
from cxlkv.bench.peers.talking import Program
from cxlkv.bench.registry import Options, Say, Shown
from cxlkv.bench.vllm import running
from cxlkv.bench.vllm.running import Answer, rotated
from cxlkv.bench.vllm.trained import prepared
from cxlkv.errors import UnsupportedError

ALONE, PREFILL, SHARED, PULLED = NAMES = ("alone", "prefill", "shared", "pulled")
"""One engine for both; the prompts; the decoders on the pool of these, and on their own."""
DECODERS = (SHARED, PULLED)
SERVE = "from cxlkv.ops.cli import main; main()"


@dataclass(frozen=True)
class Size(running.Size):
    """decode: (tokens of each prompt, requests at once, which is 1)."""

    decode: tuple[tuple[int, int], ...] = ((2000, 1), (7000, 1))
    pool_bytes: int = 2 << 30


QUICK = Size(decode=((500, 1),), decode_tokens=9, decode_rounds=2, pool_bytes=128 << 20)


class Run(running.Run):
    """Each prompt is new to all; who decodes has all but less than a block of it then."""

    must_be_right: ClassVar[Sequence[str]] = NAMES
    judge = ALONE

    def case(self, prompts: Sequence[list[int]]) -> None:
        tokens, there = len(prompts[0]), self.there(prompts[0])
        for turn, prompt in enumerate(prompts):
            self.progress(f"prompts of {tokens}: round {turn} of {self.size.decode_rounds}")
            answers = {
                ALONE: self.ask(ALONE, [prompt], self.size.decode_tokens, cached=0),
                PREFILL: self.ask(PREFILL, [prompt], 1, cached=0),
            }
            for name in rotated(DECODERS, turn):
                answers[name] = self.ask(name, [prompt], self.size.decode_tokens, cached=there)
            if turn:
                self.count(tokens, prompt, answers)

    def count(self, tokens: int, prompt: list[int], answers: dict[str, Answer | None]) -> None:
        alone, prefill = answers[ALONE], answers[PREFILL]
        if alone is None or prefill is None:
            return
        self.add(f"first_{tokens}_{PREFILL}", "s", prefill.first_s)
        for name in (ALONE, *DECODERS):
            answer = answers[name]
            if answer is None or not self.must_equal(name, [prompt], answer, alone, name):
                continue
            self.add(f"first_{tokens}_{name}", "s", answer.first_s)
            self.add(f"each_{tokens}_{name}", "ms", 1e3 * answer.decode_s / answer.decoded)
            if name != ALONE:
                both = prefill.first_s + answer.first_s
                self.add(f"both_{tokens}_{name}", "s", both)


def run(
    one: Run, programs: Iterable[Program], place: Path, cases: Sequence[Sequence[list[int]]]
) -> None:
    """Metrics and ratios of all programs, whose names are NAMES. cases: the prompts of each."""
    running.run_cases(one, programs, place, cases)
    ratios, found = one.result.ratios, one.result.metrics
    for prompts in cases:
        tokens = len(prompts[0])
        for name in DECODERS:
            for what, other in (("both", "first"), ("each", "each")):
                metric, alone = f"{what}_{tokens}_{name}", f"{other}_{tokens}_{ALONE}"
                if metric in found and alone in found:
                    ratios[f"{metric}_to_{ALONE}"] = found[metric].median / found[alone].median


def programs_of(
    python: str, place: Path, folder: Path, size: Size, stack: contextlib.ExitStack
) -> Iterator[Program]:
    """The engines one after the other: the last is told who serves the first pool, which is there
    once the one before has started."""
    env = running.environment(place, size)
    common = running.of_trained(folder, size)

    def program(name: str, role: str, pool: str, **own: object) -> Program:
        given = running.connector(place / pool, size, **own) | {"kv_role": role}
        return running.engine(name, python, {**common, "kv_transfer_config": given}, env)

    yield running.engine(ALONE, python, common, env)
    yield program(PREFILL, "kv_producer", "first.pool")
    yield program(SHARED, "kv_consumer", "first.pool")
    secret = place / "secret"
    secret.write_bytes(secrets.token_bytes(32))
    secret.chmod(0o600)
    address = served(place / "first.pool", secret, stack)
    remote = {"remote": f"tcp://{address}", "remote_secret": str(secret)}
    yield program(PULLED, "kv_consumer", "second.pool", **remote)


def served(pool: Path, secret: Path, stack: contextlib.ExitStack) -> str:
    """The address of a process that serves the pool until the stack closes.

    It has the pool's file by a second name, which is gone before anybody asks: peers on the same
    machine would read the file.
    """
    other, log = pool.with_suffix(".served"), secret.with_suffix(".log")
    os.link(pool, other)
    words = ["serve", str(other), "--listen", "127.0.0.1:0", "--secret", str(secret)]
    with log.open("wb") as errors:
        server = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", SERVE, *words],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        )
    stack.callback(server.terminate)
    assert server.stdout is not None
    line = server.stdout.readline()
    other.unlink()
    if not line:
        raise UnsupportedError(f"`cxlkv serve` of {pool} has ended: {log.read_text().strip()}")
    return line.split()[-1]


def prompts_of(folder: Path, size: Size) -> list[list[list[int]]]:
    """Texts for each case and round; each case's begin a token later than those of the case
    before.
    """
    count = size.decode_rounds + 1
    return [
        beginnings(folder, tokens, count, first=case)
        for case, (tokens, _) in enumerate(size.decode)
    ]


def command(options: Options, say: Say) -> Shown:
    """Raises UnsupportedError where there is no environment with vLLM, or not the model."""
    python = running.python_of_engines()
    result, size = SideBySide("prefill-decode"), QUICK if options.quick else Size()
    folder = prepared(say)
    cases = prompts_of(folder, size)
    with (
        running.shared_folder(2 * size.pool_bytes, "two pools need") as place,
        contextlib.ExitStack() as stack,
    ):
        programs = programs_of(python, place, folder, size, stack)
        run(Run(result, size, say), programs, place, cases)
    result.notes.append("all on one machine: the engines work one after the other, TCP is loopback")
    return Shown(result, lines=result.who())
