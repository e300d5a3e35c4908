"""vLLM resets an engine's caches, sleeps and wakes up, and fails or computes what is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import MakeEngine
from .test_prefixes import CACHED, damage, end, folder_in, pool_in, prompts


@pytest.mark.parametrize("attention", ["engine", "pool"])
def test_resets_and_sleep_forget_what_they_say(
    make_engine: MakeEngine, tmp_path: Path, attention: str
) -> None:
    """Sleep from level 1 on resets the connector: vLLM says nothing of why. On a CPU that is all
    that it does; weights and blocks stay."""
    folder, extra = folder_in(tmp_path)
    ours = make_engine({**extra, "attention": attention})
    wanted = ours.generate(prompts())["tokens"]

    def serve(cached: list[int]) -> None:
        found = ours.generate(prompts())
        assert (found["tokens"], found["cached"]) == (wanted, cached)

    ours.forget()
    serve(CACHED)
    ours.forget(connector=True)
    serve([0, 0, 0, 0])
    ours.forget()
    serve(CACHED)
    for level, cached in ((0, CACHED), (1, [0, 0, 0, 0]), (2, [0, 0, 0, 0])):
        assert ours.ask(do="sleep", level=level) == {"sleeps": True}
        with pool_in(folder) as pool:
            assert pool.stats()["pages_published"] > 0
        assert ours.ask(do="wake") == {"sleeps": False}
        ours.forget()
        serve(cached)
        ours.forget()
        serve(CACHED)
    end(folder, ours)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_damaged_page_fails_its_request_where_the_user_wants_that(
    make_engine: MakeEngine, tmp_path: Path, load: str
) -> None:
    """And no other one; asked again it is computed, as the page is not found any more."""
    folder, extra = folder_in(tmp_path)
    ours = make_engine(
        kv_transfer_config={
            "kv_connector": "CXLConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {
                **extra,
                "load_failure": "fail",
                "load": load,
            },
        }
    )
    wanted = ours.generate(prompts())["tokens"]
    damage(folder, page=2, layer=1)
    ours.forget()
    found = ours.generate(prompts())
    assert found["ended"] == ["error", "length", "length", "length"]
    assert found["tokens"][1:] == wanted[1:]
    assert ours.log().count("the CRC of its V is wrong") == 1
    ours.forget()
    again = ours.generate(prompts())
    assert (again["tokens"], again["ended"]) == (wanted, ["length"] * 4)
    end(folder, ours)
