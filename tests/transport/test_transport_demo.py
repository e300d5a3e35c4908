"""Prefill in one process, decode in another, which has a pool of its own and pulls the pages.

Both have transformers and the same model; no memory is shared, and the one that has read the
prompts is dead when the other one goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cxlkv.adapters.transformers import CXLRequests
from cxlkv.transport import pull

from ..adapters.test_transformers_requests import PAGE, generate, stock
from ..support import states
from ..support.far_prefill import MODELS
from ..support.lengths import nightly
from ..support.processes import Prepared
from ..support.small_models import pool_for, prompts
from .test_transport import HOST, LINKS, device_of, folder, remote_of

__all__ = ["folder"]


@contextmanager
def prefilled(folder: Path, link: str, name: str, lengths: tuple[int, ...]) -> Iterator[str]:
    """The address of a process that has read the prompts; it is killed in the end."""
    where = "anonymous:" if link == "socket" else str(folder / "pool")
    words = [name, ",".join(map(str, lengths)), where, str(folder / "secret"), HOST]
    try:
        with Prepared("tests.support.far_prefill", *words, device_of(link) or "") as child:
            yield child.hear()
    finally:
        states.remove(folder / "pool")


@pytest.mark.parametrize("link", ["socket", nightly("file"), LINKS[-1]])
def test_what_another_process_read_is_decoded_here(folder: Path, link: str) -> None:
    name, lengths = ("windowed", (103,)) if link == "socket" else ("llama", (103, 70, 19))
    model = MODELS[name]()
    ids, mask = prompts(lengths)
    with pool_for(model, PAGE) as pool:
        requests = CXLRequests(pool, model)
        with prefilled(folder, link, name, lengths) as address, remote_of(address, link) as remote:
            assert remote.link == link
            for row, length in zip(ids, lengths, strict=True):
                moved = pull(remote, pool, requests.keys(row[-length:].tolist()))
                assert moved.tokens == length // PAGE * PAGE
                assert moved.pages > 0
        with requests.begin(ids, mask) as cache:
            # Rows advance together: from where the one with the longest tail was read.
            tail = max(length % PAGE for length in lengths)
            assert cache.get_seq_length() == max(lengths) - tail
            assert torch.equal(generate(model, ids, mask, cache), stock(model, ids, mask))
        assert not requests.failures()
