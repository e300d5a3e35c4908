"""What users write for each engine, and what is refused by name; versions that nobody tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from cxlkv.adapters.common.settings import PoolSettings
from cxlkv.adapters.common.versions import Versions
from cxlkv.adapters.lmcache import settings as lmcache
from cxlkv.adapters.sglang import settings as sglang
from cxlkv.adapters.vllm import plugin as vllm
from cxlkv.adapters.vllm import settings as of_vllm
from cxlkv.errors import BadArgumentError, UnsupportedError

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
    assert (found.where, found.capacity, found.salt) == ("/mnt/pool", "8GiB", "a")
    for capacity in (1 << 30, "all", None):
        assert read({"capacity": capacity}).capacity == capacity


@each_engine
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"capcity": "8GiB"}, r"capcity' is not one of .*did you mean (cxlkv\.)?capacity"),
        ({"WHERE": "/mnt/"}, r"is not one of .*did you mean (cxlkv\.)?where"),
        ({"tiers": 1}, r"tiers' is not one of .*where, .*capacity, .*salt"),
        ({"where": 3}, "where is 3: text is wanted"),
        ({"where": "anonymous:"}, "several processes that must find the pool"),
        ({"salt": None}, "salt is None: text is wanted"),
        ({"capacity": True}, "capacity is True: text like 8GiB"),
        ({"capacity": "8G"}, "'8G' is no size"),
        ({"cold": 1, "cold_capacity": "1GiB"}, "cold is 1: text is wanted"),
        ({"cold": "/mnt/"}, r"cold needs (cxlkv\.)?cold_capacity"),
        ({"cold": "/mnt/", "cold_capacity": "all"}, "cold_capacity is 'all': text like 8GiB"),
        ({"cold_capacity": "1GiB"}, r"cold_capacity goes with (cxlkv\.)?cold"),
        ({"compress": "zstd"}, r"compress goes with (cxlkv\.)?cold"),
        ({"cold": "mooncake://a:1", "compress": "zstd"}, "compress goes with files, not with moon"),
        ({"policy": "cost"}, "policy is 'cost': one of adaptive, lru, mass, s3fifo"),
    ],
)
def test_mistakes_are_named(read: Read, given: dict[str, object], said: str) -> None:
    with pytest.raises(BadArgumentError, match=said):
        read(given)


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
