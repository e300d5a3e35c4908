"""Numbers that mean nothing, in every public call: NaN, infinities, huge, negative, of other types.

The calls are those of the Python reference (`API` of docs/site/reference.py), and their parameters
those that signatures declare as numbers: a new one is tried without a line here, and a test fails
where it cannot be. Each is given each odd number in turn, the others being right: it works, or
raises an error of cxlkv's own, at once, and holds nothing afterwards. What no number is at all, NaN
too, is always refused: what a comparison lets pass would only show up later, elsewhere.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import os
import re
import resource
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, ValuesView
from contextlib import AbstractContextManager, ExitStack, suppress
from copy import deepcopy
from decimal import Decimal
from functools import cached_property, partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import NamedTuple, Protocol, cast

import numpy as np
import pytest
import torch
import typer
import yaml
from hypothesis import given as given_by
from hypothesis import settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from cxlkv import (
    Batch,
    Budget,
    CXLPool,
    KVLayout,
    LayerGroup,
    ObjectPool,
    RowForm,
    Sequence,
    config,
)
from cxlkv.adapters import transformers
from cxlkv.arrays import Floats
from cxlkv.emulation import profiles
from cxlkv.emulation.sharing import Stream
from cxlkv.errors import CXLKVError
from cxlkv.gpu.decode import Decoder
from cxlkv.layout import Rotary
from cxlkv.ops.cli import app
from cxlkv.prefix import PageKeys, prefix_keys
from cxlkv.tiers import Tiers
from cxlkv.tiers.quota import Quota
from cxlkv.transport import Remote, RemoteHit, Server

from .support.lengths import nightly
from .support.small_models import SHAPE
from .support.texts import DIM, HEADS, SMALL, grown, numbers

ROOT = Path(__file__).parents[1]
LIMIT_S = 1.0
ROOM_BYTES = 1 << 30  # of addresses: more than any of these calls has a use for
NO_NUMBERS: tuple[object, ...] = (
    float("nan"),
    np.float16("nan"),
    Decimal("nan"),
    1j,
    "x",
    b"",
    [],
    object(),
)
ODD = (
    *NO_NUMBERS,
    *(None, True, float("inf"), float("-inf"), 1e39, 1e-320, -1, -0.0, 0.5, 0, Decimal("0.5")),
    *(2**31, 2**32 - 1, 2**63, 2**64, 10**10, -(2**63), 10**400, np.int8(-1)),
    *(np.uint64(2**64 - 1), np.float32(0.5), np.longdouble(1), np.datetime64("NaT")),
)
IDS = range(8)
SECRET = b"x" * 32
OBJECTS = KVLayout.objects("4KiB")


class Function(Protocol):
    def __call__(self, *args: object, **kwargs: object) -> object: ...


class Call(NamedTuple):
    """A function, or a method with what it is called on; and its parameters that are numbers."""

    name: str
    of: str  # the class of a method; "" of functions, and of what makes an object
    function: Function
    numbers: tuple[str, ...]


def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/site/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def public(name: str) -> object:
    """What a dotted name of the reference stands for; None where an engine is missing."""
    module, _, rest = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), rest)
    except ImportError:
        assert name.startswith("cxlkv.adapters"), name
        return None


IS_NUMBER = re.compile(
    r"(?<![\w.])(int|float|HostNumber|BudgetLike|SlotCounts|Budgets)\b|ArrayLike"
)


def call_of(name: str, of: str, function: Function) -> Call:
    found = inspect.signature(function).parameters.values()
    named = tuple(p.name for p in found if IS_NUMBER.search(str(p.annotation)))
    return Call(name, of, function, named)


def calls() -> Iterator[Call]:
    module = reference()
    for name in [name for _, _, names in module.API.values() for name in names]:
        thing, short = public(name), name.rpartition(".")[2]
        if thing is None:
            continue
        if not inspect.isclass(thing):
            yield call_of(short, "", cast(Function, thing))
            continue
        if short in module.CONSTRUCTED or issubclass(thing, tuple):
            yield call_of(short, "", cast(Function, thing))
        for word in sorted(vars(thing).keys() | vars(thing.__mro__[1]).keys()):
            found = inspect.getattr_static(thing, word)
            if word.startswith("_") or not callable(getattr(thing, word)):
                continue
            if isinstance(found, classmethod | staticmethod):
                yield call_of(f"{short}.{word}", "", getattr(thing, word))
            elif inspect.isfunction(found) and found.__module__.startswith("cxlkv"):
                yield call_of(f"{short}.{word}", short, found)


CALLS = {call.name: call for call in calls() if call.numbers}


class World:
    """What calls are made on and with; each thing is made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open = ExitStack()  # until all calls are done
        self.step = ExitStack()  # until one is

    @cached_property
    def pool(self) -> CXLPool:
        pool = CXLPool.create("anonymous:", layout=SMALL, capacity="3MiB", threads=1)
        self.open.enter_context(pool)
        pool.publish_prefix(grown(pool, IDS), IDS)
        return pool

    @cached_property
    def objects(self) -> ObjectPool:
        return self.open.enter_context(
            ObjectPool.create("anonymous:", layout=OBJECTS, capacity="3MiB", threads=1)
        )

    @cached_property
    def file(self) -> Path:
        path = self.folder / "there.pool"
        if not path.exists():
            CXLPool.create(path, layout=SMALL, capacity="3MiB", threads=1).close()
        return path

    @cached_property
    def tiers(self) -> Tiers:
        return self.open.enter_context(Tiers(self.pool))

    @cached_property
    def server(self) -> Server:
        return self.open.enter_context(Server(self.pool, ("127.0.0.1", 0), SECRET))

    @cached_property
    def remote(self) -> Remote:
        where = f"127.0.0.1:{self.server.address[1]}"
        return self.open.enter_context(Remote(where, SECRET))

    @cached_property
    def remote_hit(self) -> RemoteHit:
        return self.remote.match(self.keys)

    @cached_property
    def keys(self) -> PageKeys:
        return prefix_keys(IDS, SMALL.page_tokens)

    @cached_property
    def object_file(self) -> Path:
        path = self.folder / "objects.pool"
        ObjectPool.create(path, layout=OBJECTS, capacity="3MiB", threads=1).close()
        return path

    @cached_property
    def model(self) -> LlamaForCausalLM:
        config = LlamaConfig.from_dict(SHAPE)
        assert isinstance(config, LlamaConfig)
        return LlamaForCausalLM(config)

    @cached_property
    def model_pool(self) -> CXLPool:
        layout = transformers.layout_of(self.model)
        return self.open.enter_context(
            CXLPool.create("anonymous:", layout=layout, capacity="3MiB", threads=1)
        )

    @cached_property
    def cache(self) -> transformers.CXLCache:
        made = transformers.CXLCache(
            self.model_pool, self.model, sequences=[self.model_text().fork()]
        )
        self.open.callback(made.release)
        return made

    def model_text(self) -> Sequence:
        layout = self.model_pool.layout
        rows = np.ones((17, layout.kv_heads, layout.head_dim), np.float32)
        text = self.model_pool.sequence()
        self.step.callback(text.release)
        for layer in range(layout.layers):
            text.append(layer, rows, rows)
        return text

    @cached_property
    def last(self) -> transformers.LastQueries:
        cache = transformers.CXLCache(self.model_pool, self.model)
        self.open.callback(cache.release)
        self.model.set_attn_implementation("cxlkv")
        with transformers.LastQueries(cache) as last:
            self.model(torch.tensor([IDS]), past_key_values=cache)
        return last

    @cached_property
    def requests(self) -> transformers.CXLRequests:
        made = transformers.CXLRequests(self.model_pool, self.model)
        made.load("a", None, 0)
        return made

    def idle_decoder(self) -> Decoder:
        return self.step.enter_context(
            Decoder(self.pool, requests=1, q_heads=2 * HEADS, budget=Budget(pages=1), pages_max=8)
        )

    def decoder(self) -> Decoder:
        made = self.idle_decoder()
        made.add(self.sequence())
        return made

    def stepping(self) -> Decoder:
        made = self.decoder()
        made.begin()
        self.step.callback(made.abandon)
        return made

    def sequence(self) -> Sequence:
        found = grown(self.pool, IDS)
        self.step.callback(found.release)
        return found

    def batch(self) -> Batch:
        return self.pool.batch([self.sequence()])

    @cached_property
    def query(self) -> Floats:
        return np.ones((2 * HEADS, DIM), np.float32)


ROWS = numbers(range(2), 0, 0)

ON: Mapping[str, Callable[[World], object]] = {
    "CXLPool": lambda w: w.pool,
    "ObjectPool": lambda w: w.objects,
    "Sequence": World.sequence,
    "Batch": World.batch,
    "KVLayout": lambda w: SMALL,
    "Rotary": lambda w: Rotary.of(1e4, DIM),
    "Admin": lambda w: w.pool.admin,
    "Pages": lambda w: w.pool.pages,
    "Hotness": lambda w: w.pool.hotness,
    "Records": lambda w: w.pool.records,
    "Budget": lambda w: Budget(),
    "Selection": lambda w: w.sequence().select(0, w.query),
    "RowForm": lambda w: RowForm("int8", "float32", DIM),
    "Tiers": lambda w: w.tiers,
    "Quota": lambda w: Quota(w.tiers, 8),
    "Remote": lambda w: w.remote,
    "CXLCache": lambda w: w.cache,
    "CXLRequests": lambda w: w.requests,
    "FarLayer": lambda w: w.cache.layers[0],
    "LastQueries": lambda w: w.last,
    "CXLPool.use_worker": lambda w: w.open.enter_context(CXLPool.open(w.file)),
    "Decoder": World.decoder,
    "Decoder.add": World.idle_decoder,
    "Decoder.hint": World.stepping,
    "Decoder.layer": World.stepping,
}


def checksums(w: World) -> object:
    return np.zeros((SMALL.layers, 1, HEADS, 4), np.uint32)


def block_rows(w: World) -> object:
    return np.zeros((4, HEADS, SMALL.page_tokens, DIM), np.float32)


GOOD: Mapping[str, Callable[[World], object]] = {
    "where": lambda w: "anonymous:",
    "path": lambda w: w.file,
    "layout": lambda w: SMALL,
    "ObjectPool.layout": lambda w: OBJECTS,
    "ObjectPool.path": lambda w: w.object_file,
    "capacity": lambda w: "3MiB",
    "keys": lambda w: w.keys,
    "ObjectPool.keys": lambda w: [b"a"],
    "token_ids": lambda w: list(IDS),
    "seq": World.sequence,
    "tokens_per_key": lambda w: SMALL.page_tokens,
    "threads": lambda w: 1,
    "layer": lambda w: 0,
    "k": lambda w: ROWS,
    "v": lambda w: ROWS,
    "q": lambda w: w.query,
    "Batch.q": lambda w: w.query[None],
    "Batch.decode.q": lambda w: np.stack([w.query] * 2),
    "starts": lambda w: [0, 1],
    "Batch.append.starts": lambda w: [0, 2],
    "Batch.decode.starts": lambda w: [0, 2],
    "blocks": lambda w: [0],
    "first": lambda w: [0],
    "Sequence.places.first": lambda w: 0,
    "values": block_rows,
    "Batch.keys": block_rows,
    "pages": lambda w: w.pool.pages.alloc(1),
    "Sequence.append.v": lambda w: ROWS,
    "Decoder.add.sequence": World.sequence,
    "Decoder.layer.v": lambda w: torch.ones(1, 1, HEADS, DIM),
    "Sequence.attach.checksums": checksums,
    "Batch.attach.checksums": checksums,
    "Pages.retry.pages": lambda w: 1,
    "Pages.want_room.pages": lambda w: 1,
    "Tiers.reclaim.pages": lambda w: 1,
    "Quota.pages": lambda w: 8,
    "Budget.pages": lambda w: 1,
    "call": lambda w: lambda: None,
    "budgets": lambda w: Budget(pages=1),
    "picked": lambda w: w.batch().select(0, w.query[None], [0, 1], Budget(pages=1, per="sequence")),
    "tokens": lambda w: 1,
    "layers": lambda w: 1,
    "kv_heads": lambda w: HEADS,
    "head_dim": lambda w: DIM,
    "object_bytes": lambda w: 4096,
    "groups": lambda w: [LayerGroup(layers=1, kv_heads=1, head_dim=8)],
    "order": lambda w: [0],
    "shard": lambda w: (0, 1, 0, 1),
    "channels": lambda w: 8,
    "encoding": lambda w: "int8",
    "frequencies": lambda w: (1.0,),
    "theta": lambda w: 1e4,
    "x": lambda w: np.ones((1, 2, DIM), np.float32),
    "positions": lambda w: [0, 1],
    "host": lambda w: 0,
    "hosts": lambda w: 1,
    "priority": lambda w: 1,
    "count": lambda w: 1,
    "hashes": lambda w: b"".join(w.keys),
    "page_tokens": lambda w: 16,
    "by_layer": lambda w: {0: 0.5},
    "visible_pages": lambda w: 4,
    "ranges": lambda w: np.zeros((1, 4), np.int64),
    "out": lambda w: np.zeros(64, np.uint8),
    "sizes": lambda w: [64],
    "addresses": lambda w: [0],
    "dtype": lambda w: "float32",
    "dim": lambda w: DIM,
    "size": lambda w: 8 * 4 * DIM,
    "pool": lambda w: w.pool,
    "tensors": lambda w: [("ssm", (2, 3), "float32")],
    "positions.hit": lambda w: 0,
    "known": lambda w: 0,
    "Records.state_names.pages": lambda w: 1,
    "names": lambda w: w.pool.records.names(b"".join(w.keys))[:, 0, 0],
    "tiers": lambda w: w.tiers,
    "profile": lambda w: profiles.named("spr-ddr5-local")[1],
    "streams": lambda w: [Stream(64)],
    "secret": lambda w: SECRET,
    "listen": lambda w: ("127.0.0.1", 0),
    "address": lambda w: f"127.0.0.1:{w.server.address[1]}",
    "hit": lambda w: w.remote_hit,
    "layout_crc": lambda w: 0,
    "codes": lambda w: np.zeros(1, np.int32),
    "record_bytes": lambda w: 1,
    "region_path": lambda w: w.file,
    "model": lambda w: w.model,
    "CXLCache.pool": lambda w: w.model_pool,
    "CXLRequests.pool": lambda w: w.model_pool,
    "CXLRequests.keys": lambda w: w.requests.keys(list(range(16))),
    "CXLRequests.names": lambda w: ["a"],
    "CXLRequests.load.request": lambda w: f"request {len(w.requests.sequences)}",
    "repeats": lambda w: 2,
    "tokens_to_remove": lambda w: 1,
    "audit_hits": lambda w: 1,
    "own": World.model_text,
    "place": lambda w: 0,
    "Selection.place": lambda w: 0,
    "ids": lambda w: list(IDS),
    "request": lambda w: "a",
    "Decoder.request": lambda w: 0,
    "CXLRequests.truncate.tokens": lambda w: 0,
    "Quota.of.size": lambda w: "64KiB",
    "handle": lambda w: None,
    "cache": lambda w: w.cache,
    "sequence": lambda w: 0,
    "requests": lambda w: 1,
    "q_heads": lambda w: 2 * HEADS,
    "budget": lambda w: Budget(pages=1),
    "pages_max": lambda w: 8,
    "Decoder.q": lambda w: torch.ones(1, 1, 2 * HEADS, DIM),
    "Decoder.k": lambda w: torch.ones(1, 1, HEADS, DIM),
}

BY_STEPS = "steps ask it, in each layer, with numbers that are checked already"
BY_MODELS = "transformers calls it, with numbers of the model or of its own"
WITHOUT: Mapping[str, str] = {
    "Buffers": "a named tuple, of which nothing is checked: what takes it checks it",
    "RowForm": "a named tuple: stored_bytes() and what takes it check it",
    "Selection.at": "an index as numpy takes it, of the arrays that the selection has",
    "Moved.count": "what pull() and push() count by",
    "Remote.shape": "what pull() and push() compare",
    "StatsCollector": "stats is a function that gives numbers",
    "Budget.chooses": BY_STEPS,
    "Budget.row": BY_STEPS,
    "Budget.decode_row": BY_STEPS,
    "attention": BY_MODELS,
    "padding_mask": BY_MODELS,
    "FarLayer.get_mask_sizes": BY_MODELS,
    "CXLCache.batch_repeat_interleave": BY_MODELS,
    "CXLCache.crop": BY_MODELS,
    "CXLCache.get_conv_state": BY_MODELS,
    "CXLCache.update_conv_state": BY_MODELS,
    "CXLCache.states": BY_MODELS,
    "CXLCache.with_earlier": BY_MODELS,
    "Step.last": BY_MODELS,
}
"""Calls, or numbers of one, that are not tried, and why."""
NEVER_RIGHT = {
    "Admin.fence": "another host would have to be there, and silent",
    "CXLCache.compile": "a GPU would have to be there",
}


def given(call: Call, world: World) -> dict[str, object]:
    """Right values for all that the call needs."""
    found: dict[str, object] = {}
    for one in inspect.signature(call.function).parameters.values():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) or one.name == "self":
            continue
        short = call.name.partition(".")[0]
        places = (f"{call.name}.{one.name}", f"{short}.{one.name}", one.name)
        if one.default is one.empty or places[0] in GOOD:
            make = next((GOOD[name] for name in places if name in GOOD), None)
            assert make is not None, f"{call.name}({one.name}=): GOOD has no value of it"
            found[one.name] = make(world)
    return found


SEVERAL = re.compile(r"ArrayLike|tuple\[|Sequence\[|Mapping\[|Budgets|SlotCounts")


def alike(call: Call, name: str, odd: object, world: World) -> Iterator[object]:
    """The odd number, and where several are wanted, one among them."""
    hint = str(inspect.signature(call.function).parameters[name].annotation)
    several = SEVERAL.search(hint)
    if not several or not isinstance(odd, list):
        yield odd
    if several:
        good = given(call, world).get(name)
        if isinstance(good, np.ndarray):
            good = good.tolist()
        if isinstance(good, list) and isinstance(good[0], list):
            good = [[odd, *good[0][1:]], *good[1:]]
            yield good
        elif isinstance(good, tuple | list):
            yield type(good)([odd, *good[1:]])
        else:
            yield {0: odd} if "Mapping" in hint else [odd]


class Hangs(Exception):
    """A call took more than LIMIT_S, several times over."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise Hangs


def close(found: object) -> None:
    if isinstance(found, AbstractContextManager) and not hasattr(found, "close"):
        with found:
            return
    for word in ("close", "release"):
        if hasattr(found, word) and not inspect.signature(getattr(found, word)).parameters:
            getattr(found, word)()
            return


def is_in(sought: object, value: object) -> bool:
    """Whether it is the value, or in it."""
    if sought is value:
        return True
    inner = value.values() if isinstance(value, dict) else value
    return isinstance(inner, list | tuple | ValuesView) and any(is_in(sought, one) for one in inner)


def on_of(call: Call, world: World) -> list[object]:
    """What it is called on."""
    if not call.of:
        return []
    assert call.of in ON, f"{call.name}: ON has nothing to call it on"
    return [ON.get(call.name, ON[call.of])(world)]


def fault_of(act: Callable[[], object], odd: object) -> str:
    """What is wrong with how a call goes that is given this; "" if nothing."""
    began = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 5 * LIMIT_S)
    try:
        close(act())
        raised = None
    except CXLKVError as error:
        raised = error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"raises {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    took = time.monotonic() - began
    if took > LIMIT_S:
        return f"takes {took:.1f} s"
    if raised is None and any(is_in(each, odd) for each in NO_NUMBERS):
        return "is taken"
    return ""


def state() -> tuple[int, int, int]:
    """What this process holds: threads, descriptors, mappings of shared memory."""
    gc.collect()
    mapped = Path("/proc/self/maps").read_text()
    return threading.active_count(), len(os.listdir("/proc/self/fd")), mapped.count("rw-s ")


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """What was imported is not looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def guarded() -> Iterator[None]:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + ROOM_BYTES, before[1]))
    old = signal.signal(signal.SIGALRM, _stop)
    yield
    signal.signal(signal.SIGALRM, old)
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("every", [3, nightly(1)], ids=["a third", "all"])
@pytest.mark.parametrize("name", sorted(CALLS.keys() - WITHOUT.keys()))
def test_odd_numbers(name: str, every: int, tmp_path: Path, guarded: None) -> None:
    """Each parameter is given every third odd number, the next parameter the next ones."""
    call, faults = CALLS[name], []
    before = state()
    world = World(tmp_path)
    with world.open:
        with world.step, suppress(*([CXLKVError] if name in NEVER_RIGHT else [])):
            close(call.function(*on_of(call, world), **given(call, world)))
        for first, parameter in enumerate(call.numbers, zlib.crc32(name.encode())):
            for odd in ODD[first % every :: every] if f"{name}.{parameter}" not in WITHOUT else ():
                for value in alike(call, parameter, odd, world):
                    with world.step:
                        arguments = {**given(call, world), parameter: value}
                        fault = fault_of(
                            partial(call.function, *on_of(call, world), **arguments), value
                        )
                    if fault:
                        faults.append(f"{name}({parameter}={value!r:.30}) {fault:.90}")
    if state() != before:
        faults.append(f"{before} before, {state()}")
    assert not faults, "\n" + "\n".join(faults)


# ---- the same in YAML ----

SHAPE_KEYS: Mapping[str, object] = {"layers": 1, "kv_heads": 1, "head_dim": 16, "dtype": "float32"}
FORMS: Mapping[tuple[str | int, ...], tuple[type[config.Keys], Mapping[str, object]]] = {
    (): (config.PoolConfig, SHAPE_KEYS),
    ("layout",): (config._OneShape, SHAPE_KEYS),
    ("layout", "layer_groups", 0): (config._Group, {"layer_groups": [SHAPE_KEYS]}),
}
"""Where keys are, the model that has them, and a layout for them."""
ODD_WORDS = (
    *(".nan", ".inf", "-.inf", "-1", "-0.0", "0.5", "1.0e+39", "2147483648", "10000000000"),
    *("18446744073709551616", "9" * 400, "9" * 5000, "true", "x", "[.nan]", "2001-01-01"),
)


@pytest.mark.parametrize("place", FORMS, ids=str)
def test_odd_numbers_in_yaml(place: tuple[str | int, ...], tmp_path: Path, guarded: None) -> None:
    model, layout = FORMS[place]
    file, before = tmp_path / "pool.yaml", state()
    for key, field in model.model_fields.items():
        if not re.search(r"int\b|float\b", str(field.annotation)):
            continue
        for word in ODD_WORDS:
            wanted: dict[str, object] = {"where": "anonymous:", "capacity": "3MiB"}
            wanted["layout"] = deepcopy(dict(layout))
            at = wanted
            for part in place:
                at = at[part]  # type: ignore[index, assignment]
            at[key] = "ODD"
            file.write_text(yaml.safe_dump(wanted).replace("ODD", word))
            opener: type[Tiers | CXLPool] = Tiers if key in config.TIERS else CXLPool
            fault = fault_of(partial(opener.from_config, file), word)
            assert not fault, f"{key}: {word:.40}: {fault}"
    assert state() == before


# ---- the same on the command line ----

NEEDED: Mapping[str, str] = {"case": "replay", "old": "old.json", "new": "new.json"}


def float_options() -> Iterator[tuple[str, str]]:
    """(command, option) of all numbers that need not be whole; of the others typer refuses NaN."""

    def below(command: object, name: str) -> Iterator[tuple[str, str]]:
        for word, inner in vars(command).get("commands", {}).items():
            yield from below(inner, f"{name} {word}".strip())
        if callback := vars(command).get("callback"):
            kinds = inspect.signature(inspect.unwrap(callback)).parameters
            for option in map(vars, vars(command)["params"]):
                if option["name"] in kinds and "float" in str(kinds[option["name"]].annotation):
                    needed = [NEEDED[x.name] for x in vars(command)["params"] if x.required]
                    yield " ".join((name, *needed)), option["opts"][0]

    yield from below(typer.main.get_command(app), "")


@pytest.mark.parametrize(("command", "option"), [*float_options()])
@pytest.mark.parametrize("word", ["nan", "inf", "x", "-1", "9" * 400])
def test_odd_options(command: str, option: str, word: str, guarded: None) -> None:
    shape = ("--layout", "{layers: 1, kv_heads: 1, head_dim: 16}", "--prefill-tokens-per-s", "9000")
    words = [*command.split(), *(shape if command == "advise" else ())]
    result = CliRunner().invoke(app, [*words, f"{option}={word}"])
    assert isinstance(result.exception, (SystemExit, CXLKVError))  # main() tells the second
    assert result.exit_code in (1, 2)


# ---- whatever a number can be ----

ANY = st.one_of(st.sampled_from(ODD), st.integers(), st.floats(width=64), st.fractions(), st.text())


@pytest.mark.nightly
@settings(max_examples=1000)
@given_by(data=st.data())
def test_any_number(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, guarded: None
) -> None:
    """Several numbers of a call at once."""
    call = CALLS[data.draw(st.sampled_from(sorted(CALLS.keys() - WITHOUT.keys())))]
    world = World(tmp_path_factory.mktemp("odd"))
    with world.open, world.step:
        arguments = given(call, world)
        for name in call.numbers:
            if f"{call.name}.{name}" not in WITHOUT and data.draw(st.booleans()):
                arguments[name] = data.draw(ANY)
        fault = fault_of(partial(call.function, *on_of(call, world), **arguments), None)
    assert not fault, f"{call.name}({arguments}) {fault}"
