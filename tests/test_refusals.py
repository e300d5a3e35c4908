"""Each name that was taken out is refused at its door, with what to say instead."""

from __future__ import annotations

import re
from importlib import import_module
from typing import cast

import pytest

import cxlkv
from cxlkv import CXLPool, ObjectPool, Tiers
from cxlkv.bench.registry import CASES, named
from cxlkv.config import read_config
from cxlkv.errors import BadArgumentError
from cxlkv.ops.cli import main
from cxlkv.refusals import ARGUMENTS, COMMANDS, NAMES, OPTIONS, REMOVED_CASES, SETTINGS


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_a_setting(setting: str) -> None:
    key, _, value = setting.partition(": ")
    with pytest.raises(BadArgumentError, match=re.escape(SETTINGS[setting])) as found:
        read_config({"where": "anonymous:", "capacity": "8MiB", key: value or True})
    assert f"{setting} was taken out" in str(found.value)


@pytest.mark.parametrize("words", sorted({*COMMANDS, *OPTIONS}))
def test_words_of_the_command_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), "more"])
    assert ended.value.code == 2
    instead = COMMANDS.get(words) or OPTIONS[words]
    assert capsys.readouterr().err == f"error: {words} was taken out: {instead}\n"


def test_an_option_is_refused_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["bench", "run", "replay", "--near=1GiB"], ["bench", "replay", "--near", "1GiB"]):
        with pytest.raises(SystemExit):
            main(words)
        assert "replay judges policies alone" in capsys.readouterr().err


def test_a_case() -> None:
    assert not REMOVED_CASES.keys() & CASES.keys()
    for case, instead in REMOVED_CASES.items():
        with pytest.raises(BadArgumentError, match=f"^{case} was taken out: {instead}$"):
            named(case)


def test_a_name(pool: CXLPool) -> None:
    owners: dict[str, object] = {"Pool": pool, "Tiers": Tiers(pool)}
    for name, instead in NAMES.items():
        owner, _, attribute = name.rpartition(".")
        with pytest.raises(AttributeError, match=f"^{name} was taken out: {instead}$"):
            getattr(owners.get(owner) or import_module(owner), attribute)
    cast(Tiers, owners["Tiers"]).close()


def test_an_attribute_can_not_be_set_by_mistake(pool: CXLPool) -> None:
    with pytest.raises(AttributeError, match=r"say pool\.admin\.audit"):
        pool.audit = 0.5  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="'CXLPool' object has no attribute 'put'"):
        pool.put("a", b"b")  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="module 'cxlkv' has no attribute 'warm'"):
        cxlkv.warm  # noqa: B018


def test_an_argument(pool: CXLPool) -> None:
    from cxlkv.adapters.transformers.cache import CXLCache

    for name, given in (("near", True), ("dense_layers", 2)):
        with pytest.raises(BadArgumentError, match=re.escape(ARGUMENTS[f"CXLCache({name}=)"])):
            CXLCache(pool, None, **{name: given})  # type: ignore[arg-type]
    with pytest.raises(
        BadArgumentError, match=re.escape(ARGUMENTS["CXLCache(attention='device')"])
    ):
        CXLCache(pool, None, attention="device")
    with pytest.raises(BadArgumentError, match=re.escape(ARGUMENTS["Tiers(near=)"])):
        Tiers(pool, near="1MiB")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Tiers\(\) got an unexpected keyword argument 'warm'"):
        Tiers(pool, warm=1)  # type: ignore[arg-type]


def test_a_pool_has_few_methods() -> None:
    def methods(kind: type) -> set[str]:
        return {n for n in dir(kind) if n[0] != "_" and callable(getattr(kind, n))}

    assert len(methods(CXLPool)) <= 20, sorted(methods(CXLPool))
    assert len(methods(ObjectPool)) <= 20, sorted(methods(ObjectPool))
