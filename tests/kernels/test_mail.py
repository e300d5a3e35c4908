"""Questions of a stream and answers of a host, with a second thread as the host."""

from __future__ import annotations

import threading

import pytest
import torch

from cxlkv import _core
from cxlkv.errors import BadArgumentError
from cxlkv.kernels.mail import ask, await_answer
from cxlkv.kernels.mail_triton import SUBJECTS

LOOKS = 1_000_000_000


class Words:
    """Two words in host memory that the device maps, and the device's tensors about them."""

    def __init__(self, device: torch.device):
        pinned = device.type == "cuda"
        self.host = torch.zeros(2, dtype=torch.int64, pin_memory=pinned)
        at = self.host.data_ptr()
        self.table = torch.tensor([at, at + 8], device=device)
        self.ticket = torch.zeros(1, dtype=torch.int64, device=device)
        self.answered = torch.tensor([0, 1], dtype=torch.int32, device=device)


def serve(words: Words, answers: list[int], seen: list[tuple[int, int]]) -> threading.Thread:
    """A host that multiplies each question's ticket by the next answer: 1 or -1."""

    def run() -> None:
        old = 0
        for answer in answers:
            came, old = _core.word_wait(words.host.data_ptr(), old, 60.0)
            assert came
            seen.append(divmod(old, SUBJECTS))
            _core.word_store(words.host.data_ptr() + 8, answer * (old // SUBJECTS))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_questions_are_answered_or_refused(device: torch.device) -> None:
    words, seen = Words(device), list[tuple[int, int]]()
    thread = serve(words, [1, -1, 1], seen)
    found = []
    for subject in (5, 0, 1023):
        ask(words.ticket, words.table, subject)
        await_answer(words.ticket, words.table, words.answered, LOOKS)
        found.append(words.answered.tolist())
    thread.join()
    assert seen == [(1, 5), (2, 0), (3, 1023)]
    assert found == [[1, 1], [0, 0], [1, 0]]  # the worst stays


def test_a_host_that_is_late_does_not_hang_the_device(device: torch.device) -> None:
    words = Words(device)
    ask(words.ticket, words.table, 3)
    await_answer(words.ticket, words.table, words.answered, 10)
    assert words.answered.tolist() == [-1, -1]
    _core.word_store(words.host.data_ptr() + 8, 1)  # an answer to the first question, too late
    ask(words.ticket, words.table, 3)
    await_answer(words.ticket, words.table, words.answered, 10)
    assert words.answered.tolist() == [-1, -1]


def test_wrong_tensors_are_refused(device: torch.device) -> None:
    words = Words(device)
    with pytest.raises(BadArgumentError, match="subject 1024"):
        ask(words.ticket, words.table, 1024)
    with pytest.raises(BadArgumentError, match="words is"):
        ask(words.ticket, words.ticket, 0)
    with pytest.raises(BadArgumentError, match=r"int32 \[2\]"):
        await_answer(words.ticket, words.table, words.ticket, 1)


def test_waiting_for_a_word_ends_in_time() -> None:
    word = torch.zeros(1, dtype=torch.int64)
    assert _core.word_wait(word.data_ptr(), 0, 0.01) == (False, 0)
    _core.word_store(word.data_ptr(), 9)
    assert _core.word_wait(word.data_ptr(), 0, 0.0) == (True, 9)
    with pytest.raises(BadArgumentError, match="border of 8 bytes"):
        _core.word_wait(word.data_ptr() + 4, 0, 0.0)
