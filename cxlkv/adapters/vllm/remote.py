"""Which far pools have a rank's heads, and by which keys engines of other ranks name their pages.

The namespace of keys has what K and V are, and also the number of ranks, since a page of another
number has other heads. So an engine that joins the heads of other ranks, or takes some out, looks
there by the keys that it would have as one of these: all words but "heads" and "shards" are its
own, so that another model, dtype, packing or salt is a miss there as it is here.
"""

from __future__ import annotations

from collections.abc import Mapping

from cxlkv.adapters.common.keys import space_of
from cxlkv.adapters.vllm.settings import PREFIX, Settings
from cxlkv.errors import BadArgumentError
from cxlkv.pool import CXLPool
from cxlkv.tiers import remote as tiers


def open_remote(
    pool: CXLPool, settings: Settings, words: Mapping[str, object], heads: int
) -> tiers.RemoteTier | None:
    """What the settings name, for this rank's pool; words: of its keys. heads: kv heads of the
    model.

    As many addresses as this engine has ranks are of an engine like it; another number is of one
    with so many tensor-parallel ranks. Raises BadArgumentError, SecretError.
    """
    addresses, secret = settings.remote, settings.remote_secret
    if not addresses or secret is None:
        return None
    rank, ranks, stage, stages = pool.layout.shard
    deadline_s = settings.deadline_s
    if len(addresses) == ranks * stages:
        own = addresses[stage * ranks + rank]
        return tiers.open_remote(pool, [own], secret, deadline_s=deadline_s)
    there = len(addresses)
    _check(there, ranks, stages, heads, words)
    far = {**words, "heads": heads // there, "shards": (there, 1)}
    ours, theirs = (space_of(given, settings.salt) for given in (words, far))
    delta = bytes(a ^ b for a, b in zip(ours, theirs, strict=True))
    return tiers.open_remote(
        pool, addresses, secret, ranks=there, delta=delta, deadline_s=deadline_s
    )


def _check(there: int, ranks: int, stages: int, heads: int, words: Mapping[str, object]) -> None:
    """Raises BadArgumentError where pages of other ranks are not those here, head by head."""
    said = f"{PREFIX}: remote has {there} addresses, and this engine has {ranks * stages} ranks"
    if "groups" in words:
        raise BadArgumentError(
            f"{said}: where layers have windows or unlike blocks it must be one for each of them"
        )
    if stages > 1:
        raise BadArgumentError(f"{said}: with pipeline stages it must be one for each of them")
    if heads % there or heads % ranks:
        raise BadArgumentError(
            f"{said}: {heads} kv heads cannot be dealt out among both, and are not joined where "
            "ranks have copies of one head"
        )
    if words.get("random") is not None:
        raise BadArgumentError(
            f"{said}: with --load-format dummy, weights differ from one number of ranks to another"
        )
