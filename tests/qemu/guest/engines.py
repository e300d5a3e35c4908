"""vLLM's recorded requests on hosts of one pool on a dax device: python -m ... a|b|c.

Each host has the adapter's scheduler's and worker's sides, on the pool that their settings open.
Host a is killed in a save, boots again, is killed in a load, boots again, is stopped for longer
than its lease in a load and in saves, and comes back each time: fenced, declared off, and when host
c has taken its number. At last it leaves, and comes back without room. Host b goes on meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

import numpy as np

from cxlkv import CXLPool
from cxlkv.adapters.vllm.settings import read_settings
from cxlkv.arrays import PageIds
from cxlkv.errors import PoolFullError
from cxlkv.stats import find
from tests.qemu.guest.engine import LOAD, SAVE, Engine
from tests.qemu.guest.recording import read
from tests.qemu.guest.steps import (
    DEVICE,
    SHARED,
    bind_device,
    check,
    end_parts,
    part,
    say,
    token_ids,
    wait_for,
    wait_until,
)

A, B = 0, 1  # the numbers that the hosts take
SETTINGS = read_settings(
    {
        "where": DEVICE,
        "capacity": "64MiB",
        "sharing": "software",
        "hosts": 3,
        "lease_s": 4,
        "deadline_s": 120,  # guests are slow
    }
)
SERVED, SAVING, OWN, LATER, AFTER, LAST = "served", "saving", "own", "later", "after", "last"
"""Tenants, who have the same requests with other texts: whom a serves first, over whom it is
killed, whom b serves, over whom a is stopped, twice, and whom it serves without room."""
SOME = 64  # pages
ROOM = 192  # pages: more than a tenant's texts have
NEVER = "the end of a"


def standing(kind: str, number: int, said: str, until: str) -> Callable[[str], None]:
    """For Engine.between: in the middle of the step of this number, of those of this kind, says so
    and waits."""
    steps = count(1)

    def between(now: str) -> None:
        if now == kind and next(steps) == number:
            say(said)
            wait_for(until)

    return between


def state(engine: Engine, host: int) -> str:
    return engine.pool.admin.hosts()[host].state


def find_all(engine: Engine, *tenants: str) -> None:
    """Find as many tokens of each text as recorded."""
    evicted = engine.worker.tiers.stats()["evicted_pages"]
    print(f"finds {tenants}; has evicted {evicted} pages", flush=True)
    tokens = [engine.find(tenant) for tenant in tenants]
    print(f"found {tokens} tokens", flush=True)


def check_idle(engine: Engine) -> None:
    """Between two runs this host holds nothing, and nothing is wrong."""
    stats = engine.pool.stats()
    held = {name: stats[f"pages_{name}"] for name in ("held", "borrowed", "withdrawn")}
    assert not any(held.values()), held
    check(engine.pool)


def get_room(engine: Engine) -> None:
    """For the texts of a tenant. Who is as new owns nothing; whoever asks for more than others have
    empty has them evict texts that are to be found later."""
    taken: list[PageIds] = []

    def has_room() -> bool:
        with suppress(PoolFullError):
            taken.append(engine.pool.pages.alloc(SOME))
        return len(taken) * SOME >= ROOM

    wait_until(has_room, "room")
    engine.pool.pages.free(np.concatenate(taken))


def take_all_free(engine: Engine) -> int:
    """All pages that this host can get are taken and freed; how many."""
    taken: list[PageIds] = []
    for wanted in (SOME, 1):
        with suppress(PoolFullError):
            while True:
                taken.append(engine.pool.pages.alloc(wanted))
    pages = np.concatenate(taken)
    engine.pool.pages.free(pages)
    return len(pages)


# ---- host a ----


def first_life(engine: Engine) -> None:
    with part("requests are served and saved"):
        assert engine.host.number == A
        engine.serve(SERVED)
        assert engine.missing(SERVED) == 0
        check_idle(engine)
    say("a has served")
    wait_for("b has found")
    engine.between = standing(SAVE, 6, "a stands in a save", NEVER)
    engine.serve(SAVING)  # until the power fails


def second_life(engine: Engine) -> None:
    with part("killed in a save: the next boot is the same host and finds all"):
        assert engine.host.number == A
        check_idle(engine)
        find_all(engine, SERVED, SAVING, OWN)
        check_idle(engine)
    engine.between = standing(LOAD, 3, "a stands in a load", NEVER)
    engine.find(OWN)  # until the power fails


def third_life(engine: Engine) -> None:
    with part("killed in a load and declared off: the next boot is as if new and finds all"):
        assert engine.host.number == A
        find_all(engine, SERVED, SAVING, OWN)
        get_room(engine)
        check_idle(engine)
    with part("stopped in a load and fenced: goes on with what it held"):
        engine.between = standing(LOAD, 3, "a waits in a load", "a goes on in its load")
        find_all(engine, OWN)
        assert not engine.failures, engine.failures
        check_idle(engine)
    with part("stopped in a save and declared off: opens the pool anew and finds all"):
        stop_in_a_save(engine, LATER, "a waits in a save", "a goes on in its save")
        find_all(engine, SERVED, LATER)
        check_idle(engine)
    say("a has served again")
    with part("stopped until another machine has its number: comes back with another one"):
        stop_in_a_save(engine, AFTER, "a waits for c", "a goes on beside c")
        assert engine.host.number not in (A, B)
        find_all(engine, SERVED, AFTER)
        check_idle(engine)
    say("a is back")
    wait_for("b has found what a served last")


def stop_in_a_save(engine: Engine, tenant: str, said: str, until: str) -> None:
    """Serves on without the pool; when it is open again, serves the same requests anew."""
    before = engine.failures["host"]
    engine.between = standing(SAVE, 6, said, until)
    engine.serve(tenant)
    assert engine.failures["host"] > before, engine.failures
    wait_until(engine.take_reopened, "pool that is open again")
    print(f"now host {engine.host.number}", flush=True)
    get_room(engine)
    engine.serve(tenant)


def life_without_room(engine: Engine) -> None:
    with part("without room: gets some of the other host's"):
        assert engine.host.extents == 0
        wait_until(lambda: all_saved(engine, LAST), "room for all texts")
        assert engine.failures["full"], "there was room"
        print(f"{engine.failures['full']} requests were not saved at first", flush=True)
        find_all(engine, LAST)
        check_idle(engine)


def all_saved(engine: Engine, tenant: str) -> bool:
    """Serves its requests; those that get no room are not saved."""
    engine.serve(tenant)
    return engine.missing(tenant) == 0


def host_a(open_engine: Callable[[], Engine]) -> None:
    engine = open_engine()
    if not (SHARED / "a is dead").exists():
        first_life(engine)
    elif not (SHARED / "a is dead again").exists():
        second_life(engine)
    third_life(engine)
    engine.close()
    say("a has left")
    wait_for("b has all pages")
    engine = open_engine()
    life_without_room(engine)
    say("a has room")
    wait_for("b has found the last")
    engine.close()
    say("a has left again")


# ---- host b ----


def while_a_lives(engine: Engine) -> None:
    with part("another host finds all, as many tokens as recorded"):
        assert engine.host.number == B
        find_all(engine, SERVED)
        check_idle(engine)
    say("b has found")


def after_the_kill_in_a_save(engine: Engine) -> None:
    with part("a host was killed in a save: is fenced, its texts are found or computed"):
        missing, whole = engine.missing(SAVING), engine.missing("nobody")
        print(f"{missing} of {whole} tokens are missing", flush=True)
        assert 0 < missing < whole
        wait_until(lambda: state(engine, A) == "silent", "silence of a")
        engine.pool.admin.fence(A)
        assert state(engine, A) == "fenced"
        find_all(engine, SERVED)
        for tenant in (SAVING, OWN):
            engine.serve(tenant)
        find_all(engine, SAVING, OWN)
        check_idle(engine)
    say("b goes on")


def after_the_kill_in_a_load(engine: Engine) -> None:
    with part("a host was killed in a load: what it held is free when it is declared off"):
        engine.forget(OWN)
        held = engine.pool.stats()["pages_withdrawn"]
        print(f"a held {held} pages that are forgotten", flush=True)
        assert held
        take_all_free(engine)
        assert engine.pool.stats()["pages_withdrawn"] == held, "taken from a host that may live"
        wait_until(lambda: state(engine, A) == "silent", "silence of a")
        engine.pool.admin.fence(A, confirmed_off=True)
        wait_until(lambda: not engine.pool.stats()["pages_withdrawn"], "end of what a held")
        stats = engine.pool.stats()
        taken = take_all_free(engine)
        assert taken == stats["pages_total"] - stats["pages_published"], (taken, stats)
        find_all(engine, SERVED, SAVING)
        engine.serve(OWN)
        find_all(engine, OWN)
        check_idle(engine)
    say("b has all but what a published")


def while_a_is_stopped(engine: Engine) -> None:
    with part("a host was stopped: is fenced, and declared off, and others take its pages"):
        wait_for("a is stopped in its load")
        wait_until(lambda: state(engine, A) == "silent", "silence of a")
        engine.pool.admin.fence(A)
        assert state(engine, A) == "fenced"
        find_all(engine, SERVED)
        say("b has fenced a")
        wait_for("a is stopped in its save")
        wait_until(lambda: state(engine, A) == "silent", "silence of a")
        engine.pool.admin.fence(A, confirmed_off=True)
        take_all_free(engine)
        find_all(engine, SERVED)
        check_idle(engine)
    say("b has declared a off")
    wait_for("a has served again")
    with part("what a host serves that was declared off is found"):
        find_all(engine, LATER)
    say("b has found what a served again")


def fill(engine: Engine) -> None:
    """With published pages, until this host has all of the pool and evicts."""
    pool, layout = engine.worker.pool, engine.recording.layout
    tokens = SOME * layout.page_tokens
    rows = np.ones((tokens, layout.kv_heads, layout.head_dim), np.float32)
    for number in count(1):
        sequence = pool.sequence()
        for layer in range(layout.layers):
            sequence.append(layer, rows, rows)
        pool.publish_prefix(sequence, token_ids(number, tokens))
        sequence.release()
        if engine.worker.tiers.stats()["evicted_pages"]:
            return


def after_the_returns(engine: Engine) -> None:
    with part("what it serves under another number is found"):
        find_all(engine, SERVED, AFTER)
        check_idle(engine)
    say("b has found what a served last")
    for host in "ac":
        wait_for(f"{host} has left")
    fill(engine)
    say("b has all pages")
    wait_for("a has room")
    with part("what the host served that had no room is found; at the end nothing is held"):
        find_all(engine, LAST)
        say("b has found the last")
        wait_for("a has left again")
        stats = engine.pool.stats()
        taken = take_all_free(engine)
        assert taken == stats["pages_total"] - stats["pages_published"], (taken, stats)
        check_idle(engine)


def host_b(open_engine: Callable[[], Engine]) -> None:
    wait_for("a has served")
    engine = open_engine()
    while_a_lives(engine)
    wait_for("a is dead")
    after_the_kill_in_a_save(engine)
    wait_for("a is dead again")
    after_the_kill_in_a_load(engine)
    while_a_is_stopped(engine)
    wait_for("a is back")
    after_the_returns(engine)
    engine.close()
    CXLPool.remove(DEVICE)
    assert find([DEVICE]) == []


# ---- host c ----


def host_c(open_engine: Callable[[], Engine]) -> None:
    engine = open_engine()
    with part("another machine takes the number of a stopped host and finds all"):
        assert engine.host.number == A
        find_all(engine, SERVED, OWN)
        check_idle(engine)
        say("c has the number of a")
        wait_for("a is back")
        find_all(engine, SERVED, AFTER)
        check_idle(engine)
    engine.close()
    say("c has left")


def main(name: str) -> None:
    bind_device()
    {"a": host_a, "b": host_b, "c": host_c}[name](partial(Engine, read(), SETTINGS))
    end_parts()


if __name__ == "__main__":
    main(sys.argv[1])
