"""A router that follows KV events as Dynamo's and llm-d's do, and ignores what either ignores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

Hash = int | bytes | str
ORDER = {
    "BlockStored": (
        "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys "
        "group_idx kv_cache_spec_kind kv_cache_spec_sliding_window locality ownership session_id"
    ).split(),
    "BlockRemoved": "block_hashes medium group_idx locality ownership".split(),
    "AllBlocksCleared": [],
}
"""Fields of an event that is an array, after its type."""
TIERS: dict[str | None, str] = {None: "gpu", "GPU": "gpu", "STORAGE": "disk", "DISK": "disk"}
TIERS.update(dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1"), "cpu"))
KINDS = ("full_attention", "mla_attention", "sink_full_attention")


def as_map(event: object) -> Mapping[str, object]:
    """An event as it was decoded: vLLM sends maps since 0.26, and sent arrays before."""
    if isinstance(event, Mapping):
        return event
    kind, *values = cast("list[str]", event)
    return {"type": kind, **dict(zip(ORDER[kind], values, strict=False))}


def as_array(event: Mapping[str, object]) -> list[object]:
    kind = str(event["type"])
    return [kind, *(event.get(name) for name in ORDER[kind])]


class Router:
    """A router of one model's workers. dropped: events that it ignored, with why."""

    def __init__(self, block_tokens: int):
        self._tokens = block_tokens
        self._counts: dict[str, Counter[tuple[str, Hash]]] = {}  # tier and block, as llm-d counts
        self._groups: dict[tuple[str, object], object] = {}
        self.dropped: list[tuple[str, Mapping[str, object]]] = []

    def holds(self, worker: str, tier: str = "cpu") -> set[Hash]:
        """What Dynamo believes, whose blocks are a set, and llm-d, which counts: the same, or some
        block was told of twice, or was not there when it went."""
        counts = self._counts.get(worker, Counter())
        assert set(counts.values()) <= {1}, {one for one in counts.items() if one[1] != 1}
        return {block for place, block in counts if place == tier}

    def forget(self, worker: str) -> None:
        """It has gone away."""
        self._counts.pop(worker, None)

    def hear(self, worker: str, event: object) -> None:
        fields = as_map(event)
        if fields["type"] == "AllBlocksCleared":
            self.forget(worker)
            return
        why = self._concern(worker, fields)
        if why:
            self.dropped.append((why, fields))
            return
        tier = TIERS[cast("str | None", fields.get("medium"))]
        counts = self._counts.setdefault(worker, Counter())
        for one in cast("list[Hash]", fields["block_hashes"]):
            counts[tier, one] += 1 if fields["type"] == "BlockStored" else -1
            if not counts[tier, one]:
                del counts[tier, one]

    def _concern(self, worker: str, fields: Mapping[str, object]) -> str:
        """Why it is ignored, empty if it is not."""
        if fields.get("medium") not in TIERS:
            return "a medium that nobody knows"
        if fields.get("locality") not in (None, "LOCAL"):
            return "not here"
        group = worker, fields.get("group_idx")
        if fields["type"] == "BlockStored":
            self._groups.setdefault(group, fields.get("kv_cache_spec_kind"))
        if group[1] is not None and self._groups.get(group) not in KINDS:
            return "a group that says nothing of prefixes"
        if fields["type"] == "BlockRemoved":
            return ""
        blocks, ids = (cast("Sequence[Hash]", fields[n]) for n in ("block_hashes", "token_ids"))
        if fields["block_size"] != self._tokens or len(ids) != len(blocks) * self._tokens:
            return "blocks of another size"
        parent = cast("Hash | None", fields.get("parent_block_hash"))
        known = {block for counts in self._counts.values() for _, block in counts}
        return "" if parent is None or parent in known else "a parent that was not told of"
