"""CXLRequests publishes only tokens that the model was seen to read, at the positions where they
belong: else a page would lie under the keys of a text that it was not made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cxlkv import Budget, CXLPool
from cxlkv.adapters.transformers import CXLRequests
from cxlkv.adapters.transformers.cache import CXLCache
from cxlkv.adapters.transformers.fed import UNSEEN, Fed, Row
from cxlkv.prefix import prefix_keys

from ..support.small_models import built, pool_for, prompts
from .test_transformers_requests import PAGE, generate, llama, stock


@pytest.fixture
def pool() -> Iterator[CXLPool]:
    with pool_for(llama(), PAGE) as made:
        yield made


def there(requests: CXLRequests, ids: Tensor) -> int:
    """How many tokens of a text anybody finds."""
    with requests.match(requests.keys(ids[0].tolist())) as hit:
        return hit.tokens


def embeddings(model: PreTrainedModel, ids: Tensor, cache: CXLCache) -> None:
    """Embeddings, of which one differs from that of its id."""
    rows = model.get_input_embeddings()(ids).clone()
    rows[:, 20] = 0
    model(inputs_embeds=rows, past_key_values=cache)


def other_ids(model: PreTrainedModel, ids: Tensor, cache: CXLCache) -> None:
    fed = ids.clone()
    fed[0, 20] += 1
    model(fed, past_key_values=cache)


def other_positions(model: PreTrainedModel, ids: Tensor, cache: CXLCache) -> None:
    positions = torch.arange(ids.shape[1])
    positions[20:] += 1
    model(ids, past_key_values=cache, position_ids=positions[None])


def another_model(model: PreTrainedModel, ids: Tensor, cache: CXLCache) -> None:
    model(ids[:, :20], past_key_values=cache)
    llama(8)(ids[:, 20:], past_key_values=cache)


def a_sparse_step(model: PreTrainedModel, ids: Tensor, cache: CXLCache) -> None:
    """The prompt's last token comes alone, under a budget."""
    model(ids[:, :-1], past_key_values=cache)
    cache.budget = Budget(pages=1)
    model(ids[:, -1:], past_key_values=cache)


def overwritten_ids(model: PreTrainedModel, ids: Tensor, cache: CXLCache) -> None:
    """The caller reuses the tensor for what it feeds next."""
    room = ids[:, :20].clone()
    model(room, past_key_values=cache)
    room[:, :12] = ids[:, 20:]
    model(room[:, :12], past_key_values=cache)


@pytest.mark.parametrize(
    ("feed", "seen"),
    [
        (embeddings, 0),
        (other_ids, 16),
        (other_positions, 16),
        (another_model, 16),
        (a_sparse_step, 24),
        (overwritten_ids, 32),
    ],
)
@pytest.mark.parametrize("door", ["begin", "store"])
def test_only_what_was_read_is_published(
    pool: CXLPool, feed: Callable[[PreTrainedModel, Tensor, CXLCache], None], seen: int, door: str
) -> None:
    model = llama()
    requests = CXLRequests(pool, model)
    ids, _ = prompts((32,))
    with torch.no_grad():
        if door == "begin":
            with requests.begin(ids) as cache:
                feed(model, ids, cache)
        else:
            requests.load("one", None, 0)
            feed(model, ids, requests.cache(["one"]))
            requests.store("one", requests.keys(ids[0].tolist()))
            requests.release("one")
    assert there(requests, ids) == seen
    assert requests.failures()["unseen"] == (seen < 32)
    with requests.begin(ids) as cache:
        assert torch.equal(generate(model, ids, None, cache), stock(model, ids))


def test_a_padded_batch_without_positions_is_not_published(pool: CXLPool) -> None:
    """model() counts positions from the padding on; generate() does not."""
    model = llama()
    requests = CXLRequests(pool, model)
    ids, mask = prompts((30, 22))
    with requests.begin(ids, mask) as cache, torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    assert there(requests, ids[:1]) == 24
    assert there(requests, ids[1:, 8:]) == 0
    with requests.begin(ids, mask) as cache:
        assert torch.equal(generate(model, ids, mask, cache), stock(model, ids, mask))
    assert there(requests, ids[1:, 8:]) == 16


def test_keys_of_another_text_publish_nothing(pool: CXLPool) -> None:
    model = llama()
    requests = CXLRequests(pool, model)
    ids, _ = prompts((32,))
    other = ids.clone()
    other[0, 12] += 1
    keys, others = (requests.keys(of[0].tolist()) for of in (ids, other))
    with torch.no_grad():
        requests.load("one", None, 0)
        model(ids[:, :16], past_key_values=requests.cache(["one"]))
        assert requests.store("one", others) > 0
        requests.store("one", keys)
        requests.release("one")
        assert there(requests, ids) == 16
        assert there(requests, other) == 8, "up to where they differ"
        for loaded in (
            keys,
            None,
        ):  # the ids of a load are not known, only its keys, if it has some
            with requests.match(keys) as hit:
                requests.load("one", hit.handle, hit.tokens, loaded)
            model(ids[:, 16:], past_key_values=requests.cache(["one"]))
            assert requests.store("one", others) == 0
            assert requests.store("one", keys) == (2 if loaded is not None else 0)
            requests.release("one")
    assert there(requests, other) == 8
    assert there(requests, ids) == 32


def test_keys_of_no_space_are_compared_by_position(pool: CXLPool) -> None:
    model = llama()
    requests = CXLRequests(pool, model)
    ids, _ = prompts((32,))
    keys = prefix_keys(ids[0].numpy(), PAGE)
    requests.load("one", None, 0)
    with torch.no_grad():
        other_positions(model, ids, requests.cache(["one"]))
    requests.store("one", keys)
    with requests.match(keys) as hit:
        assert hit.tokens == 16
    requests.release("one")


def test_beams_are_kept_where_they_are_what_was_returned(pool: CXLPool) -> None:
    model = llama()
    requests = CXLRequests(pool, model)
    ids, _ = prompts((26,))
    with requests.begin(ids) as cache:
        out = generate(model, ids, None, cache, num_beams=3, num_return_sequences=3)
        rows = [cache.fed_row(row).ids.tolist() for row in range(3)]  # type: ignore[attr-defined]
        order = [next(r for r in range(3) if out[r, :-1].tolist() == ids) for ids in rows]
        assert requests.keep(cache, out[order]) > 0
    for row in out:
        assert there(requests, row[None, :-1]) == (len(row) - 1) // PAGE * PAGE


def test_the_hook_goes_with_its_requests(pool: CXLPool) -> None:
    model = built(type(llama().config), type(llama()), 7)
    requests = CXLRequests(pool, model)
    decoder = cast(torch.nn.Module, model.model)
    assert len(decoder._forward_pre_hooks) == 1
    del requests
    assert not decoder._forward_pre_hooks


# ---- Fed by itself ----


def test_fed_against_lists() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        rows = int(rng.integers(1, 4))
        fed = Fed()
        model: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
        for _ in range(12):
            tokens = len(model[0])
            match rng.integers(5):
                case 0:
                    keep = int(rng.integers(tokens + 1))
                    fed.resize(keep, rows)
                    model = [row[:keep] for row in model]
                case 1:
                    order = rng.integers(rows, size=rows).tolist()
                    fed.pick(order)
                    model = [list(model[row]) for row in order]
                case 2:
                    more = int(rng.integers(3))
                    fed.resize(tokens + more, rows)
                    model = [row + [(UNSEEN, UNSEEN)] * more for row in model]
                case _:
                    count = int(rng.integers(1, 6))
                    ids = torch.from_numpy(rng.integers(99, size=(rows, count)))
                    fed.add(tokens, ids, torch.arange(tokens, tokens + count)[None])
                    for row, new in zip(model, ids.tolist(), strict=True):
                        row += zip(new, range(tokens, tokens + count), strict=True)
            for index, row in enumerate(model):
                found = fed.row(index, 0)
                assert list(zip(*(of.tolist() for of in found), strict=True)) == row


def test_a_row_agrees_up_to_what_is_not_as_it_should_be() -> None:
    row = Row(np.array([4, 5, 6, UNSEEN, 8]), np.array([0, 1, 2, 3, 5]))
    assert row.placed == 4
    assert row.agreed([4, 5, 6, 7, 8]) == 3
    assert row.agreed([4, 9]) == 1
    assert row.agreed([4, 5]) == 2
    assert Row(np.empty(0, np.int64), np.empty(0, np.int64)).agreed([1]) == 0
