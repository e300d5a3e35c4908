"""A mailbox carries questions of a device's stream to this process's near-data engine, and answers.

On a GPU a thread waits for the questions, so that the thread that launches kernels never does; on
the CPU the engine is simply called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from cxlkv import _core
from cxlkv.arrays import memory_of
from cxlkv.errors import WorkerError
from cxlkv.machine import lifetime

IDLE_S = 0.2  # how long the thread waits before it looks whether it is to end
LOOKS_PER_S = 1_500_000  # of a device at host memory; more than there are, so that none is too soon


class Mailbox:
    """serve(subject) is called for each ask(), in order, and then(subject) once it was answered;
    what they raise is raised by check().

    After an error nothing is served until check(). answered: int32 [2] on the device, 1 when the
    last question was answered in time, and the smallest of these since the last check().
    """

    def __init__(
        self,
        device: torch.device,
        serve: Callable[[int], None],
        then: Callable[[int], None],
        deadline_s: float,
        *,
        threaded: bool | None = None,
    ):
        """threaded: None: where the device is a GPU. Tests have the CPU ask by words as well."""
        self._serve, self._then = serve, then
        self._deadline_s = deadline_s
        self._error: BaseException | None = None
        self.answered = torch.ones(2, dtype=torch.int32, device=device)
        self._thread: threading.Thread | None = None
        pinned = device.type == "cuda"
        if not (pinned if threaded is None else threaded):
            return
        self._words = torch.zeros(2, dtype=torch.int64, pin_memory=pinned)
        at = memory_of(self._words, "words")
        self._table = torch.tensor([at, at + 8], device=device)
        self._ticket = torch.zeros(1, dtype=torch.int64, device=device)
        self._ends = False
        self._mutex = threading.RLock()  # taken by itself: Condition's `with` can be interrupted
        self._idle = threading.Condition(self._mutex)
        self._done = 0  # the word of the question that was served last, and then()
        self._is_parents = False
        lifetime.watch(self)
        self._thread = threading.Thread(target=self._run, name="cxlkv-mailbox", daemon=True)
        self._thread.start()

    def reset_after_fork(self) -> None:
        """Mark it closed in a forked child: its thread, like CUDA, does not cross a fork."""
        self._mutex = threading.RLock()
        self._idle = threading.Condition(self._mutex)
        self._is_parents = True
        self._error = WorkerError(
            "the near-data engine is of the parent process: make one in the child, after a start "
            "by the spawn method"
        )

    def ask(self, subject: int) -> None:
        """Queue a question on the stream, after the copies of what it needs."""
        if self._thread is None:
            self.answered[0] = int(self._did(self._serve, subject))
            self.answered[1] = torch.minimum(self.answered[0], self.answered[1])
            self._did(self._then, subject)
            return
        from cxlkv.kernels.mail import ask

        ask(self._ticket, self._table, subject)

    def await_answer(self) -> None:
        """Make the stream wait for the answer; copies of its data are queued after that."""
        if self._thread is None:
            return
        from cxlkv.kernels.mail import await_answer

        looks = min(int(self._deadline_s * LOOKS_PER_S), 2**31 - 1)
        await_answer(self._ticket, self._table, self.answered, looks)

    def check(self) -> None:
        """Wait until nothing is served any more, a late question either, once the stream was waited
        for, and raise what went wrong since the last check."""
        if self._thread is not None:
            with self._mutex:
                self._idle.wait_for(lambda: self._is_parents or self._done == int(self._words[0]))
        error, self._error = self._error, None
        worst = int(self.answered[1])
        self.answered[1] = 1
        if worst < 0:
            raise WorkerError(
                f"the near-data engine did not answer within {self._deadline_s:g} s, and pages are "
                "missing from this step: run it again, with a longer deadline_s if the machine is "
                "busy"
            ) from error
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread; later questions are not answered."""
        if self._thread is not None:
            self._ends = True
            self._thread.join()

    def _did(self, work: Callable[[int], None], subject: int) -> bool:
        if self._error is not None:
            return False
        try:
            work(subject)
        except Exception as error:  # it is raised where the step ends
            self._error = error
            return False
        return True

    def _run(self) -> None:
        from cxlkv.kernels.mail_triton import SUBJECTS

        question = memory_of(self._words, "words")
        answer = question + 8
        old = 0
        while not self._ends:
            came, word = _core.word_wait(question, old, IDLE_S)
            if not came:
                continue
            old = word
            ticket, subject = divmod(word, SUBJECTS)
            _core.word_store(answer, ticket if self._did(self._serve, subject) else -ticket)
            self._did(self._then, subject)
            with self._mutex:
                self._done = word
                self._idle.notify_all()
