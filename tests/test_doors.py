"""What users write means the same at every door: Python, YAML, an engine's settings, a request,
the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cxlkv import Budget, CXLPool, KVLayout, ObjectPool
from cxlkv.adapters.common import pools
from cxlkv.adapters.vllm.settings import Settings, read_options, read_settings
from cxlkv.errors import BadArgumentError, GeometryError
from cxlkv.machine.sizes import parse_tokens
from cxlkv.ndp.engine import budget_of
from cxlkv.ops.demo import shares_of

from .support import command

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=64, page_tokens=4, model_id="a")


def in_yaml(budget: object, folder: Path) -> Budget | None:
    path = folder / "cxlkv.yaml"
    path.write_text(f"attention: pool\nbudget: {budget}\n")
    return read_settings({"config": str(path)}).budget


def of_budget(budget: Budget | None) -> float | None:
    assert budget is not None
    return budget.share


# What a person wrote: text, too, though Python's annotations have a number.
SHARE_DOORS: dict[str, Callable[[float, Path], float | None]] = {
    "Python": lambda given, _: of_budget(budget_of(given)),
    "Budget": lambda given, _: Budget(share=given).share,
    "by_layer": lambda given, _: Budget(by_layer={3: given}).by_layer[3],
    "mass": lambda given, _: Budget(mass=given).mass,
    "settings": lambda given, _: of_budget(
        read_settings({"attention": "pool", "budget": given}).budget
    ),
    "audit": lambda given, _: read_settings({"audit": given}).audit,
    "a request": lambda given, _: of_budget(
        read_options({"cxlkv": {"budget": given}}, Settings()).budget
    ),
    "YAML": lambda given, folder: of_budget(in_yaml(given, folder)),
    "a command": lambda given, _: shares_of(str(given))[0],
}


@pytest.fixture(params=SHARE_DOORS)
def share_at(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[float], float | None]:
    return lambda given: SHARE_DOORS[request.param](given, tmp_path)


@pytest.mark.parametrize(
    ("given", "share"),
    [(0.05, 0.05), ("0.05", 0.05), ("5%", 0.05), ("2.5 %", 0.025), (1.0, 1.0), ("100%", 1.0)],
)
def test_a_share(share_at: Callable[[float], float | None], given: float, share: float) -> None:
    assert share_at(given) == share


NO_SHARE = r"not a.*: write it like 0.05 or 5%; all is 1.0"


@pytest.mark.parametrize("given", ["1", 5, "5", 1.5, "101%", "-5%", "0%", "5%%", "all", "nan%"])
def test_what_is_no_share(share_at: Callable[[float], float | None], given: float) -> None:
    with pytest.raises(BadArgumentError, match=NO_SHARE):
        share_at(given)


@pytest.mark.parametrize("door", ["Python", "settings", "a request", "YAML", "a command"])
def test_a_bare_1_is_no_budget(door: str, tmp_path: Path) -> None:
    """It was 100 %, where 1 % or a page may have been meant; Budget(share=1) says which."""
    with pytest.raises(BadArgumentError, match=NO_SHARE):
        SHARE_DOORS[door](1, tmp_path)
    assert SHARE_DOORS["Budget"](1, tmp_path) == 1


def test_a_share_in_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--layout", "{layers: 2, kv_heads: 2, head_dim: 64}"]
    for words in (
        ["advise", *shape, "--share", "1"],
        ["demo", "--model", ".", "--text", ".", "--budget", "1"],
    ):
        assert "write it like 0.05 or 5%" in command.run(capsys, *words).err


def test_numbers_of_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that takes so many tokens takes 32K, and says of a wrong one what is right."""
    shape = ["--layout", "{layers: 2, kv_heads: 2, head_dim: 64}"]
    found = [parse_tokens(text) for text in ("5000", "32K", "1.5k", "1M", "1G")]
    assert found == [5000, 1 << 15, 1536, 1 << 20, 1 << 30]
    for words in (
        ["size", "smollm2", "--tokens"],
        ["advise", *shape, "--tokens"],
        ["demo", "--model", ".", "--text", ".", "--tokens"],
    ):
        assert "write it like 5000, 32K or 1M" in command.run(capsys, *words, "32KB").err


@pytest.mark.parametrize(
    ("where", "write"),
    [("anonymous", "anonymous:"), ("dax0.0", "/dev/dax0.0"), ("numa", "numa:NODE")],
)
def test_a_word_that_is_no_file(
    where: str, write: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It made a file of that name in the current folder."""
    monkeypatch.chdir(tmp_path)
    config = {"where": where, "capacity": "8MiB"}
    for use in (
        lambda: CXLPool.create(where, layout=LAYOUT, capacity="8MiB"),
        lambda: CXLPool.open_or_create(where, layout=LAYOUT, capacity="8MiB"),
        lambda: CXLPool.open(where),
        lambda: CXLPool.from_config(config, layout=LAYOUT),
        lambda: read_settings({"where": where}),
    ):
        with pytest.raises(BadArgumentError, match=f"write {write}"):
            use()
    assert list(tmp_path.iterdir()) == []
    CXLPool.create(f"./{where}", layout=LAYOUT, capacity="8MiB").close()


def test_a_place_without_a_slash() -> None:
    for use in (
        lambda: read_settings({"where": "pool"}),
        lambda: CXLPool.from_config({"where": "pool", "capacity": "8MiB"}, layout=LAYOUT),
    ):
        with pytest.raises(BadArgumentError, match="from the root is wanted: write /dev/shm/pool"):
            use()


def test_a_folder_for_a_file(tmp_path: Path) -> None:
    told = "is a folder: write a file in it, like /"
    with pytest.raises(BadArgumentError, match=told):
        CXLPool.create(tmp_path, layout=LAYOUT, capacity="8MiB")
    with pytest.raises(BadArgumentError, match=told):
        CXLPool.open(f"{tmp_path}/")


OTHER = KVLayout(layers=2, kv_heads=2, head_dim=128, page_tokens=4, model_id="b")


def test_of_another_pool_what_differs_is_told(tmp_path: Path) -> None:
    """Two fields, and neither of the two layouts as a whole."""
    path = str(tmp_path / "pool")
    CXLPool.create(path, layout=LAYOUT, capacity="8MiB").close()
    for use in (
        lambda: CXLPool.open(path, layout=OTHER),
        lambda: CXLPool.open_or_create(path, layout=OTHER, capacity="8MiB"),
        lambda: pools.make_or_open(CXLPool, path, OTHER, "8MiB"),
    ):
        with pytest.raises(GeometryError) as raised:
            use()
        told = "layout.model_id is 'a' there, 'b' wanted; layout.head_dim is 64 there, 128 wanted"
        assert told in str(raised.value)
        assert "page_tokens" not in str(raised.value)
    with pytest.raises(GeometryError, match="of K and V there, of objects up to 4 KiB wanted"):
        pools.make_or_open(ObjectPool, path, KVLayout.objects("4KiB"), "8MiB")
