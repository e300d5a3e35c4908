"""What users write for each engine, and what is refused by name; versions that nobody tested."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from cxlkv import CXLPool
from cxlkv.adapters.common import pools
from cxlkv.adapters.common.settings import PoolSettings
from cxlkv.adapters.common.versions import Versions
from cxlkv.adapters.lmcache import settings as lmcache
from cxlkv.adapters.sglang import settings as sglang
from cxlkv.adapters.vllm import plugin as vllm
from cxlkv.adapters.vllm import settings as of_vllm
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.machine.coherence import SHARING
from cxlkv.machine.huge_pages import HUGE
from cxlkv.ndp.engine import METHODS
from cxlkv.tiers import Tiers
from cxlkv.tiers.compress import COMPRESS
from cxlkv.tiers.policy import POLICIES
from cxlkv.tiers.remote import parse_remote

from ...support.texts import SMALL, publish

ROOT = Path(__file__).parents[3]
Read = Callable[[Mapping[str, object]], PoolSettings]
ENGINES: dict[str, Read] = {
    "vllm": of_vllm.read_settings,
    "sglang": lambda given: sglang.read_settings({"interface_v1": 1, "cxlkv": given}),
    "lmcache": lambda given: lmcache.read_settings(
        {"dax.x": 1, **{f"cxlkv.{name}": value for name, value in given.items()}}
    ),
}
each_engine = pytest.mark.parametrize("read", ENGINES.values(), ids=ENGINES)


@each_engine
def test_what_is_written_is_read(read: Read) -> None:
    default = read({})
    assert (default.where, default.capacity, default.salt) == ("/dev/shm/", None, "")
    found = read({"where": "/mnt/pool", "capacity": "8GiB", "salt": "a"})
    assert (found.where, found.capacity, found.salt) == ("/mnt/pool", 8 << 30, "a")
    for capacity in (1 << 30, "all", None):
        assert read({"capacity": capacity}).capacity == capacity


@each_engine
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"capcity": "8GiB"}, r"capcity is not one of .*did you mean (cxlkv\.)?capacity"),
        ({"WHERE": "/mnt/"}, r"is not one of .*did you mean (cxlkv\.)?where"),
        ({"tiers": 1}, r"tiers is not one of .*where, .*capacity, .*salt"),
        ({"where": 3}, "where is 3: text is wanted"),
        ({"where": "anonymous:"}, "several processes that must find the pool"),
        ({"salt": None}, "salt is nothing: text is wanted"),
        ({"capacity": True}, "capacity: True is not a size: .*text like 2GiB"),
        ({"capacity": "8G"}, "capacity: '8G' is not a size"),
        ({"cold": 1, "cold_capacity": "1GiB"}, "cold is 1: text is wanted"),
        ({"cold": "/mnt/"}, r"cold needs (cxlkv\.)?cold_capacity"),
        ({"cold": "/mnt/", "cold_capacity": "all"}, "cold_capacity: 'all' is not a size"),
        ({"cold_capacity": "1GiB"}, r"cold_capacity goes with (cxlkv\.)?cold"),
        ({"compress": "zstd"}, r"compress goes with (cxlkv\.)?cold"),
        ({"cold": "mooncake://a:1", "compress": "zstd"}, "compress goes with files, not moon"),
        ({"policy": "cost"}, "policy is 'cost': one of adaptive, lru"),
        ({"remote": 7}, "remote is 7: tcp://HOST:PORT of .*; or a list"),
        ({"remote": []}, r"remote is \[\]: tcp://HOST:PORT of a"),
        ({"remote": "10.0.0.1:7"}, r"remote is '10.0.0.1:7': tcp://HOST:PORT of a .* such\Z"),
        ({"remote": ["tcp://a:1", "rdma://a:1"]}, r"rdma://HOST:PORT\?device=NAME"),
        ({"remote": "tcp://a:1"}, r"remote needs (cxlkv\.)?remote_secret"),
        ({"remote_secret": "/etc/a"}, r"remote_secret needs (cxlkv\.)?remote: the address"),
    ],
)
def test_mistakes_are_named(read: Read, given: dict[str, object], said: str) -> None:
    with pytest.raises(BadArgumentError, match=said):
        read(given)


@each_engine
def test_all_mistakes_at_once_each_where_it_stands(read: Read, tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("salt: a\nhosts: 2.5\nlease: 3\npolicy: fifo\n")
    with pytest.raises(BadArgumentError) as caught:
        read({"config": str(path), "salt": 3, "polcy": "lru", "policy": "lru"})
    prefix = "cxlkv." if read is ENGINES["lmcache"] else ""
    place = "extra_config" if prefix else "extra-config: cxlkv"
    place = "kv_connector_extra_config" if read is ENGINES["vllm"] else place
    lines = [line.partition(" not one of ")[0] for line in str(caught.value).splitlines()]
    assert [line.removeprefix("--hicache-storage-backend-") for line in lines] == [
        f"{path}, line 2: hosts is 2.5: a whole number from 1 to 64",
        f"{place}: {prefix}salt is 3: text is wanted; in quotes if it looks like a number, a date "
        "or yes/no",
        f"{path}, line 3: lease is",
        f"{place}: {prefix}polcy is",
    ]
    path.write_text("cold: /mnt/\n")
    with pytest.raises(BadArgumentError, match=r"line 1: cold needs cold_capacity, of"):
        read({"config": str(path)})
    with pytest.raises(BadArgumentError, match=rf"{place}: {prefix}cold needs {prefix}cold_capac"):
        read({"cold": "/mnt/"})


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("sharing", SHARING),
        ("compress", COMPRESS),
        ("huge", HUGE),
        ("policy", [name for name in POLICIES if name != "cost"]),  # settings carry no costs
    ],
)
def test_all_words_that_there_are_can_be_written(key: str, words: Sequence[str]) -> None:
    schema = of_vllm.Settings.model_json_schema()["properties"][key]
    kinds = schema.get("anyOf", [schema])
    found = {word for kind in kinds for word in kind.get("enum", [kind.get("const")])}
    assert found - {None} == set(words)


@pytest.mark.parametrize("method", [*METHODS, "gaussian", "loki=learned.npy"])
def test_every_method_can_be_written(method: str) -> None:
    given = {"attention": "pool", "method": method}
    assert of_vllm.read_settings(given).method == method


@pytest.mark.parametrize(
    "written", ["tcp://a:1", "tcp://a:1/", "rdma://a:1?device=x", "rdma://a:1", "tcp://a", "a:1"]
)
def test_an_address_is_one_where_it_is_used_too(written: str) -> None:
    given = {"remote": written, "remote_secret": "/a"}
    try:
        parse_remote(written)
    except BadArgumentError:
        with pytest.raises(BadArgumentError, match="remote is"):
            of_vllm.read_settings(given)
    else:
        assert of_vllm.read_settings(given).remote == (written,)


def test_objects_are_not_had_of_another_machine() -> None:
    given = {"remote": "tcp://a:1", "remote_secret": "/etc/a"}
    assert ENGINES["vllm"](given).remote == ("tcp://a:1",)
    for name in ("sglang", "lmcache"):
        with pytest.raises(BadArgumentError, match=r"remote is for vLLM: .*as objects"):
            ENGINES[name](given)


def test_objects_have_one_encoding_and_are_read_whole() -> None:
    assert ENGINES["vllm"]({"encoding": "int8,int4"}).encoding == "int8,int4"
    for name in ("sglang", "lmcache"):
        for encoding in ("none", "int8", "int4", "fp8_e4m3"):
            assert ENGINES[name]({"encoding": encoding}).encoding == encoding
        for encoding in ("int8,int4", "progressive"):
            with pytest.raises(BadArgumentError, match=rf"encoding is '{encoding}': .*alike"):
                ENGINES[name]({"encoding": encoding})


@each_engine
def test_a_file_says_what_is_not_written_beside_it(read: Read, tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("where: /mnt/a\nsalt: b\ncold: /mnt/c\ncold_capacity: 1GiB\n")
    found = read({"config": str(path), "salt": "mine"})
    assert (found.where, found.salt, found.cold) == ("/mnt/a", "mine", "/mnt/c")
    with pytest.raises(BadArgumentError, match="nothing there"):
        read({"config": str(tmp_path / "none.yaml")})
    for wrong, said in (
        ("were: /mnt/a", r"engine\.yaml, line 1: were is not one of .*did you mean where"),
        ("lease_s: x", r"engine\.yaml, line 1: lease_s is 'x': a number from"),
        ("config: a.yaml", r"engine\.yaml, line 1: config is not for a file"),
        ("a: &b 1", "anchors and aliases"),
    ):
        path.write_text(wrong)
        with pytest.raises(BadArgumentError, match=said):
            read({"config": str(path)})


def test_the_yaml_of_the_docs_runs_in_all_engines(tmp_path: Path) -> None:
    """Each engine in turn stores, evicts to the file and finds again with it."""
    text = (ROOT / "docs/reference/configuration.md").read_text()
    (block,) = (one for one in re.findall(r"```yaml\n(.*?)```", text, re.S) if "cold:" in one)
    path = tmp_path / "engine.yaml"
    path.write_text(block)
    settings: PoolSettings = sglang.read_settings({"cxlkv": {"config": str(path)}})
    assert settings.cold is not None
    files = [settings.where, settings.cold]
    if any(map(os.path.lexists, files)):
        pytest.skip(f"{files}: something of a user lies there")
    ids = range(4 * SMALL.page_tokens)
    try:
        for read in (*ENGINES.values(), None):
            if read is None:
                tiers = Tiers.from_config(path, layout=SMALL)
            else:
                settings = read({"config": str(path)})
                made = pools.make_or_open(CXLPool, settings.where, SMALL, settings.capacity)
                tiers = pools.open_tiers(made[0], settings)
            with tiers.pool as pool, tiers:
                publish(pool, ids)
                assert tiers.reclaim(pool.stats()["pages_total"]) == 4
                with tiers.match_prefix(ids) as hit:
                    assert hit.tokens == len(ids)
            for one in files:
                os.unlink(one)
    finally:
        for one in files:
            with suppress(FileNotFoundError):
                os.unlink(one)


@pytest.mark.parametrize(
    ("versions", "good", "bad"),
    [
        (vllm.VERSIONS, "0.32.0 0.32.1+cpu", "0.31.9 0.33.0 1.0 dev"),
        (sglang.VERSIONS, "0.5.23 0.5.23.post1 0.5.24rc1", "0.5.9 0.6.0 0.4.9 1.5.23 0.5 dev"),
        (lmcache.VERSIONS, "0.5.6 0.5.10.dev3", "0.4.9 0.6.0 1.0 unknown"),
    ],
    ids=ENGINES,
)
def test_untested_versions_are_refused_by_their_range(
    versions: Versions, good: str, bad: str
) -> None:
    for version in good.split():
        versions.check(version)
    for version in (*bad.split(), ""):
        with pytest.raises(UnsupportedError, match=f"{versions.engine} {version}: .*{versions}, "):
            versions.check(version)


def test_ranges_are_written_as_pip_takes_them() -> None:
    assert [str(one.VERSIONS) for one in (vllm, sglang, lmcache)] == [
        "vllm>=0.32,<0.33",
        "sglang>=0.5.23,<0.6",
        "lmcache>=0.5,<0.6",
    ]
