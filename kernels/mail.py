"""A GPU's stream asks this host a question and waits for the answer; the launching thread does not.

Two words of 8 bytes lie in host memory that the device maps: the question's and the answer's. A
question is a ticket, which the device counts up, and what it is about; what belongs to it was
copied to the host before, in the stream. The host answers with the same ticket, or with its
negative where it has no answer. All of it can be part of a CUDA graph: addresses stay, and the
ticket is the device's own.
"""

from __future__ import annotations

import torch

from cxlkv.errors import BadArgumentError
from cxlkv.kernels.runtime import check_table, current, one_device


def _check(ticket: torch.Tensor, words: torch.Tensor) -> None:
    check_table("ticket", ticket, (1,))
    check_table("words", words, (2,))
    one_device(ticket=ticket, words=words)


def ask(ticket: torch.Tensor, words: torch.Tensor, subject: int) -> None:
    """Count the ticket up and write the question's word. ticket int64 [1]; words int64 [2]: the
    addresses of the question's and of the answer's word."""
    _check(ticket, words)
    from cxlkv.kernels import mail_triton as kernels

    if not 0 <= subject < kernels.SUBJECTS:
        raise BadArgumentError(f"subject {subject}: 0 to {kernels.SUBJECTS - 1}")
    with current(ticket.device):
        kernels._ask_kernel[(1,)](ticket, words, subject, kernels.SUBJECTS, num_warps=1)


def await_answer(
    ticket: torch.Tensor, words: torch.Tensor, answered: torch.Tensor, looks: int
) -> None:
    """Look for the ticket's answer, `looks` times at most (a look takes about a microsecond over
    PCIe). answered int32 [2]: 1 answered, 0 refused, -1 late; and the smallest of these so far."""
    _check(ticket, words)
    if answered.dtype != torch.int32 or tuple(answered.shape) != (2,):
        raise BadArgumentError("answered is int32 [2]")
    one_device(ticket=ticket, answered=answered)
    from cxlkv.kernels import mail_triton as kernels

    with current(ticket.device):
        kernels._await_kernel[(1,)](ticket, words, answered, looks, num_warps=1)
