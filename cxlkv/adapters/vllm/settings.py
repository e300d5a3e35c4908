"""Settings in kv_connector_extra_config, and in the kv_transfer_params of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf

from cxlkv.adapters.common.settings import (
    PoolSettings,
    Rule,
    number,
    one_of,
    read,
    size,
    whole_number,
)
from cxlkv.adapters.vllm.messages import TIERS, Options
from cxlkv.errors import BadArgumentError
from cxlkv.ndp.engine import METHODS, Budget
from cxlkv.pages import PRIORITY_MAX

PREFIX = "kv_connector_extra_config"
OPTIONS: Mapping[str, Rule] = {
    "save": one_of(True, False),
    "tier": one_of(*TIERS),
    "ttl_s": number(0, 7 * 86400),
    "priority": whole_number(0, PRIORITY_MAX),
}
"""Of a request, beside its budget."""
BY_MASS = ("auto", "exact", "attention")
_NUMBERS: dict[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(("pages", "sinks", "recent", "dense_layers", "refresh"), (int, "whole number")),
    **dict.fromkeys(("share", "mass"), ((int, float), "number")),
    "by_layer": (Mapping, "mapping of layers to amounts"),
}


@dataclass(frozen=True, kw_only=True)
class Settings(PoolSettings):
    """attention: "engine": the engine's own, and prefixes are kept in the pool; "pool": K and V of
    running requests live in the pool, and attention is computed near them.

    budget: for decode steps of requests that say nothing, with attention="pool"; method: how it
    chooses pages, as in Batch.select. audit: share of
    selects whose recall is measured. load: "sync": a step waits for its hits layer by layer;
    "async": requests wait, steps do not. deadline_s: a load that takes longer has failed.
    load_failure: "recompute": tokens of a hit that could not be loaded are computed; "fail": what
    the engine does with its requests is left as the engine has it, which by default is to fail
    them. tails: whether what ended requests have beyond their last whole block is kept, too.
    """

    attention: str = "engine"
    budget: Budget | None = None
    method: str = "auto"
    audit: float = 0.0
    load: str = "sync"
    deadline_s: float = 5.0
    load_failure: str = "recompute"
    local: str | int | None = None
    worker: bool = False
    tails: bool = False


def read_settings(given: Mapping[str, object]) -> Settings:
    """Raises BadArgumentError, which names the key and what is allowed."""
    rules = {
        "attention": one_of("engine", "pool"),
        "budget": lambda _, value: read_budget(value, PREFIX),
        "method": one_of(*METHODS),
        "audit": number(0, 1),
        "load": one_of("sync", "async"),
        "deadline_s": number(1e-6, inf),
        "load_failure": one_of("recompute", "fail"),
        "local": size,
        "worker": one_of(True, False),
        "tails": one_of(True, False),
    }
    found = read(Settings, given, PREFIX, rules)
    if found.attention != "pool":
        for name in ("local", "worker"):
            if getattr(found, name):
                raise BadArgumentError(
                    f'{PREFIX}: {name} needs "attention": "pool": the engine\'s attention reads '
                    "blocks of its own"
                )
    if found.budget is not None and found.attention != "pool":
        raise BadArgumentError(
            f'{PREFIX}: a budget needs "attention": "pool": the engine\'s attention has none'
        )
    if found.budget is not None and found.budget.mass and found.method not in BY_MASS:
        raise BadArgumentError(
            f"{PREFIX}: method is {found.method!r}: a budget of mass needs one of "
            f"{', '.join(BY_MASS)}"
        )
    return found


def check_enclosing(settings: Settings, connector: object) -> None:
    """Where `connector` has us in it, beside others: they want blocks that the engine attends to.

    Raises BadArgumentError.
    """
    if settings.attention == "pool":
        raise BadArgumentError(
            f'{PREFIX}: "attention": "pool" inside {connector}: the engine has no blocks then that '
            "another connector could save. Make ours the engine's only connector, or write "
            '"attention": "engine"'
        )


def check_loads(settings: Settings, connector: object, policy: object) -> None:
    """What becomes of a hit that cannot be loaded, where `connector` has us in it.

    policy: the engine's, which its scheduler reads: it gives us a copy of its settings, so that we
    cannot set it. A step that waits for a hit computes from what is not there, before anybody knows
    that, and the other connectors save it. Raises BadArgumentError, which says what to write.
    """
    if settings.load == "sync":
        raise BadArgumentError(
            f'inside {connector} write "load": "async" in our {PREFIX}: the connectors beside ours '
            "save what a step has computed, also from a hit that turns out to be damaged"
        )
    if settings.load_failure == "recompute" and policy != "recompute":
        raise BadArgumentError(
            f"inside {connector} a hit that cannot be loaded would fail its request: beside "
            f'"kv_connector": "{connector}" write "kv_load_failure_policy": "recompute"; or, if '
            f'such requests are to fail, write "load_failure": "fail" in our {PREFIX}'
        )


def read_budget(given: object, where: str) -> Budget | None:
    """A budget written as a mapping of Budget's own words, like {"share": 0.1}; true is Budget(),
    null and false are all pages."""
    if given is None or given is False:
        return None
    if given is True:
        return Budget()
    known = [one.name for one in fields(Budget)]
    if not isinstance(given, Mapping) or not set(given) <= set(known):
        raise BadArgumentError(
            f"{where}: budget is {given!r}: keys and values are wanted, of {', '.join(known)}"
        )
    for name, value in given.items():
        kinds, wanted = _NUMBERS.get(name, (object, ""))
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise BadArgumentError(f"{where}: budget: {name} is {value!r}: a {wanted} is wanted")
    words = dict(given)
    if layers := words.pop("by_layer", None):  # JSON has text for keys
        words["by_layer"] = {int(n) if str(n).isdigit() else n: of for n, of in layers.items()}
    try:
        return Budget(**words)
    except BadArgumentError as error:
        raise BadArgumentError(f"{where}: budget: {error}") from error


def read_options(given: object, settings: Settings) -> Options:
    """Of one request: {"cxlkv": {"budget": {"pages": 8} or null, "save": false, "tier": "far",
    "ttl_s": 60, "priority": 3}}.

    Raises BadArgumentError; other connectors' keys beside "cxlkv" are theirs.
    """
    own = given.get("cxlkv") if isinstance(given, Mapping) else None
    if own is None:
        return Options(settings.budget)
    place, found = "kv_transfer_params", {}
    if not isinstance(own, Mapping) or not set(own) <= {"budget", *OPTIONS}:
        raise BadArgumentError(
            f"{place}: cxlkv is {own!r}: keys and values are wanted, of budget, "
            f"{', '.join(OPTIONS)}"
        )
    for name in OPTIONS.keys() & own.keys():
        found[name] = OPTIONS[name](f"{place}: {name} is {own[name]!r}", own[name])
    budget = settings.budget
    if "budget" in own:
        budget = read_budget(own["budget"], place)
    return Options(budget, **found)  # type: ignore[arg-type]
