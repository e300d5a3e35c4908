"""Settings in kv_connector_extra_config, and in the kv_transfer_params of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from cxlkv.adapters.common.settings import PoolSettings, read
from cxlkv.adapters.vllm.messages import Options
from cxlkv.config import Keys, Size, Source, checked, read_yaml
from cxlkv.errors import BadArgumentError
from cxlkv.ndp import scorers
from cxlkv.ndp.audit import share_or_none
from cxlkv.ndp.engine import Budget, budget_of
from cxlkv.pages import PRIORITY_MAX

if TYPE_CHECKING:
    from typing_extensions import Self

PREFIX = "kv_connector_extra_config"


def _budget(given: object) -> Budget | None:
    """A budget written as a share of the pages, like 0.1 or "10%", or as a mapping of Budget's own
    words, like {"pages": 64}; true is Budget(), null and false are all pages."""
    if given is None or given is False:
        return None
    if given is True:
        return Budget()
    if isinstance(given, (Budget, float, int, str)):
        return budget_of(given)
    known, words = [one.name for one in fields(Budget)], given
    if not isinstance(words, Mapping) or not set(words) <= set(known):
        raise BadArgumentError(f"{given!r}: keys and values are wanted, of {', '.join(known)}")
    if isinstance(layers := words.get("by_layer"), Mapping):  # JSON has text for keys
        layers = {int(n) if str(n).isdigit() else n: of for n, of in layers.items()}
        words = {**words, "by_layer": layers}
    return Budget(**words)


_Budget = Annotated[Budget | None, PlainValidator(_budget)]


class Settings(PoolSettings):
    """attention: "engine": the engine's own, and prefixes are kept in the pool; "pool": K and V of
    running requests live in the pool, and attention is computed near them.

    budget: for decode steps of requests that say nothing, with attention="pool"; method: how it
    chooses pages, as in Batch.select. audit: share of
    selects whose recall is measured. audit_hits: of every so many hits one is audited, 0: of none.
    load: "sync": a step waits for its hits layer by layer;
    "async": requests wait, steps do not. deadline_s: a load that takes longer has failed.
    load_failure: "recompute": tokens of a hit that could not be loaded are computed; "fail": what
    the engine does with its requests is left as the engine has it, which by default is to fail
    them. local: bytes of the engine's memory for copies of hot pages; hot: of a GPU's, for those
    that its decode steps choose. index: who chooses them, as in cxlkv.gpu.decode.Decoder: with
    "device" such steps may be CUDA graphs. worker: the worker near the memory selects and attends.
    tails: whether what ended requests have beyond their last whole block is kept, too. shards:
    pools that all kv heads are dealt out among, as by so many tensor-parallel ranks: engines of
    unlike sizes that name one number share pools. None: as many as the engine has ranks.
    """

    attention: Literal["engine", "pool"] = "engine"
    budget: _Budget = None
    method: str = "auto"
    audit: Annotated[float, BeforeValidator(share_or_none)] = 0.0
    audit_hits: int = Field(0, ge=0, description="a whole number, 0 or more")
    load: Literal["sync", "async"] = "sync"
    deadline_s: float = Field(5.0, gt=0, description="a number above 0")
    load_failure: Literal["recompute", "fail"] = "recompute"
    local: Size | None = None
    hot: Size | None = None
    index: Literal["auto", "host", "device"] = "auto"
    worker: bool = False
    tails: bool = False
    shards: int | None = Field(None, ge=1, description="a whole number, 1 or more")

    @model_validator(mode="after")
    def _of_the_pool(self) -> Self:
        for name in ("local", "hot", "worker", "budget"):
            if self.attention != "pool" and getattr(self, name):
                raise BadArgumentError(
                    f"{{{name}}} needs {{attention}}: pool, as the engine's attention reads blocks "
                    "of its own, and all of them"
                )
        if self.attention != "pool" and self.index != "auto":
            raise BadArgumentError("{index} needs {attention}: pool, whose pages a GPU chooses")
        if self.attention == "pool" and self.shards is not None:
            raise BadArgumentError(
                "{shards} needs {attention}: engine: where attention is in the pool, a rank has one"
            )
        try:
            scorers.check(self.method)
        except BadArgumentError as error:
            raise BadArgumentError(f"{{method}}: {error}") from None
        if self.budget is not None and self.budget.mass and not scorers.takes_mass(self.method):
            raise BadArgumentError(
                f"{{method}} is {self.method!r}: a {{budget}} of mass needs one of "
                f"{', '.join(scorers.BY_MASS)}, or a method that estimates attention"
            )
        return self


def read_settings(given: Mapping[str, object]) -> Settings:
    """Raises BadArgumentError, which names the key and what is allowed."""
    return read(Settings, given, PREFIX)


def attends_in_pool(given: Mapping[str, object]) -> bool:
    """Whether settings that are not checked yet, or the file that they name, have attention: pool.
    Raises BadArgumentError for a file that cannot be read."""
    said, path = given.get("attention"), given.get("config")
    if "attention" not in given and isinstance(path, str):
        said = read_yaml(path)[0].get("attention")
    return said == "pool"


def check_enclosing(settings: Settings, connector: object) -> None:
    """Check settings where `connector` has us beside others, which want blocks that the engine
    attends to.

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


class _Request(Keys):
    """Options of one request.

    budget: pages that its decode steps may attend to; null: all. save: whether its prefix is
    published. tier: from how far down its hit may come. ttl_s: so many seconds its prefix stays in
    the pool after its end; 0: what was kept of it before is let go. priority: of its pages when
    others make room.
    """

    budget: _Budget = None
    save: bool = True
    tier: Literal["far", "cold"] = "cold"
    ttl_s: float | None = Field(
        None, ge=0, le=7 * 86400, description="a number from 0 to 604800, a week"
    )
    priority: int = Field(
        0, ge=0, le=PRIORITY_MAX, description=f"a whole number from 0 to {PRIORITY_MAX}"
    )


def read_options(given: object, settings: Settings) -> Options:
    """Read the options of one request: {"cxlkv": {"budget": {"pages": 8} or null, "save": false,
    "tier": "far", "ttl_s": 60, "priority": 3}}.

    Raises BadArgumentError; other connectors' keys beside "cxlkv" are theirs.
    """
    own = given.get("cxlkv") if isinstance(given, Mapping) else None
    if own is None:
        return Options(settings.budget)
    if not isinstance(own, Mapping):
        raise BadArgumentError(f"kv_transfer_params: cxlkv is {own!r}: keys and values are wanted")
    asked = checked(_Request, own, Source("kv_transfer_params: cxlkv"))
    budget = asked.budget if "budget" in own else settings.budget
    if settings.index == "device" and not _is_within(budget, settings.budget):
        raise BadArgumentError(
            'kv_transfer_params: cxlkv: with "index": "device" a request has the engine\'s budget, '
            "or one of fewer pages, as graphs have lists of that length"
        )
    return Options(budget, asked.save, asked.tier, asked.ttl_s, asked.priority)


def _is_within(budget: Budget | None, most: Budget | None) -> bool:
    """Whether the one asks for no more pages than the other, and for these in the same way."""
    if budget is None or budget.mass is not None:
        return budget is most
    most = most or Budget(share=1.0)  # as the device has it
    fewer = (budget.pages_at_most(1 << n) <= most.pages_at_most(1 << n) for n in range(21))
    return replace(budget, pages=most.pages, share=most.share) == most and all(fewer)
