"""Audits, withdrawn namespaces, and tokens that were seen: what goes wrong beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from cxlkv import CXLPool
from cxlkv.adapters.common.audits import is_withdrawn, withdraw
from cxlkv.adapters.common.keyed_weights import KeyedWeights
from cxlkv.adapters.common.requests import PoolRequests
from cxlkv.adapters.transformers import CXLRequests, layout_of
from cxlkv.adapters.transformers.fed import Fed
from cxlkv.adapters.vllm.lora import Adapters
from cxlkv.errors import CorruptError, CXLKVError, UnsupportedError
from cxlkv.tiers import Tiers

from ..support.paged_engine import SPACE, Adapter, text
from ..support.paged_engines import Engines, engines_in
from ..support.small_models import built, pool_for, prompts
from .test_transformers_requests import PAGE, generate, llama, stock, windowed

# ---- vLLM ----


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    with engines_in(tmp_path) as made:
        yield made


def plant(engines: Engines, *seeds: int) -> None:
    """Pages of other weights under the engines' keys."""
    planting = engines()
    planting.weights = b"that are not in the key"
    for seed in seeds:
        planting.run_to_end(f"{seed}", text(seed, 33))


def test_an_engine_stores_nothing_behind_blocks_of_a_withdrawn_namespace(
    engines: Engines,
) -> None:
    """Its own prefix cache has them still; in the namespace that it has then they are wrong, too,
    and found when that cache is reset."""
    plant(engines, 1)
    engine = engines()
    engine.shares = True
    engine.serve("wrong", text(1, 33))
    engine.settle()
    withdraw(engine.ranks[0].worker.pool, SPACE)
    engine.serve("beside", text(1, 38))
    for _ in range(8):
        engine.step()
    assert not engine.wrongly_stored, "nor do requests that ran before"
    for name in ("wrong", "beside"):
        engine.end(name)
    engine.step()
    engine.scheduling.forgotten()
    engine.shares = False
    engine.run_to_end("again", text(1, 33))
    assert engine.run_to_end("own", text(1, 33)) == 32


def test_one_wrong_page_withdraws_one_namespace(engines: Engines) -> None:
    """Other audits that are under way say the same of the same pages, and no more."""
    plant(engines, 1, 2)
    engine = engines(audit_hits=1)
    engine.shares = True  # is wrong until the audits
    for seed in (1, 2):
        engine.add(f"{seed}", text(seed, 33))
        engine.step(chunk=1)
    for _ in range(60):
        engine.step(chunk=1)
    assert engine.scheduling.failures["audit"] == 1


def test_an_audit_says_nothing_of_weights_that_came_later(engines: Engines) -> None:
    """The pages are right: what computes the block has other weights by now."""
    engines().run_to_end("first", text(1, 33))
    engine = engines(audit_hits=1)
    request = engine.add("one", text(1, 33))
    engine.step(chunk=1)
    request.weights = engine.weights = b"other"
    request._texts.clear()
    engine.shares = True  # what it has is of both
    engine.ranks[0].worker.stop_saving()  # as LoadedWeights does
    for _ in range(8):
        engine.step(chunk=1)
    assert not engine.scheduling.failures["audit"]
    assert engines().run_to_end("again", text(1, 33)) == 32


def test_what_goes_on_from_older_weights_is_not_audited(engines: Engines) -> None:
    engines().run_to_end("first", text(1, 33))
    engine = engines(audit_hits=1)
    engine.scheduling._weights.are_mixed = True
    request = engine.add("one", text(1, 33))
    engine.waiting.clear()
    assert engine.scheduling.match(request, 4) == (28, False)
    engine.scheduling._forget_match("one")
    engine.requests.clear()


def test_files_of_an_adapter_that_vanish_end_no_engine(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").symlink_to(tmp_path / "gone")
    Adapters().space_of(Adapter(str(tmp_path)))


# ---- transformers ----


def test_an_audit_that_finds_no_shorter_hit_is_left_out() -> None:
    """A window has given back what the text before the last page would see."""
    model, (ids, _) = windowed(), prompts((600,))
    with pool_for(model, 256, "32MiB") as pool:
        requests = CXLRequests(pool, model, audit_hits=1)
        for begins in (0, 512):
            with requests.begin(ids) as cache:
                assert cache.get_seq_length() == begins
                assert torch.equal(generate(model, ids, None, cache), stock(model, ids))


@pytest.mark.parametrize("is_wrong", [False, True])
def test_layers_whose_window_has_given_the_page_back_are_left_out(is_wrong: bool) -> None:
    """The others are compared."""
    model, (ids, _) = windowed(), prompts((400,))
    with pool_for(model, PAGE) as pool:
        requests = CXLRequests(pool, model, audit_hits=1)
        short = ids[:, :26].clone()
        requests.load("one", None, 0)
        with torch.no_grad():
            model(short.flip(1) if is_wrong else short, past_key_values=requests.cache(["one"]))
        keys = requests.keys(short[0].tolist())
        pool.publish(requests.sequence("one"), keys, PAGE)
        requests.release("one")

        def go_on() -> None:
            with requests.begin(ids) as cache:
                assert cache.get_seq_length() == 16
                generate(model, ids, None, cache)

        if is_wrong:
            with pytest.raises(CorruptError):
                go_on()
        else:
            go_on()
        assert requests.failures() == ({"audit": 1} if is_wrong else {})


def test_a_mark_below_the_pool_counts_for_a_model_as_it_is_later(tmp_path: Path) -> None:
    model = built(type(llama().config), type(llama()), 7)
    first = model.lm_head.weight.detach().clone()
    layout = layout_of(model, PAGE)
    ids, _ = prompts((40,))

    def requests_of(name: str, held: list[object]) -> CXLRequests:
        pool = CXLPool.create(tmp_path / name, layout=layout, capacity="4MiB", threads=1)
        tiers = Tiers(pool, cold=tmp_path / "cold", cold_capacity="4MiB")
        held += [tiers, pool]
        return CXLRequests(pool, model, tiers)

    held: list[object] = []
    requests = requests_of("one", held)
    requests.withdraw(requests._look()[0])
    for one in held:
        one.close()  # type: ignore[attr-defined]
    with torch.no_grad():
        model.lm_head.weight += 1
        again: list[object] = []
        requests = requests_of("two", again)
        model.lm_head.weight.copy_(first)
    requests.keys(ids[0].tolist())
    assert requests._unshared
    for one in again:
        one.close()  # type: ignore[attr-defined]


def test_an_error_at_the_end_of_begin_holds_no_pages() -> None:
    model, (ids, _) = built(type(llama().config), type(llama()), 7), prompts((24,))
    with pool_for(model, PAGE) as pool:
        requests = CXLRequests(pool, model)

        def fail() -> None:
            with requests.begin(ids) as cache:
                generate(model, ids, None, cache)
                vars(model)["active_peft_config"] = SimpleNamespace(is_prompt_learning=True)

        with pytest.raises(UnsupportedError):
            fail()
        assert pool.stats()["pages_held"] == 0
        assert pool.stats()["sequences"] == 0


def test_what_is_fed_beside_ids_is_in_no_key() -> None:
    torch.manual_seed(3)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=128)
    model = GPT2LMHeadModel(config)
    model.train(False)
    model.set_attn_implementation("cxlkv")
    ids, _ = prompts((32,))
    with pool_for(model, PAGE) as pool:
        requests = CXLRequests(pool, model)
        with torch.no_grad(), requests.begin(ids) as cache:
            model(ids, token_type_ids=torch.full_like(ids, 5), past_key_values=cache)
        with requests.match(requests.keys(ids[0].tolist())) as hit:
            assert hit.tokens == 0


def test_a_withdrawal_between_begin_and_the_first_pass_says_what_it_is() -> None:
    model, (ids, _) = llama(), prompts((40,))
    with pool_for(model, PAGE) as pool:
        requests = CXLRequests(pool, model)
        with requests.begin(ids) as cache:
            generate(model, ids, None, cache)
        space = requests._look()[0]

        def fail() -> None:
            with requests.begin(ids) as cache:
                withdraw(pool, space)
                generate(model, ids, None, cache)

        with pytest.raises(CXLKVError, match="withdrawn"):
            fail()


def test_a_step_costs_the_same_after_many() -> None:
    ids, places = torch.ones(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long)
    fed = Fed()

    def seconds(first: int) -> float:
        start = time.perf_counter()
        for at in range(first, first + 500):
            fed.add(at, ids, places)
        return time.perf_counter() - start

    seconds(0)
    early = min(seconds(500), seconds(1000))
    for first in range(1500, 20_000, 500):
        seconds(first)
    assert min(seconds(20_000), seconds(20_500)) < 4 * early


# ---- weights loaded anew ----


def test_two_threads_that_look_lose_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has seen the change and has not said so yet, the other sees none any more."""
    weights = KeyedWeights(["no.such.package"], True)
    seen, go_on = threading.Event(), threading.Event()
    answers = [True, False]

    def look() -> bool:
        answer = answers.pop(0)
        if answer:
            seen.set()
            go_on.wait(1)
        return answer

    own = SimpleNamespace(look=look, may_differ=True, state=b"")
    monkeypatch.setattr(weights, "_loaded", own)
    first = threading.Thread(target=weights.look)
    first.start()
    seen.wait(5)
    second = threading.Thread(target=weights.look)
    second.start()
    second.join(0.2)
    own.may_differ = False
    is_known = not second.is_alive() and weights.state is not None
    go_on.set()
    first.join()
    second.join()
    assert not is_known, "a thread goes on with the weights that were, while another looks"
    assert weights.state is None


# ---- a mark that a full pool has no room for ----


def test_a_withdrawal_that_has_no_room_is_said_later() -> None:
    with pool_for(llama(), PAGE) as pool:
        requests = PoolRequests(pool)
        taken = pool.pages.alloc(pool.stats()["pages_free"])
        requests.withdraw(SPACE)
        assert not is_withdrawn(pool, SPACE)
        pool.pages.free(taken)
        requests.withdraw()  # as in each step
        assert is_withdrawn(pool, SPACE)


def test_positions_that_are_given_by_place_are_not_overheard() -> None:
    model, (ids, _) = llama(), prompts((32,))
    places = torch.arange(32)[None] + 3
    with pool_for(model, PAGE) as pool:
        requests = CXLRequests(pool, model)
        with torch.no_grad(), requests.begin(ids) as cache:
            model.model(ids, None, places, past_key_values=cache)
        with requests.match(requests.keys(ids[0].tolist())) as hit:
            assert hit.tokens == 0
