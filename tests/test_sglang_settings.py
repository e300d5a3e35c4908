"""What needs no SGLang of its adapter: settings, versions, and the names of pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from cxlkv.adapters.sglang.names import Names, suffixes_of, words_of
from cxlkv.adapters.sglang.settings import Settings, check_version, read_settings
from cxlkv.errors import BadArgumentError, UnsupportedError


@dataclass
class Config:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    is_mla_model: bool = False
    model_name: str | None = "some/model"
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    extra_config: Mapping[str, object] | None = None


PAGE = {"dtype": "torch.bfloat16", "page_tokens": 64}
HASHES = ["ab" * 32, "cd" * 32]


def keys(config: Config, salt: str = "", **page: object) -> list[bytes]:
    names = Names(words_of(config, {**PAGE, **page}, salt), suffixes_of(config))
    return list(names.keys(HASHES))


def test_each_word_makes_other_keys() -> None:
    first = Config()
    others = [
        keys(first, "salt"),
        keys(first, dtype="torch.float16"),
        keys(first, page_tokens=32),
        *(
            keys(replace(first, **change))
            for change in (
                {"model_name": "other"},
                {"tp_size": 2},
                {"pp_size": 2},
                {"attn_cp_size": 2},
                {"is_mla_model": True},
                {"extra_config": {"extra_backend_tag": "a"}},
                {"tp_rank": 1},
                {"pp_rank": 1},
            )
        ),
    ]
    found = [tuple(one) for one in (keys(first), *others)]
    assert len(set(found)) == len(found)
    assert len({key for one in found for key in one}) == sum(map(len, found))


def test_ranks_of_mla_have_equal_pages() -> None:
    ranks = [Config(is_mla_model=True, tp_size=4, tp_rank=rank) for rank in range(4)]
    assert len({tuple(keys(one)) for one in ranks}) == 1


def test_split_heads_are_those_of_more_ranks() -> None:
    one = Config(tp_lcm_size=4, should_split_heads=True)
    two = [replace(one, tp_size=2, tp_rank=rank) for rank in range(2)]
    four = [replace(one, tp_size=4, tp_rank=rank) for rank in range(4)]
    first_page = keys(one)[:4]
    assert first_page == [keys(rank)[0] for rank in four]
    assert first_page == [key for rank in two for key in keys(rank)[:2]]


def test_settings() -> None:
    assert read_settings(None) == Settings()
    given = {"interface_v1": 1, "cxlkv": {"where": "/mnt/pool", "capacity": "8GiB", "salt": "s"}}
    assert read_settings(given) == Settings(where="/mnt/pool", capacity="8GiB", salt="s")
    for wrong, words in (
        ({"wher": "x"}, "did you mean where"),
        ({"capacity": True}, "text like 8GiB"),
        ({"capacity": "8G"}, "8G"),
        ({"salt": 3}, "text is wanted"),
    ):
        with pytest.raises(BadArgumentError, match=words):
            read_settings({"cxlkv": wrong})
    with pytest.raises(BadArgumentError, match="keys and values"):
        read_settings({"cxlkv": "8GiB"})


def test_untested_versions_are_refused_by_name() -> None:
    check_version("0.5.23")
    check_version("0.5.24.post1")
    for version in ("0.6.0", "0.4.9", "1.5.23"):
        with pytest.raises(UnsupportedError, match=r"0\.5\.23"):
            check_version(version)
