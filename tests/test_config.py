"""Pools from YAML: what the file says is what is made or opened, and each mistake is named."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from cxlkv import CXLPool, KVLayout, LayerGroup, ObjectPool
from cxlkv.config import FILE_BYTES_MAX, read_config
from cxlkv.errors import (
    BadArgumentError,
    ClosedError,
    GeometryError,
    NotAPoolError,
    UnsupportedError,
)
from cxlkv.pool import Pool
from cxlkv.tiers import Tiers

from .support.processes import Child
from .support.texts import HEADS, SMALL, publish

DOCS = Path(__file__).resolve().parent.parent / "docs"
KEYS = """\
where: /dev/shm/never-made.pool
capacity: 3MiB
layout:
  layers: 2
  kv_heads: 2
  head_dim: 8
  page_tokens: 4
  dtype: float32
"""


class Write(Protocol):
    def __call__(self, old: str = ..., new: str = ..., more: str = ...) -> Path: ...


@pytest.fixture
def place(shm_path: Path) -> Path:
    return shm_path


@pytest.fixture
def write(tmp_path: Path, place: Path) -> Write:
    """Writes a configuration: write() as it stands above, write("head_dim: 8", "head_dim: 16")."""

    def write(old: str = "", new: str = "", more: str = "") -> Path:
        assert old in KEYS
        path = tmp_path / "pool.yaml"
        path.write_text(KEYS.replace(old, new, 1).replace("/dev/shm/never-made.pool", str(place)))
        with path.open("a") as file:
            file.write(more)
        return path

    return write


def message(path: Path | Mapping[str, object]) -> str:
    """What is said about a wrong configuration; it begins with the file's name."""
    with pytest.raises(BadArgumentError) as caught:
        CXLPool.from_config(path)
    text = str(caught.value)
    assert "pydantic" not in text
    assert "Traceback" not in text
    return text.replace(str(path), "FILE")


# ---- what is described is what is there ----


def test_the_example_of_the_docs(place: Path, tmp_path: Path) -> None:
    page = (DOCS / "reference/configuration.md").read_text()
    found = re.search(r"```yaml title=\"pool.yaml\"\n(.*?)```", page, re.S)
    assert found is not None
    text = found[1].replace("/dev/shm/llama.pool", str(place)).replace("1GiB", "64MiB")
    (tmp_path / "pool.yaml").write_text(text)
    with CXLPool.from_config(tmp_path / "pool.yaml") as pool:
        assert pool.layout == KVLayout(
            layers=32, kv_heads=8, head_dim=128, model_id="meta-llama/Meta-Llama-3-8B"
        )
        assert pool.checksum
        assert pool.path == str(place)
        with CXLPool.from_config(tmp_path / "pool.yaml") as again:
            assert again.describe()["identity"] == pool.describe()["identity"]


def test_the_other_yaml_of_the_docs(tmp_path: Path) -> None:
    text = (DOCS / "reference/configuration.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.S)
    found = []
    for block in blocks:
        if "layout:" not in block:
            continue  # of engines: tests/adapters/common/test_settings.py
        (tmp_path / "block.yaml").write_text(block)
        layout = read_config(tmp_path / "block.yaml")[1]
        found.append(layout.object_bytes or layout.windows)
        Pool.create("anonymous:", layout=layout, capacity="64MiB").close()
    assert found == [(*[512] * 5, None) * 2, 2 << 20]


def test_the_docs_name_every_key() -> None:
    named = set(re.findall(r"`(\w+)`", (DOCS / "reference/configuration.md").read_text()))
    text = message({"where": "anonymous:", "capacity": 1, "layout": {"x": 1}, "x": 1})
    for listed in re.findall(r"is not one of ([\w, ]+)", text):
        assert set(listed.split(", ")) <= named


def test_all_keys_reach_the_pool(write: Write) -> None:
    more = '  value_head_dim: 4\n  shard: [1, 2, 0, 3]\n  model_id: "7"\nsketch: false\nthreads: 2'
    with CXLPool.from_config(write(more=more)) as pool:
        assert pool.layout == KVLayout(
            layers=2,
            kv_heads=2,
            head_dim=8,
            value_head_dim=4,
            page_tokens=4,
            dtype="float32",
            shard=(1, 2, 0, 3),
            model_id="7",
        )
        assert not pool.sketch


def test_a_mapping_makes_an_anonymous_pool() -> None:
    layout = {"layers": 2, "kv_heads": 2, "head_dim": 8, "shard": (0, 1, 0, 1)}
    with CXLPool.from_config(
        {"where": "anonymous:", "capacity": 3 << 20, "layout": layout}
    ) as pool:
        assert pool.layout == KVLayout(layers=2, kv_heads=2, head_dim=8)
        assert pool.path is None


def test_a_pool_with_tiers(write: Write, place: Path, tmp_path: Path) -> None:
    """Both are opened and closed together; a pool alone is not to be had from it."""
    more = f"local: 1MiB\ncold: {tmp_path}/file.cold\ncold_capacity: 2MiB\npolicy: lru"
    with pytest.raises(BadArgumentError, match=r"local, cold, .*policy: .*Tiers\.from"):
        CXLPool.from_config(write(more=more))
    with Tiers.from_config(write(more=more)) as tiers:
        assert tiers.stats().keys() >= {"local_slots_total", "cold_records", "far_pages_free"}
        assert tiers.pool.path == str(place)
    with pytest.raises(ClosedError):
        tiers.pool.stats()
    with Tiers.from_config(write(more=more)) as again:
        again.pool.close()  # either closes both
        with pytest.raises(ClosedError):
            again.step()
    with pytest.raises(GeometryError, match="was made with compress=None"):
        Tiers.from_config(write(more=more + "\ncompress: zstd"))
    CXLPool.open(place).close()


def test_a_layout_is_in_one_place() -> None:
    given = {"where": "anonymous:", "capacity": "3MiB"}
    with CXLPool.from_config(given, layout=SMALL) as pool:
        assert pool.layout == SMALL
    with pytest.raises(BadArgumentError, match="layout is missing"):
        CXLPool.from_config(given)
    layout = {"layers": 1, "kv_heads": 1, "head_dim": 8}
    with pytest.raises(BadArgumentError, match="layout is here, and the caller has one, too"):
        CXLPool.from_config({**given, "layout": layout}, layout=SMALL)


def test_layer_groups() -> None:
    layout = {
        "layer_groups": [
            {"layers": 5, "kv_heads": 4, "head_dim": 256, "window": 512},
            {
                "layers": 1,
                "kv_heads": 1,
                "head_dim": 576,
                "value_head_dim": 512,
                "values": "key_prefix",
            },
        ],
        "page_tokens": 32,
    }
    config = {"where": "anonymous:", "capacity": "64MiB", "layout": layout}
    assert read_config(config)[1] == KVLayout.of(
        [
            LayerGroup(layers=5, kv_heads=4, head_dim=256, window=512),
            LayerGroup(layers=1, kv_heads=1, head_dim=576, value_head_dim=512, values="key_prefix"),
        ],
        page_tokens=32,
    )


def test_one_word_for_keys_and_values() -> None:
    given = {"where": "anonymous:", "capacity": "3MiB", "encoding": "int8, int4"}
    with CXLPool.from_config(given, layout=SMALL) as pool:
        assert (pool.layout, pool.sketch) == (SMALL.encoded("int8,int4"), False)
    with CXLPool.from_config({**given, "sketch": True}, layout=SMALL) as pool:
        assert pool.sketch
    with CXLPool.from_config({**given, "encoding": "none,int8"}, layout=SMALL) as pool:
        assert pool.sketch  # its keys are as they were
    layout = {"layers": 1, "kv_heads": 1, "head_dim": 8}
    assert read_config({**given, "layout": layout})[1].encoding == "int8,int4"
    for wrong, what in (
        ({"encoding": "int2"}, "encoding 'int2': one of none, int8, int4"),
        ({"layout": {**layout, "k_encoding": "int8"}}, "k_encoding was taken out: say encoding"),
        ({"layout": {"object_bytes": 64}}, "a pool of objects keeps them as they come"),
    ):
        assert what in message({**given, "layout": layout, **wrong})


def test_a_pool_of_another_encoding_is_another(write: Write, place: Path) -> None:
    CXLPool.from_config(write()).close()
    wanted = "layout.k_encoding is 'none' there, 'int4' wanted"
    with pytest.raises(GeometryError, match=wanted):
        CXLPool.from_config(write(more="encoding: int4"))
    CXLPool.remove(place)
    for _ in range(2):  # made without sketches, opened as such
        with CXLPool.from_config(write(more="encoding: int4")) as pool:
            assert (pool.layout.encoding, pool.sketch) == ("int4", False)


def test_the_order_of_layers(place: Path) -> None:
    groups = [
        {"layers": 2, "kv_heads": 2, "head_dim": 8, "window": 16},
        {"layers": 1, "kv_heads": 2, "head_dim": 8},
    ]
    layout: dict[str, object] = {"layer_groups": groups, "order": [0, 1, 0]}
    config = {"where": str(place), "capacity": "4MiB", "layout": layout}
    with CXLPool.from_config(config) as pool:
        assert pool.layout.windows == (16, None, 16)
        CXLPool.from_config(config).close()
        layout["order"] = [0, 0, 1]
        with pytest.raises(GeometryError, match=r"layout.order is \(0, 1, 0\) there, \(0, 0, 1\)"):
            CXLPool.from_config(config)
    layout["order"] = [0, 1, 1]
    assert "layout: order (0, 1, 1): it names each group's index" in message(config)
    layout["order"] = [0, 1, "0"]
    assert "layout.order[2] is '0': a whole number is wanted" in message(config)


@pytest.mark.parametrize("where", ["numa:63", "dax:dax99.9"])
def test_a_place_that_is_not_here(write: Write, where: str) -> None:
    with pytest.raises(UnsupportedError, match=r"is not there|is no device"):
        CXLPool.from_config(write("/dev/shm/never-made.pool", f'"{where}"'))


def test_a_pool_that_hosts_share(write: Write, place: Path) -> None:
    """Each host has the same file but for its number, which its environment may give."""
    shared = "sharing: software\nhosts: 3\nlease_s: 0.5\nhost: {}\ncapacity"
    with CXLPool.from_config(write("capacity", shared.format(0))) as first:
        assert [host.state for host in first.admin.hosts()] == ["live", "unused", "unused"]
        publish(first, [1, 2, 3, 4])
        with (
            CXLPool.from_config(write("capacity", shared.format(2))) as second,
            second.match_prefix([1, 2, 3, 4]) as hit,
        ):
            assert hit.tokens == 4
            assert [host.state for host in first.admin.hosts()] == ["live", "unused", "live"]
    with pytest.raises(GeometryError, match="hosts is 3 there, 4 wanted"):
        CXLPool.from_config(write("capacity", shared.format(1).replace("3", "4")))
    with pytest.raises(BadArgumentError, match=r"say which one this is, host=0 to host=2"):
        CXLPool.from_config(write("capacity", "sharing: software\nhosts: 3\ncapacity"))


# ---- a pool that is there, or not ----


def test_a_restart_finds_what_was_published(write: Write, place: Path) -> None:
    with CXLPool.from_config(write()) as pool:
        publish(pool, [1, 2, 3, 4])
    with CXLPool.from_config(write()) as pool, pool.match_prefix([1, 2, 3, 4]) as hit:
        assert hit.tokens == 4


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("head_dim: 8", "head_dim: 16", "layout.head_dim is 8 there, 16 wanted"),
        ("float32", "float16", "layout.dtype is 'float32' there, 'float16' wanted"),
        ("page_tokens: 4", "page_tokens: 8", "layout.page_tokens is 4 there, 8 wanted"),
        ("capacity: 3MiB", "capacity: 30MiB", "MiB there, 30 MiB wanted"),
        ("capacity: 3MiB", "capacity: 2MiB", "MiB there, 2 MiB wanted"),
        ("capacity", "sketch: false\ncapacity", "sketch is true there, false wanted"),
        ("capacity", "durable: host\ncapacity", "durable is 'process' there, 'host' wanted"),
        ("  layers", "  model_id: b\n  layers", "layout.model_id is '' there, 'b' wanted"),
    ],
)
def test_another_pool_is_refused_by_name(
    write: Write, place: Path, old: str, new: str, named: str
) -> None:
    CXLPool.from_config(write()).close()
    with pytest.raises(GeometryError) as caught:
        CXLPool.from_config(write(old, new))
    assert named in str(caught.value)
    assert "another path, or remove the old one" in str(caught.value)
    with CXLPool.open(place) as pool:
        assert pool.layout == SMALL


def test_other_layer_groups_are_refused_by_name() -> None:
    one: dict[str, object] = {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}
    described = [
        read_config({"where": "anonymous:", "capacity": "3MiB", "layout": layout})
        for layout in (
            {"layer_groups": [one, {**one, "window": 16}], "page_tokens": 4},
            {"layer_groups": [one, {**one, "window": 32}], "page_tokens": 4},
        )
    ]
    geometry = {"region_bytes": 3 << 20, "extent_bytes": 1}
    (first, there), (second, other) = described
    assert first.differences(there, there, geometry, {"durable": "process"}) == []
    assert second.differences(other, there, geometry, {"durable": "process"}) == [
        "layer_groups[1].window is 16 there, 32 wanted"
    ]
    differences = first.differences(there, SMALL, geometry, {"durable": "process"})
    assert "layout has 1 layer groups there, 2 wanted" in differences


OBJECTS = {"where": "anonymous:", "capacity": "4MiB", "layout": {"object_bytes": "16KiB"}}


def objects(**layout: object) -> dict[str, object]:
    return {**OBJECTS, "layout": layout}


def test_a_pool_of_objects(place: Path) -> None:
    layout = {"object_bytes": "16KiB", "model_id": "m", "shard": [1, 2, 0, 1]}
    given = {**OBJECTS, "where": str(place), "layout": layout}
    with ObjectPool.from_config(given) as pool:
        assert pool.layout == KVLayout.objects(16 << 10, shard=(1, 2, 0, 1), model_id="m")
        assert pool.put("a", b"x")
        with ObjectPool.from_config({**given, "sketch": False}) as again:
            assert again.object_sizes(["a"]).tolist() == [1]
        for other, expected in (
            ({"object_bytes": "8KiB"}, "layout is of objects up to 16 KiB there, of objects up to"),
            ({"object_bytes": 1 << 14, "model_id": "n"}, r"layout.model_id is 'm' there, 'n' want"),
            ({"layers": 1, "kv_heads": 1, "head_dim": 8}, "objects up to 16 KiB there, of K and V"),
        ):
            with pytest.raises(GeometryError, match=expected):
                Pool.from_config({**given, "layout": other})


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (objects(object_bytes="2 MB of"), "layout.object_bytes: '2 MB of' is not a size"),
        (objects(object_bytes=0), "layout: objects of 0 bytes: outside 1 to 1073741824"),
        (objects(object_bytes=True), "layout.object_bytes"),
        (
            objects(object_bytes=64, layers=2),
            "layout.layers is not one of object_bytes, slot, shard, model_id",
        ),
        (objects(object_bytes=64, page_tokens=2), "layout.page_tokens is not one of"),
        (objects(object_byte=64), "; or object_bytes, for objects"),
        ({**OBJECTS, "sketch": True}, "sketch is true, and objects have no keys to be sketched"),
    ],
)
def test_mistakes_in_a_pool_of_objects(wrong: dict[str, object], expected: str) -> None:
    assert expected in message(wrong)


def test_a_file_that_is_no_pool_is_never_replaced(write: Write, place: Path) -> None:
    place.write_bytes(b"somebody's work")
    with pytest.raises(NotAPoolError, match="is not a cxlkv pool"):
        CXLPool.from_config(write())
    assert place.read_bytes() == b"somebody's work"


STARTER = """
import sys
from cxlkv import CXLPool
print("ready", flush=True)
sys.stdin.readline()
with CXLPool.from_config(sys.argv[1]) as pool:
    print(pool.describe()["identity"], flush=True)
    sys.stdin.readline()
"""


def test_servers_that_start_at_once_make_one_pool(write: Write, place: Path) -> None:
    """Large enough that making it takes a while: all would begin a draft, were there no lock."""
    path = write("3MiB", "256MiB", "threads: 1")
    with ExitStack() as stack:
        servers = [stack.enter_context(Child("-c", STARTER, path)) for _ in range(4)]
        for line in ("ready", None):
            said = [server.hear() for server in servers]
            assert line is None or said == [line] * 4
            for server in servers:
                server.tell("go")
        assert len(set(said)) == 1, said
        assert len(said[0]) == 32
        for server in servers:
            server.end()
    assert os.listdir("/dev/shm").count(place.name) == 1
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(place.name + ".")]


# ---- without a file ----

MAKER = """
import contextlib, sys
from cxlkv import CXLPool, KVLayout
from cxlkv.pool import base
if sys.argv[2] == "other users":
    base.one_maker = contextlib.nullcontext
layout = KVLayout(layers=2, kv_heads=2, head_dim=8, page_tokens=4, dtype="float32")
print("ready", flush=True)
sys.stdin.readline()
with CXLPool.open_or_create(sys.argv[1], layout=layout, capacity="64MiB", threads=1) as made:
    print(made.describe()["identity"], flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("whose", ["one user", "other users"])
def test_processes_that_open_or_create_at_once_make_one_pool(place: Path, whose: str) -> None:
    """Users do not wait for each other: the first finished draft is the pool."""
    with ExitStack() as stack:
        makers = [stack.enter_context(Child("-c", MAKER, place, whose)) for _ in range(4)]
        assert [maker.hear() for maker in makers] == ["ready"] * 4
        for maker in makers:
            maker.tell("go")
        said = {maker.hear() for maker in makers}
        assert len(said) == 1, said
        for maker in makers:
            maker.tell("end")
            maker.end()
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(place.name + ".")]


def test_a_pool_is_opened_or_created(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = CXLPool.open_or_create(place, layout=SMALL, capacity="3MiB", sketch=False)
    with made:
        publish(made, range(8))
    monkeypatch.chdir(place.parent)
    with CXLPool.open_or_create(place.name, layout=SMALL, capacity="3MiB", sketch=False) as opened:
        assert opened.match_prefix(range(8)).tokens == 8
        assert opened.path == str(place)
    other = KVLayout(layers=2, kv_heads=HEADS, head_dim=16, page_tokens=4, dtype="float32")
    with pytest.raises(GeometryError) as told:
        CXLPool.open_or_create(place, layout=other, capacity="3MiB")
    for what in ("layout.head_dim is 8 there, 16 wanted", "sketch is false there", str(place)):
        assert what in str(told.value)
    assert "layers" not in str(told.value)
    with pytest.raises(GeometryError, match="checksum is true there, false wanted"):
        CXLPool.open_or_create(place, layout=SMALL, capacity="3MiB", sketch=False, checksum=False)
    with pytest.raises(BadArgumentError, match="it is a CXLPool"):
        ObjectPool.open_or_create(place, layout=SMALL, capacity="3MiB")
    CXLPool.remove(place)
    objects = KVLayout.objects("4KiB")
    for _ in range(2):
        with ObjectPool.open_or_create(place, layout=objects, capacity="3MiB") as store:
            store.put("a", b"b")
    assert store.path == str(place)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"capacity": "8M"}, "capacity: '8M' is not a size"),
        ({"sharing": "soft", "threads": "a"}, "sharing is 'soft': one of host(.|\n)*threads is"),
        ({"hosts": 3}, "hosts is for a pool that hosts share: add sharing"),
        ({"layout": None}, "layout is a KVLayout, not NoneType"),
        ({"where": 3}, "where is 3"),
        ({"where": "/no/such/folder/my.pool"}, "the folder /no/such/folder does not exist"),
    ],
)
def test_what_cannot_be_opened_or_created_is_named(
    place: Path, wrong: dict[str, object], what: str
) -> None:
    given = {"where": place, "layout": SMALL, "capacity": "3MiB", **wrong}
    with pytest.raises(BadArgumentError, match=what):
        CXLPool.open_or_create(**given)  # type: ignore[arg-type]
    assert not place.exists()


# ---- mistakes ----


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("head_dim", "head_dims", "FILE, line 6: layout.head_dims is not one of layers, kv_heads"),
        ("capacity", "capasity", "FILE: capacity is missing\nFILE, line 2: capasity is not one"),
        ("3MiB", "3M", "FILE, line 2: capacity: '3M' is not a size: write it like 512MiB"),
        ("3MiB", "[3]", "FILE, line 2: capacity: [3] is not a size"),
        ("3MiB", "-3", "FILE, line 2: capacity: a size cannot be negative: -3"),
        ("3MiB", "1" * 5000, "FILE, line 2: capacity is '11111"),
        ("3MiB", "2024-13-77", "FILE, line 2: capacity is '2024-13-77', which cannot be r"),
        (
            "layers: 2",
            "layers: '2'",
            "FILE, line 4: layout.layers is '2': a whole number is wanted",
        ),
        (
            "layers: 2",
            "layers: 2.0",
            "FILE, line 4: layout.layers is 2.0: a whole number is wanted",
        ),
        ("layers: 2", "layers: yes", "FILE, line 4: layout.layers is true: a whole number is wan"),
        ("layers: 2", "layers: 0", "FILE, line 4: layout.layers: layers is 0: it must be a whole"),
        ("layers: 2", "layers:", "FILE, line 4: layout.layers is nothing: a whole number is wante"),
        ("float32", "int4", "FILE, line 8: layout.dtype: dtype 'int4' is not stored: use one of"),
        ("float32", "7", "FILE, line 8: layout.dtype: dtype 7 is not stored"),
        (
            "float32",
            "float32\n  model_id: 1.5",
            "FILE, line 9: layout.model_id is 1.5: text is wan",
        ),
        ("float32", "float32\n  shard: [0, 1]", "FILE, line 9: layout.shard: four numbers are wan"),
        ("float32", "float32\n  shard: [0,1,0,x]", "FILE, line 9: layout.shard[3] is 'x': a who"),
        ("float32", "float32\n  shard: [1,1,0,1]", "FILE, line 9: layout.shard: shard (1, 1, 0, 1"),
        ("float32", "float32\n  shard: 5", "FILE, line 9: layout.shard is 5: a list is wanted"),
        ("float32", "float32\n  order: [0, 0]", "FILE, line 9: layout.order is not one of layers"),
        ("float32", "float32\n  layer_groups: []", "FILE, line 4: layout.layers is not one of"),
        ("where", "threads: 0.5\nwhere", "FILE, line 1: threads is 0.5: a whole number is want"),
        ("where", "sketch: 1\nwhere", "FILE, line 1: sketch is 1: true or false is wanted"),
        ("where", "durable: day\nwhere", "durable is 'day': one of process, host"),
        ("where", "durable: [a]\nwhere", "durable is ['a']: one of process, host"),
        ("where", "capacity: 1\nwhere", "FILE, line 3: capacity stands in line 1 already; leave"),
        ("  layers: 2", "  layers: 2\n  layers: 2", "layout.layers stands in line 4 already; leav"),
        ("where:", "1:", "FILE, line 1: a key is a word, not '1'"),
        ("where:", "<<: {a: b}\nwhere:", "FILE, line 1: a key is a word, not '<<'"),
        ("where:", "where: &a", "FILE, line 1: anchors and aliases (&, *) are not read"),
        ("where:", "where: !!python/name:os.system", "FILE, line 1: tags (!) are not read"),
        ("where:", "where: ~/", "FILE, line 1: where: '~/ /dev/shm/cxlkv-test-"),
        ("/dev/shm/never-made.pool", "my.pool", "FILE, line 1: where: 'my.pool': a path from th"),
        ("/dev/shm/never-made.pool", "$HOME/a", "FILE, line 1: where: $HOME/a: environment var"),
        ("/dev/shm/never-made.pool", "/no/such/a", "FILE, line 1: where: /no/such/a: the folder"),
        ("/dev/shm/never-made.pool", "s3:bucket", "FILE, line 1: where: s3:bucket: unknown regi"),
        ("/dev/shm/never-made.pool", "5", "FILE, line 1: where is 5: text is wanted; in quote"),
        ("/dev/shm/never-made.pool", "anonymous:", "FILE, line 1: no YAML: mapping values are "),
    ],
)
def test_a_mistake_is_named(write: Write, old: str, new: str, expected: str) -> None:
    text = message(write(old, new))
    assert expected in text
    assert all(len(line) < 400 for line in text.splitlines())


def test_all_mistakes_at_once(write: Write) -> None:
    text = message(write("layers: 2", "layers: two\n  colour: red", "threads: many"))
    assert len(text.splitlines()) == 3
    for line, key in ((4, "layout.layers"), (5, "layout.colour"), (10, "threads")):
        assert f"FILE, line {line}: {key} is " in text


def test_mistakes_in_layer_groups(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    text = "where: /dev/shm/a\ncapacity: 1\nlayout:\n  layer_groups:\n"
    path.write_text(
        text
        + "  - {layers: 1, kv_heads: 1, head_dim: 8, windov: 5}\n"
        + "  - {layers: x, kv_heads: 1, head_dim: 8, values: theirs}\n  - 5\n"
    )
    assert [line.partition(";")[0] for line in message(path).splitlines()] == [
        "FILE, line 5: layout.layer_groups[0].windov is not one of layers, kv_heads, "
        "head_dim, value_head_dim, dtype, window, values",
        "FILE, line 6: layout.layer_groups[1].layers is 'x': a whole number is wanted",
        "FILE, line 6: layout.layer_groups[1].values is 'theirs': one of own, key_prefix",
        "FILE, line 7: layout.layer_groups[2] is 5: keys and values are wanted",
    ]
    path.write_text(text + "  - {layers: 1, kv_heads: 0, head_dim: 8}\n")
    assert "FILE, line 5: layout.layer_groups[0].kv_heads: kv_heads is 0" in message(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "FILE: empty; where, capacity and layout are wanted"),
        (b"# nothing yet\n", "FILE: empty"),
        (b"- a\n- b\n", "FILE: keys and values are wanted"),
        (b"words", "FILE: keys and values are wanted"),
        (b"null", "FILE: keys and values are wanted"),
        (b"\xff\xfe\x00\x01" * 100, "FILE: not text in UTF-8"),
        (b"\x7fELF\x02\x01\x01\0\0", "FILE: no YAML: unacceptable character"),
        (b"#" * (FILE_BYTES_MAX + 1), "FILE: larger than 64 KiB"),
        (b"a: b\n---\nc: d\n", "FILE, line 2: a second document begins"),
        (b"[" * 60000, "FILE, line 1: nested more than 8 deep"),
        (b"{a: " * 9, "FILE, line 1: nested more than 8 deep"),
        (b"a: 'b\n", "FILE, line 2: no YAML: found unexpected end of stream"),
        (b"a: b\n\tc: d\n", "FILE, line 2: no YAML: found character"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "pool.yaml"
    path.write_bytes(content)
    assert message(path).startswith(expected)


def test_a_yaml_bomb_is_refused_before_it_is_built(tmp_path: Path) -> None:
    """Nine times nine lists of lists: gigabytes, were it walked through."""
    path = tmp_path / "pool.yaml"
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 10)]
    path.write_text("\n".join(lines))
    assert message(path).startswith("FILE, line 1: anchors and aliases")


def test_what_is_no_file(tmp_path: Path) -> None:
    assert message(tmp_path) == "FILE: no file; the path of a YAML file is wanted"
    assert message(tmp_path / "no.yaml") == "FILE: nothing there; the path of a YAML file is wanted"
    os.mkfifo(tmp_path / "fifo")
    assert message(tmp_path / "fifo").startswith("FILE: no file")
    for wrong in ("a" * 5000, "a\0b", KEYS):
        with pytest.raises(BadArgumentError):
            CXLPool.from_config(wrong)
    for other in (5, None, [KEYS], b"pool.yaml"):
        with pytest.raises(BadArgumentError, match="a configuration is a path or a mapping"):
            CXLPool.from_config(other)  # type: ignore[arg-type]


def test_a_mapping_that_is_wrong() -> None:
    assert message({}).splitlines() == [
        f"the configuration: {key} is missing" for key in ("where", "capacity", "layout")
    ]
    text = message({1: 2})  # type: ignore[dict-item]
    assert text == "the configuration: a key is a word, not 1"
    ours = {"where": "anonymous:", "capacity": "3MiB", "layout": SMALL}
    assert "layout is KVLayout(" in message(ours)


def test_threads_that_cannot_be_leave_no_pool_behind(write: Write, place: Path) -> None:
    for threads in (0, -1, 1025, 1 << 40):
        with pytest.raises(BadArgumentError, match=f"{threads} threads: outside 1 to 1024"):
            CXLPool.from_config(write(more=f"threads: {threads}"))
        with pytest.raises(BadArgumentError, match="outside 1 to 1024"):
            CXLPool.create(place, layout=SMALL, capacity="3MiB", threads=threads)
    assert not place.exists()
