"""attention="gpu": a Decoder inside generate(), on host tensors, with the kernels' references."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from cxlkv import Budget, CXLPool
from cxlkv.adapters.common import gpu_chunks
from cxlkv.adapters.transformers import CXLCache, CXLRequests, Hints
from cxlkv.adapters.transformers.budgets import Budgets
from cxlkv.errors import BadArgumentError, PoolFullError, UnsupportedError
from cxlkv.kernels import runtime
from cxlkv.kernels.index import FORMS

from ..support.lengths import matrix
from ..support.small_models import attend_by, generate, pool_for, prompts, run
from .test_transformers_models import MODELS, MODES, WINDOWS, all_free, assistant_of, dynamic, make
from .test_transformers_models import llama as llama  # a fixture

pytestmark = pytest.mark.usefixtures("references")

PLACES: dict[str, dict[str, str]] = {
    "host": {},
    **{method: {"index": "device", "method": method} for method in FORMS},
}
NAMES = [*MODELS]


def by_gpu(pool: CXLPool, model: PreTrainedModel, budget: Budgets, place: str) -> CXLCache:
    return CXLCache(pool, model, budget, attention="gpu", **PLACES[place])  # type: ignore[arg-type]


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(gpu_chunks, "BLOCK_BYTES", 3 << 10)  # three pages of most models


@pytest.fixture
def pool(llama: PreTrainedModel) -> Iterator[CXLPool]:
    with pool_for(llama, capacity="32MiB") as made:
        yield made


@matrix(name=NAMES, place=PLACES, mode=["greedy", "beams", "samples", "assisted"], times=2)
def test_all_pages_give_the_tokens_of_dynamic_cache(name: str, place: str, mode: str) -> None:
    """Of a batch of unlike lengths; rows that move, repeat and are cut back."""
    model, settings = make(name), dict(MODES[mode])
    ids, mask = prompts((103, 70, 5))
    if mode == "assisted":
        ids, mask = ids[:1], mask[:1]
        settings["assistant_model"] = assistant_of(model)
    wanted = generate(model, ids, mask, dynamic(model), **settings)
    with pool_for(model, capacity="32MiB") as pool:
        for budget in (None, Budget(share=1.0)):
            cache = by_gpu(pool, model, budget, place)
            assert torch.equal(generate(model, ids, mask, cache, **settings), wanted)
            cache.release()
            assert all_free(pool)


@matrix(name=NAMES, method=FORMS)
def test_few_pages_are_those_that_the_pool_chooses(name: str, method: str) -> None:
    """By the same method and budget: the ring has what the budget calls recent."""
    pytest.importorskip("numba", reason="numba compiles scorers")
    model, budget = make(name), Budget(pages=6, sinks=1, recent=2)
    ids, mask = prompts((96, 80))
    with pool_for(model, capacity="32MiB") as pool:
        here = CXLCache(pool, model, budget, method=method)
        there = CXLCache(pool, model, budget, method=method, attention="gpu", index="device")
        tokens = [generate(model, ids, mask, cache) for cache in (here, there)]
        assert torch.equal(*tokens)
        if name not in WINDOWS:
            assert not torch.equal(tokens[0], generate(model, ids, mask, DynamicCache()))
        assert there.counters.steps == here.counters.steps
        assert 0 < there.counters.bytes_read < here.counters.bytes_read  # the ring is not read
        assert there.counters.bytes_scored > 0


@pytest.mark.parametrize("place", PLACES)
def test_a_text_goes_on_in_steps_of_any_length(
    llama: PreTrainedModel, pool: CXLPool, place: str
) -> None:
    """Chunks are written behind the decoder's back, which looks again; a fork goes its own way."""
    ids, mask = prompts((90, 61))
    wanted = run(llama, ids, dynamic(llama), mask)
    cache = by_gpu(pool, llama, None, place)
    cache.rewind_tokens = 0
    found, ends = [], (41, 42, 43, 59, 60, 61, 80, 81, 89, 90)
    for first, last in zip((0, *ends), ends, strict=False):
        found.append(run(llama, ids[:, first:last], cache, mask[:, :last]))
    torch.testing.assert_close(torch.cat(found, 1)[0], wanted[0], rtol=1e-4, atol=1e-4)
    fork = cache.fork()
    more = ids[:, :1]
    wider = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    one, other = (run(llama, more, each, wider) for each in (cache, fork))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert place == "host" or torch.equal(one, other), "hot pages change no output"
    cache.crop(-2)
    again = run(llama, ids[:, 89:90], cache, mask)
    torch.testing.assert_close(again[0], wanted[0, 89:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("place", PLACES)
def test_what_was_cut_back_is_not_attended_to(
    llama: PreTrainedModel, pool: CXLPool, place: str
) -> None:
    """Other tokens come in the place of those that the device has pages and summaries of; a fork
    keeps the old ones, so that they are not freed."""
    ids, mask = prompts((90,))
    cache = by_gpu(pool, llama, Budget(share=1.0), place)
    cache.rewind_tokens = 0
    run(llama, ids[:, :80], cache, mask[:, :80])
    for end in range(81, 91):
        run(llama, ids[:, end - 1 : end], cache, mask[:, :end])
    fork = cache.fork()
    cache.crop(40)
    other = torch.cat([ids[:, :40], ids[:, 40:].flip(1)], 1)
    run(llama, other[:, 40:86], cache, mask[:, :86])
    wanted = run(llama, other, DynamicCache(), mask)
    for end in range(87, 91):
        found = run(llama, other[:, end - 1 : end], cache, mask[:, :end])
        torch.testing.assert_close(found[0], wanted[0, end - 1 : end], rtol=1e-4, atol=1e-4)
    fork.release()


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
@pytest.mark.parametrize("place", ["host", "sketch"])
def test_many_steps_are_taken_back_where_layers_have_windows(name: str, place: str) -> None:
    model = make(name)
    ids, mask = prompts((90,))
    wanted = run(model, ids, dynamic(model), mask)
    with pool_for(model, capacity="32MiB") as pool:
        cache = by_gpu(pool, model, Budget(share=1.0, recent=16), place)
        run(model, ids[:, :50], cache, mask[:, :50])
        for back in (1, 7, 20):
            for end in range(51, 85):
                run(model, ids[:, end - 1 : end], cache, mask[:, :end])
            cache.crop(-back)
            found = run(model, ids[:, 84 - back : 85 - back], cache, mask[:, : 85 - back])
            place_of = slice(84 - back, 85 - back)
            torch.testing.assert_close(found[0], wanted[0, place_of], rtol=1e-3, atol=1e-3)
            cache.crop(50)
        cache.rewind_tokens = 0  # what no token sees any more is given back at once
        for end in range(51, 70):
            for _ in range(2):  # the last step can always be taken back
                found = run(model, ids[:, end - 1 : end], cache, mask[:, :end])
                cache.crop(-1)
            found = run(model, ids[:, end - 1 : end], cache, mask[:, :end])
            torch.testing.assert_close(found[0], wanted[0, end - 1 : end], rtol=1e-3, atol=1e-3)
        cache.release()


@pytest.mark.parametrize("place", ["host", "digest"])
def test_a_full_pool_leaves_the_step_undone(
    llama: PreTrainedModel, pool: CXLPool, place: str
) -> None:
    ids, mask = prompts((40,))
    wanted = run(llama, ids, DynamicCache(), mask)
    cache = by_gpu(pool, llama, None, place)
    run(llama, ids[:, :36], cache, mask[:, :36])
    filler = pool.pages.alloc(pool.stats()["pages_free"])
    for end in (37, 38, 39):  # the tail has room for them
        run(llama, ids[:, end - 1 : end], cache, mask[:, :end])
    with pytest.raises(PoolFullError):
        run(llama, ids[:, 39:], cache, mask)
    pool.pages.free(filler)
    assert [len(one) for one in cache.sequences] == [39]
    assert cache.get_seq_length() == 39
    last = run(llama, ids[:, 39:], cache, mask)
    torch.testing.assert_close(last, wanted[:, 39:], rtol=1e-4, atol=1e-4)


def test_what_a_decoder_does_not_do_is_refused(llama: PreTrainedModel, pool: CXLPool) -> None:
    for given, error, match in (
        ({"attention": "pool", "index": "device"}, BadArgumentError, "go with attention"),
        ({"attention": "gpu", "hot_pages": 0}, BadArgumentError, "hot_pages=0"),
        ({"attention": "gpu", "method": "retro"}, UnsupportedError, "a GPU"),
    ):
        with pytest.raises(error, match=match):
            CXLCache(pool, llama, **given)
    ids, mask = prompts((30,))
    settings = {"method": "two_stage", "attention": "gpu", "index": "device"}
    cache = CXLCache(pool, llama, Budget(pages=4), **settings)  # type: ignore[arg-type]
    run(llama, ids[:, :29], cache, mask[:, :29])
    with pytest.raises(UnsupportedError, match="digest, mean_std, sketch"):
        run(llama, ids[:, 29:], cache, mask)


FEW = Budget(pages=5, sinks=1, recent=2)


def test_auto_is_the_devices_index_where_it_serves_all_rows(
    llama: PreTrainedModel, pool: CXLPool
) -> None:
    ids, mask = prompts((96, 90))
    cache = CXLCache(pool, llama, FEW, attention="gpu", index="auto")
    found = generate(llama, ids, mask, cache)
    assert torch.equal(
        found, generate(llama, ids, mask, CXLCache(pool, llama, FEW, method="sketch"))
    )
    assert cache._gpu is not None
    assert cache._gpu._decoder is not None
    assert cache._gpu._decoder.index == "device"
    cache.release()
    cache.budget = [FEW, Budget(mass=0.9)]
    generate(llama, ids, mask, cache)
    assert cache._gpu._decoder.index == "host"


@pytest.mark.parametrize("place", ["host", "sketch", "digest"])
def test_each_row_has_its_own_budget(llama: PreTrainedModel, pool: CXLPool, place: str) -> None:
    ids, mask = prompts((96, 90, 96))
    full = generate(llama, ids, mask, dynamic(llama))
    cache = by_gpu(pool, llama, [None, FEW, None], place)
    found = generate(llama, ids, mask, cache)
    assert torch.equal(found[::2], full[::2])
    assert not torch.equal(found[1], full[1])
    if place != "host":  # where what the device has is attended to, too
        few = CXLCache(pool, llama, FEW, method=place)
        assert torch.equal(found[1], generate(llama, ids, mask, few)[1])
    assert cache.counters.bytes_scored > 0


@pytest.mark.parametrize("place", ["sketch", "digest"])
def test_budgets_move_with_their_rows_and_change(
    llama: PreTrainedModel, pool: CXLPool, place: str
) -> None:
    """One decoder serves all of it."""
    ids, _ = prompts((96, 96, 96))
    full = run(llama, ids, dynamic(llama))[:, -1]
    here = CXLCache(pool, llama, FEW, method=place)
    run(llama, ids[:, :-1], here)
    few = run(llama, ids[:, -1:], here)[:, -1]
    cache = by_gpu(pool, llama, [None, FEW, None], place)
    run(llama, ids[:, :-1], cache)
    decoders = set()

    def step(rows: list[int], budgets: list[Budget | None]) -> None:
        found = run(llama, ids[rows, -1:], cache)[:, -1]
        for one, row, budget in zip(found, rows, budgets, strict=True):
            wanted = few[row] if budget else full[row]
            torch.testing.assert_close(one, wanted, rtol=1e-3, atol=1e-4)
        assert cache.budget == tuple(budgets)
        cache.crop(-1)
        assert cache._gpu is not None
        decoders.add(cache._gpu._decoder)

    step([0, 1, 2], [None, FEW, None])
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    step([1, 1, 0], [FEW, FEW, None])
    cache.budget = [None, FEW, FEW]
    step([1, 1, 0], [None, FEW, FEW])
    assert len(decoders) == 1
    other = Budget(pages=5, sinks=2, recent=2)
    cache.budget = [FEW, other, None]
    with pytest.raises(UnsupportedError, match=r"as many sinks as the decoder"):
        run(llama, ids[[1, 1, 0], -1:], cache)
    assert cache.get_seq_length() == 95
    cache.budget = [FEW, FEW, None]
    step([1, 1, 0], [FEW, FEW, None])


def test_a_budget_changes_from_step_to_step(llama: PreTrainedModel, pool: CXLPool) -> None:
    ids, _ = prompts((97, 97))
    settings = ({"method": "digest"}, {"attention": "gpu", **PLACES["digest"]})
    caches = [CXLCache(pool, llama, **each) for each in settings]  # type: ignore[arg-type]
    for cache in caches:
        run(llama, ids[:, :93], cache)
    wanted: tuple[Budgets, ...] = (None, FEW, [FEW, None], [None, FEW])
    for at, budget in enumerate(wanted, 93):
        found = []
        for cache in caches:
            cache.budget = budget
            found.append(run(llama, ids[:, at : at + 1], cache))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("place", ["host", "digest"])
def test_requests_join_and_leave(llama: PreTrainedModel, pool: CXLPool, place: str) -> None:
    """Rows of unlike lengths, each of which goes on in other caches; the caches that they leave
    keep nothing on the device."""
    ids, _ = prompts((90, 90, 90))
    method, budget = PLACES[place].get("method", "auto"), Budget(pages=6, sinks=1, recent=4)
    full = run(llama, ids, dynamic(llama))
    few = full
    if place != "host":
        whole = CXLCache(pool, llama, budget, method=method)
        few = torch.cat(
            [
                run(llama, ids[:, :40], whole),
                *(run(llama, ids[:, at : at + 1], whole) for at in range(40, 90)),
            ],
            1,
        )
        whole.release()
    for own, wanted in ((None, full), (budget, few)):
        if own is not None and place == "host":
            continue
        requests, has = CXLRequests(pool, llama), dict.fromkeys("abc", 0)
        settings: dict[str, object] = {"budget": own, "attention": "gpu", **PLACES[place]}
        caches = []
        for name in has:
            requests.load(name, None, 0)
        for names, steps in (
            ("a", (33, 7, 1, 1, 1)),
            ("b", (40, 1)),
            ("ab", (1, 1, 1)),
            ("c", (40,)),
            ("cb", (1, 1)),
            ("bca", (1, 1)),
        ):
            cache = requests.cache(list(names), **settings)  # type: ignore[arg-type]
            caches.append(cache)
            for step in steps:
                longest = max(has[name] for name in names)
                mask = torch.tensor(
                    [[0] * (longest - has[n]) + [1] * (has[n] + step) for n in names]
                )
                rows = [ids["abc".index(n), has[n] : has[n] + step] for n in names]
                places = torch.tensor([[*range(has[n], has[n] + step)] for n in names])
                attend_by(llama, cache)
                with torch.no_grad():
                    found = llama(
                        torch.stack(rows),
                        attention_mask=mask,
                        position_ids=places,
                        past_key_values=cache,
                    ).logits
                for one, name in zip(found, names, strict=True):
                    right = wanted["abc".index(name), has[name] : has[name] + step]
                    torch.testing.assert_close(one, right, rtol=1e-3, atol=1e-4)
                    has[name] += step
        assert all(cache._gpu._decoder is None for cache in caches[:-1])  # type: ignore[union-attr]
        for name in "abc":
            requests.release(name)
        caches[-1].leave_device()
    assert all_free(pool)


@pytest.mark.parametrize("place", ["host", "sketch"])
def test_calls_of_generate_share_prefixes(
    llama: PreTrainedModel, pool: CXLPool, place: str
) -> None:
    """The second prompt's new part is a chunk behind pages that the first one has published."""
    requests = CXLRequests(pool, llama)
    ids, mask = prompts((61, 45))
    settings: dict[str, object] = {"attention": "gpu", **PLACES[place]}
    for longer in (0, 9):
        text = torch.cat([ids, ids[:, 3 : 3 + longer]], 1)
        seen = torch.cat([mask, torch.ones_like(mask[:, :longer])], 1)
        with requests.begin(text, seen, **settings) as cache:  # type: ignore[arg-type]
            assert (cache.get_seq_length() > 40) == (longer > 0)
            found = generate(llama, text, seen, cache)
        assert torch.equal(found, generate(llama, text, seen, dynamic(llama)))


@pytest.mark.parametrize("place", PLACES)
def test_hints_go_to_the_decoder(llama: PreTrainedModel, pool: CXLPool, place: str) -> None:
    """Tokens are the same, and pages that hints brought are hits of the layers behind the first."""
    budget = Budget(pages=5, sinks=1, recent=1)
    ids, mask = prompts((96, 80))
    found = []
    for hinted in (False, True):
        cache = by_gpu(pool, llama, budget, place)
        with contextlib.ExitStack() as stack:
            hints = stack.enter_context(Hints(llama, cache)) if hinted else None
            found.append(generate(llama, ids, mask, cache))
            if hints is not None:
                assert hints.stats() == {"failed": 0, "late": 0}
        counts = cache.counters.by_layer
        assert counts is not None
        assert (counts.hits + counts.misses > 0).all()
        assert counts.hinted[0] == 0
        assert (counts.hinted[1:] > 0).all() == hinted
        cache.release()
    if place != "host":  # where hints bring pages that are attended to besides
        assert torch.equal(*found)
    with pytest.raises(BadArgumentError, match="Hints"):
        Hints(llama, CXLCache(pool, llama, budget))
