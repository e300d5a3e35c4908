"""What needs no SGLang of its adapter: settings, versions, and what makes keys others."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import cxlkv.adapters.sglang as adapter
from cxlkv.adapters.sglang.names import Shards, Words, engine_words, file_name, space_of
from cxlkv.adapters.sglang.settings import check_version, is_zero_copy, read_settings
from cxlkv.errors import BadArgumentError, UnsupportedError

from ..support.weight_files import change, safetensors

MHA, MLA, STATE = {"MHATokenToKVPoolHost"}, {"MLATokenToKVPoolHost"}, {"MambaPoolHost"}
HOST: Words = {"pool": "kv", "dtype": "torch.bfloat16", "sizes": [4096, 4096]}


@dataclass
class Config:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dcp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    model_name: str | None = "served"
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    extra_config: Mapping[str, object] | None = None


def server(**words: object) -> SimpleNamespace:
    """Arguments of SGLang's server, as far as they are read."""
    given = {"model_path": "some/model", "revision": None, "kv_cache_dtype": "auto", **words}
    return SimpleNamespace(**given)


# ---- what a user writes ----


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cxlkv": "8GiB"}, "keys and values"),
        ({"capacity": "8GiB"}, "'capacity' is one of ours: write it as \"cxlkv\""),
    ],
)
def test_mistakes_in_settings_are_named(given: dict[str, object], said: str) -> None:
    with pytest.raises(BadArgumentError, match=said):
        read_settings(given)


def test_pages_that_are_copied_once_more_are_worth_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert is_zero_copy({"interface_v1": 1})
    assert not caplog.messages
    assert not is_zero_copy({})
    (said,) = caplog.messages
    assert '"interface_v1": 1' in said


def test_later_versions_are_worth_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "cxlkv")
    check_version("0.5.23.post1")
    assert not caplog.messages
    check_version("0.5.24rc1")
    assert caplog.messages == ["cxlkv: tested with sglang 0.5.23, this is 0.5.24rc1"]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is here")
def test_without_sglang_the_class_says_what_is_missing() -> None:
    with pytest.raises(ImportError, match=r"'sglang'.*install cxlkv where sglang"):
        adapter.CXLHiCache  # noqa: B018
    with pytest.raises(AttributeError, match="CxlHiCache"):
        adapter.CxlHiCache  # noqa: B018


# ---- what makes keys others ----


def space(
    config: Config, of: object = None, salt: str = "", release: str = "0.5.23", **host: object
) -> tuple[bytes, tuple[int, ...]]:
    """The namespace of a rank's keys, and its shards."""
    of = server() if of is None else of
    stated = "" if os.path.isdir(str(getattr(of, "model_path", ""))) else "stated"
    words = engine_words(config, of, release, stated)
    shards = Shards(config, MLA if config.is_mla_model else MHA, 1)
    return space_of(words, {**HOST, **host}, shards, salt), tuple(shards.numbers)


def test_each_word_makes_other_keys(tmp_path: Path) -> None:
    first, folder = Config(), server(model_path=str(tmp_path))
    found = [
        space(first),
        space(first, salt="tenant"),
        space(first, release="0.5.24"),
        space(first, dtype="torch.float16"),
        space(first, sizes=[8192]),
        space(first, server(model_path="another/model")),
        space(first, server(revision="b" * 40)),
        space(first, server(kv_cache_dtype="fp8_e4m3")),
        space(first, server(kv_cache_dtype="fp8_e5m2")),
        space(first, server(quantization="awq")),
        space(first, server(json_model_override_args='{"rope_theta": 1}')),
        space(first, server(speculative_draft_model_path="a/draft")),
        space(first, server(load_format="dummy", random_seed=1)),
        space(first, server(load_format="dummy", random_seed=2)),
        *(
            space(replace(first, **change))
            for change in (
                {"tp_size": 2},
                {"tp_rank": 1, "tp_size": 2},
                {"pp_size": 2},
                {"pp_rank": 1, "pp_size": 2},
                {"attn_cp_size": 2},
                {"attn_cp_rank": 1, "attn_cp_size": 2},
                {"extra_config": {"extra_backend_tag": "a"}},
            )
        ),
        space(first, folder),
    ]
    (tmp_path / "config.json").write_text('{"rope_theta": 10000.0}')
    found.append(space(first, folder))
    weights = safetensors(tmp_path / "model.safetensors")
    found += [space(first, folder)]
    assert space(first, folder) == found[-1]
    change(weights, -1)
    found.append(space(first, folder))
    assert len(set(found)) == len(found)
    assert space(first) == found[0], "the same again"
    assert space(replace(first, dp_rank=1)) == found[0], "other requests, the same model"


def test_an_engine_whose_weights_nothing_names_shares_nothing(tmp_path: Path) -> None:
    folder = server(model_path=str(tmp_path))
    assert space(Config(), folder) != space(Config(), folder)


def test_long_rope_is_refused(tmp_path: Path) -> None:
    """SGLang's factors depend on what else is in the batch."""
    (tmp_path / "config.json").write_text('{"rope_scaling": {"type": "longrope"}}')
    with pytest.raises(UnsupportedError, match="LongRoPE"):
        engine_words(Config(), server(model_path=str(tmp_path)), "0.5.23")


def test_the_served_name_counts_where_nothing_else_is_known() -> None:
    none = server(model_path=None)
    assert space(Config(), none) != space(Config(model_name="another"), none)
    assert space(Config()) == space(Config(model_name="another"))
    with pytest.raises(BadArgumentError, match="does not say which model"):
        space(Config(model_name=None), none)


def test_ranks_of_mla_have_equal_pages() -> None:
    ranks = [Config(is_mla_model=True, tp_size=4, tp_rank=rank) for rank in range(4)]
    assert len({space(one) for one in ranks}) == 1
    assert Shards(ranks[0], MLA, 1).sharing_ranks == 1
    assert Shards(ranks[1], STATE, 1).numbers == [1], "but their states are their own"
    with pytest.raises(UnsupportedError, match="draft model differ by rank"):
        Shards(ranks[0], MHA, 1)
    assert Shards(replace(ranks[0], tp_size=1), MHA, 1).numbers == [0]
    with pytest.raises(UnsupportedError, match="decode context parallel"):
        Shards(replace(ranks[0], dcp_size=2), MLA, 1)


def test_split_heads_are_those_of_more_ranks() -> None:
    """An engine of 1 rank, of 2 and of 4 have the same objects, where 4 is what they agreed on."""
    one = Shards(Config(tp_lcm_size=4, should_split_heads=True), MHA, 4)
    two = [Shards(Config(tp_size=2, tp_rank=rank, tp_lcm_size=4), MHA, 2) for rank in range(2)]
    four = [Shards(Config(tp_size=4, tp_rank=rank, tp_lcm_size=4), MHA, 1) for rank in range(4)]
    assert one.numbers == two[0].numbers + two[1].numbers == [rank.numbers[0] for rank in four]
    assert {str(one.words()) for one in (one, *two, *four)} == {str(one.words())}


def test_ranks_and_tenants_share_a_file_and_stages_do_not() -> None:
    words = engine_words(Config(), server(), "0.5.23")

    def file(config: Config, pool: str = "kv") -> str:
        return file_name(words, {**HOST, "pool": pool}, Shards(config, MHA, 1))

    ranks = {file(Config(tp_size=2, tp_rank=rank)) for rank in range(2)}
    assert len(ranks) == 1
    assert file(Config(pp_size=2)) != file(Config(pp_size=2, pp_rank=1))
    assert file(Config(), "swa").endswith("-swa.pool")
    assert Shards(Config(tp_size=2, attn_cp_size=3), MHA, 1).sharing_ranks == 6
