"""The connector's parts with pools of other machines below their own: prefill there, decode here,
by as many ranks or another number; whatever becomes of the other side, requests are right."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from cxlkv import CXLPool
from cxlkv.adapters.vllm.remote import open_remote
from cxlkv.adapters.vllm.settings import Settings
from cxlkv.errors import BadArgumentError
from cxlkv.tiers import remote as tier
from cxlkv.transport import Server
from cxlkv.transport.shards import layout_among

from ..conftest import audit
from ..support.cable import Cable
from ..support.paged_engine import (
    HEADS,
    TOKENS,
    Adapter,
    Engine,
    Request,
    layout_of,
    make_pool,
    text,
)
from ..support.waiting import until
from ..support.weight_files import change, safetensors

TEXT = 162  # tokens, of which 160 are whole blocks
SECRET = b"a secret of the tests"
WORDS: dict[str, object] = {"model": "tiny", "dtype": "float32", "random": None}
PLACES = {"there": "4MiB", "here": "2370KiB"}


def words_of(ranks: int, **other: object) -> dict[str, object]:
    """An engine with so many ranks, as vllm/pools.py describes it."""
    return {**WORDS, "heads": HEADS // ranks, "shards": (ranks, 1), **other}


class Machines:
    """Two, with engines that share nothing; the first one's pools are served through a cable each.
    At the end nothing is held, and all pools are whole."""

    def __init__(self, folder: Path, stack: ExitStack):
        self._folder, self._stack = folder, stack
        self.cables: list[Cable] = []
        self.engines: list[Engine] = []
        self.paths: list[str] = []
        self.secret = folder / "secret"
        self.secret.write_bytes(SECRET)
        self.secret.chmod(0o600)

    def engine(
        self,
        place: str,
        ranks: int,
        given: Mapping[str, object] | None = None,
        words: Mapping[str, object] | None = None,
    ) -> Engine:
        paths = [str(self._folder / f"{place}-{rank}of{ranks}") for rank in range(ranks)]
        for rank, path in enumerate(paths):
            if path not in self.paths:
                make_pool(path, layout_among(layout_of(0), rank, ranks), PLACES[place])
                self.paths.append(path)
        settings = Settings.model_validate({"deadline_s": 20, **(given or {})})
        words = words_of(ranks) if words is None else words
        self.engines.append(Engine(paths, settings, 1024, words=words))
        return self.engines[-1]

    def serve(self, ranks: int) -> dict[str, object]:
        """What the other side's settings say."""
        for rank in range(ranks):
            pool = CXLPool.open(str(self._folder / f"there-{rank}of{ranks}"), threads=1)
            self._stack.enter_context(pool)
            server = self._stack.enter_context(Server(pool, ("127.0.0.1", 0), SECRET))
            cable = Cable(f"127.0.0.1:{server.address[1]}")
            self.cables.append(self._stack.enter_context(cable))
        remote = tuple(cable.address for cable in self.cables)
        return {"remote": remote, "remote_secret": str(self.secret)}

    def both(self, there: int, here: int, **given: object) -> tuple[Engine, Engine]:
        first = self.engine("there", there)
        return first, self.engine("here", here, {**self.serve(there), **given})


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with ExitStack() as stack:
        made = Machines(tmp_path, stack)
        yield made
        for engine in made.engines:
            engine.close()
    for path in made.paths:
        with CXLPool.open(path, threads=1) as pool:
            audit(pool)
            assert pool.stats()["pages_held"] == 0


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pools look like another machine's, though they have files; the tier looks there soon."""
    monkeypatch.setattr("cxlkv.transport.loopback._boot", lambda: "")
    monkeypatch.setattr(tier, "PAUSE_S", (0.02, 0.1))


def tier_of(engine: Engine) -> tier.RemoteTier:
    """The first rank's tier."""
    prefetch = engine.scheduling._prefetch
    assert prefetch is not None
    found = prefetch.tiers[0].remote
    assert found is not None
    return found


def serve(engine: Engine, *numbers: int) -> list[int]:
    """A request for each text; how many of its tokens were there."""
    return [engine.run_to_end(f"{number}", text(number, TEXT)) for number in numbers]


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize(("there", "here"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_prefill_there_decode_here(machines: Machines, there: int, here: int, load: str) -> None:
    """More texts than the own pool holds, twice; blocks are compared at every step."""
    first, second = machines.both(there, here, load=load)
    texts = list(range(8))
    assert serve(first, *texts) == [0] * 8
    assert serve(second, *texts) == [160] * 8
    assert serve(second, *texts) == [160] * 8
    come = second.scheduling.come_tokens
    assert come["pulled_tokens"] >= 8 * 160
    assert come["restored_tokens"] == 0
    assert not second.scheduling.failures


def test_only_what_is_lacking_comes(machines: Machines) -> None:
    first, second = machines.both(2, 1)
    whole = text(1, TEXT)
    first.serve("a", whole)
    second.run_to_end("a", whole[:62])
    second.add("b", whole)
    second.settle()
    assert second.cached["b"] == 160
    assert second.scheduling.come_tokens == {"restored_tokens": 0, "pulled_tokens": 60 + 100}
    assert tier_of(second).stats()["pages"] == 160 // TOKENS


def test_an_adapter_of_other_ranks(machines: Machines, tmp_path: Path) -> None:
    """The same text with an adapter is another one; only requests with that adapter find it."""
    first, second = machines.both(2, 1)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        weights = safetensors(tmp_path / name / "adapter.safetensors")
    change(weights, -1)
    cached = {}
    for engine, adapters in ((first, "a"), (second, "ab")):
        for name in adapters:
            engine.join(
                Request(name, text(1, TEXT), None, Adapter(str(tmp_path / name), ord(name)))
            )
            engine.settle()
            cached[name] = engine.cached[name]
    second.add("none", text(1, TEXT))
    second.settle()
    assert (cached, second.cached["none"]) == ({"a": 160, "b": 0}, 0)


@pytest.mark.parametrize("there", [1, 2])
@pytest.mark.parametrize("word", ["model", "dtype"])
def test_what_is_another_models_is_a_miss(machines: Machines, there: int, word: str) -> None:
    first = machines.engine("there", there, words=words_of(there, **{word: "other"}))
    second = machines.engine("here", 1, machines.serve(there))
    assert serve(first, 1) == serve(second, 1) == [0]
    assert not second.scheduling.failures


def test_after_a_reset_nothing_is_found_there(machines: Machines) -> None:
    first, second = machines.both(2, 1)
    serve(first, 1)
    second.scheduling.reset()
    assert serve(second, 1) == [0]


def test_a_request_may_say_not_to_wait(machines: Machines) -> None:
    first, second = machines.both(1, 1)
    serve(first, 1)
    second.serve("far", text(1, TEXT), tier="far")
    assert second.cached["far"] == 0


@pytest.mark.parametrize("act", [Cable.cut, Cable.hang], ids=["cut", "hangs"])
def test_a_link_that_fails_costs_who_waits_for_it_once(
    machines: Machines, act: Callable[[Cable], None]
) -> None:
    first, second = machines.both(2, 1, deadline_s=1.0)
    serve(first, *range(6))
    assert serve(second, 0) == [160]
    machines.cables[1].after(20_000, act)
    assert serve(second, 1) != [160]
    began = time.monotonic()
    assert serve(second, 2, 3, 4) == [0, 0, 0]
    assert time.monotonic() - began < 1.0, "they waited for it, too"
    assert second.scheduling.failures["remote"] == 1
    machines.cables[1].mend()
    until(lambda: tier_of(second).is_on)
    assert serve(second, 5) == [160]


def test_anything_in_any_order(machines: Machines, seed: int) -> None:
    """Requests that end, are preempted, come again; links that are cut, hang, and are mended; a
    pool that is too small: every block is right at every step, and all that waits goes on."""
    rng = random.Random(seed)
    first, second = machines.both(2, 1, deadline_s=0.5)
    serve(first, *range(10))
    for turn in range(40):
        if rng.random() < 0.2:
            cable = rng.choice(machines.cables)
            cable.after(rng.randrange(60_000), rng.choice([Cable.cut, Cable.hang, Cable.mend]))
        second.add(f"r{turn}", text(rng.randrange(12), rng.randrange(40, TEXT)))
        for _ in range(rng.randrange(4)):
            second.step()
        running = [n for n, one in second.requests.items() if one not in second.waiting]
        if running and rng.random() < 0.2:
            second.preempt(rng.choice(running))
        while len(second.requests) > 3:
            second.end(rng.choice(list(second.requests)))
    second.settle()
    for cable in machines.cables:
        cable.mend()


def test_other_ranks_whose_pages_are_no_parts_of_ours_are_refused(machines: Machines) -> None:
    given = {"remote": ("tcp://a:1",) * 2, "remote_secret": str(machines.secret)}
    settings = Settings.model_validate(given)
    machines.engine("here", 1)
    with CXLPool.open(machines.paths[0], threads=1) as pool:
        for words, heads, said in (
            (words_of(1, random="0"), HEADS, "--load-format dummy"),
            (words_of(1), 1, "1 kv heads cannot be dealt out"),
        ):
            with pytest.raises(BadArgumentError, match=said):
                open_remote(pool, settings, words, heads)
        found = open_remote(pool, settings, words_of(1), HEADS)
        assert found is not None
        found.close()
