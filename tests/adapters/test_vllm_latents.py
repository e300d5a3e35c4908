"""Latents of MLA without vLLM: what is refused, keys and pools of ranks, the probe, attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout
from cxlkv.adapters.common.keys import block_keys, namespace, space_of
from cxlkv.adapters.vllm import pools
from cxlkv.adapters.vllm.admission import Admission
from cxlkv.adapters.vllm.counting import Counting
from cxlkv.adapters.vllm.groups import BlockGroup, layout_of
from cxlkv.adapters.vllm.latents import (
    are_latents,
    check_audits,
    check_encoding,
    check_latents,
    have_indexers,
    rope_concern,
)
from cxlkv.adapters.vllm.loading import BlockMemory
from cxlkv.adapters.vllm.messages import Message, Report, Span, Started
from cxlkv.adapters.vllm.scheduler import Step
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.layout import LayerGroup

from ..support.damaging import damage_piece
from ..support.paged_engine import Request, text
from ..support.paged_engines import engines_in
from .test_vllm_complaints import config

torch = pytest.importorskip("torch", reason="the engine's blocks and rows are torch's")
if TYPE_CHECKING:
    from torch import Tensor

from cxlkv.adapters.vllm.pool_attention import (  # noqa: E402  it needs torch
    PoolAttention,
    Rows,
    Scores,
    attend_alone,
)
from cxlkv.adapters.vllm.probe import Attention, Probe  # noqa: E402

RANK, ROPE, HEADS, TOKENS = 48, 16, 4, 16
DIM, SCORES = RANK + ROPE, Scores((RANK + ROPE) ** -0.5)
NAMES = ["one", "two"]


class Role(Enum):
    SPARSE = "sparse"
    INDEXER = "indexer"


@dataclass
class Latent:
    """What vLLM's MLAAttentionSpec says."""

    block_size: int = TOKENS
    num_kv_heads: int = 1
    head_size: int = DIM
    head_size_v: int = 0
    tokens_per_state: int = 1
    alignment: int | None = None
    model_version: str | None = None
    cache_dtype_str: str = "auto"
    state_content_bytes: int | None = None
    cache_role: Role = Role.SPARSE
    is_index_group_leader: bool = False
    dtype: object = torch.float32


INDEXER = Latent(head_size=132, cache_role=Role.INDEXER, dtype=torch.uint8)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("kind", "differs", "said"),
    [
        ("MLAAttentionSpec", {"cache_role": Role.INDEXER}, "an indexer that keeps 64 numbers of"),
        (
            "MLAAttentionSpec",
            {"cache_role": Role.INDEXER, "dtype": torch.uint8, "head_size": 33},
            "an indexer that keeps 33 numbers of torch.uint8",
        ),
        ("MLAAttentionSpec", {"tokens_per_state": 4}, "states of several tokens.*DeepSeek-V4"),
        ("MLAAttentionSpec", {"alignment": 576}, "padded rows.*DeepSeek-V4"),
        ("MLAAttentionSpec", {"model_version": "deepseek_v4"}, "DeepSeek-V4"),
        ("SlidingWindowMLASpec", {}, "windows .*DeepSeek-V4"),
        (
            "MLAAttentionSpec",
            {"state_content_bytes": 656, "cache_dtype_str": "fp8_ds_mla"},
            "rows of fp8_ds_mla",
        ),
    ],
)
def test_latents_in_other_forms_are_refused_by_their_cause(
    kind: str, differs: dict[str, object], said: str
) -> None:
    pools.check_groups([("MLAAttentionSpec", Latent())])
    wrong = replace(Latent(), **differs)  # type: ignore[arg-type]
    for kinds in ([(kind, wrong)], [("MLAAttentionSpec", Latent()), (kind, wrong)]):
        with pytest.raises(UnsupportedError, match=rf"latents \({kind}, MLA\) with .*{said}"):
            pools.check_groups(kinds)


@pytest.mark.parametrize("spec", [INDEXER, Latent(is_index_group_leader=True)])
def test_indexers_are_refused_where_attention_is_in_the_pool(spec: Latent) -> None:
    kinds = [("MLAAttentionSpec", spec)]
    pools.check_groups(kinds)
    assert have_indexers([Latent(), spec])
    assert not have_indexers([Latent()])
    with pytest.raises(UnsupportedError, match=r"an indexer .*-V3.2 .* in the pool: remedy"):
        check_latents(kinds, "remedy", in_pool=True)


def test_an_indexer_is_in_the_names_of_keys(tmp_path: Path) -> None:
    """It may be the first layer, which is the one that names are made of, or another one."""
    other = replace(INDEXER, cache_role=Role.SPARSE)
    found = [
        pools.words_of(
            engine_of(tmp_path, 1), [("MLAAttentionSpec", one) for one in specs], "latents"
        )
        for specs in ([INDEXER], [other], [Latent(), INDEXER], [Latent(), other])
    ]
    assert len({space_of(words, "") for words in found}) == 4


def test_latents_in_fewer_bits_are_refused() -> None:
    check_encoding("none", [Latent()])
    check_encoding("int8", [Latent(head_size_v=DIM)])
    with pytest.raises(UnsupportedError, match=r'int8: leave out "encoding" and --kv-cache-dtype'):
        check_encoding("int8", [Latent()])


def test_audits_of_indexers_are_refused() -> None:
    check_audits(0, [Latent(), INDEXER])
    check_audits(4, [Latent()])
    with pytest.raises(UnsupportedError, match=r'indexers, .* leave out "audit_hits"'):
        check_audits(4, [Latent(), INDEXER])


def test_keys_that_the_engine_turns_wrong_are_said() -> None:
    assert rope_concern(["deepseek_yarn"]) is None
    assert "no YaRN" in (rope_concern(["default"]) or "")


# ---- keys and pools of ranks ----


def engine_of(folder: Path, tensor: int, *, dummy: bool = False) -> SimpleNamespace:
    made = config(str(folder))
    made.parallel_config.tensor_parallel_size = tensor
    if dummy:
        made.load_config.load_format = "dummy"
    return made


def test_ranks_of_any_number_have_one_pool_and_equal_keys(tmp_path: Path) -> None:
    """Unless their weights are random."""
    kinds = [("MLAAttentionSpec", Latent())]

    def found(tensor: int, *, dummy: bool = False) -> tuple[list[str], bytes]:
        engine = engine_of(tmp_path, tensor, dummy=dummy)
        words = pools.words_of(engine, kinds, "latents")
        ranks = [pools.ranks_of(engine, [Latent()], rank) for rank in range(tensor)]
        assert [one.saves for one in ranks] == [True, *[False] * (tensor - 1)]
        assert {one.shard(*one.own) for one in ranks} == {(0, 1, 0, 1)}
        paths = [pools.pool_path(f"{tmp_path}/", words, one, *one.own) for one in ranks]
        return sorted(set(paths)), space_of(words, "")

    assert found(1) == found(2) == found(4)
    assert len(found(4)[0]) == 1
    assert len({found(tensor, dummy=True)[1] for tensor in (1, 2, 4)}) == 3


def test_other_layers_have_a_pool_a_rank(tmp_path: Path) -> None:
    plain = Latent(head_size_v=DIM)
    engine = engine_of(tmp_path, 2)
    for specs in ([plain], [plain, Latent()]):
        ranks = [pools.ranks_of(engine, specs, rank) for rank in range(2)]
        assert [(one.pools, one.saves) for one in ranks] == [(2, True), (2, True)]
        assert [one.shard(*one.own) for one in ranks] == [(0, 2, 0, 1), (1, 2, 0, 1)]


@pytest.mark.parametrize(
    ("heads", "tensor", "copies"), [(1, 1, 1), (1, 4, 4), (2, 4, 2), (4, 4, 1), (8, 4, 1)]
)
def test_ranks_with_the_same_kv_head_have_one_pool(
    tmp_path: Path, heads: int, tensor: int, copies: int
) -> None:
    """Unless some layers have another number of heads."""
    own = Latent(head_size_v=DIM, num_kv_heads=max(1, heads // tensor))
    engine = engine_of(tmp_path, tensor)
    engine.model_config.model_arch_config = SimpleNamespace(
        total_num_kv_heads=heads, per_layer_overrides=None
    )
    kinds = [("FullAttentionSpec", own)]
    ranks = [pools.ranks_of(engine, [own], rank) for rank in range(tensor)]
    assert [one.shard(*one.own)[0] for one in ranks] == [rank // copies for rank in range(tensor)]
    assert {one.pools for one in ranks} == {tensor // copies}
    assert pools.words_of(engine, kinds, "vec")["shards"] == (tensor // copies, 1)
    for more in ([replace(own, num_kv_heads=2)], [SimpleNamespace()]):
        assert pools.ranks_of(engine, [own, *more]).copies == 1
    engine.speculative_config = SimpleNamespace(method="eagle")
    assert pools.ranks_of(engine, [own]).copies == 1


@pytest.mark.parametrize("load", ["sync", "async"])
def test_one_rank_saves_and_all_load(tmp_path: Path, load: str) -> None:
    with engines_in(tmp_path, load=load) as engines:
        first, second, alone = engines(copies=2), engines(copies=2), engines()
        first.serve("a", text(1, 30))
        first.step()
        assert engines.published() == 7
        assert [rank.worker.pool.stats()["appended_bytes"] > 0 for rank in first.ranks] == [1, 0]
        assert first.scheduling.changes()
        for engine in (second, alone):
            engine.serve("a", text(1, 30))
            engine.settle()
            engine.step()
            assert (engine.cached["a"], engine.recomputed) == (28, 0)
        alone.serve("b", text(2, 30))
        alone.step()
        assert second.run_to_end("b", text(2, 30)) == 28


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_damaged_page_is_computed_by_all_ranks_and_healed_by_one(
    tmp_path: Path, load: str
) -> None:
    with engines_in(tmp_path, load=load) as engines:
        first, second = engines(copies=2), engines(copies=2)
        first.serve("a", text(1, 33))
        with CXLPool.open(engines.paths[0], threads=1) as pool:
            damage_piece(pool, 3, 1)
        second.serve("a", text(1, 33))
        second.settle()
        for _ in range(6):
            second.step()
        assert second.recomputed in (1, 2), "the ranks need not find it in the same step"
        assert engines(copies=2).run_to_end("a", text(1, 33)) == 32


def test_of_ranks_that_keep_the_same_the_one_that_saves_counts() -> None:
    counting = Counting(TOKENS)
    saved = Report(stored=[Span("a", 0, 3)], tails={"a": 5})
    counting.heard([saved, Report(saves=False)])
    assert counting.take(Counter())["counts"]["saved_tokens"] == 3 * TOKENS + 5


def test_all_ranks_are_asked_for_their_weights(tmp_path: Path) -> None:
    with engines_in(tmp_path) as engines:
        engine = engines(copies=2)
        engine.scheduling.forgotten()
        for rank, asked in ((0, (None, False)), (1, (0, False))):
            engine.scheduling.heard([Report(weights={rank: b""})])
            assert engine.scheduling.match(Request("a", text(1, 30)), 0) == asked


# ---- the engine's blocks ----

BLOCKS = 7
Write = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], None]


def usual(latent: Tensor, rope: Tensor, cache: Tensor, slots: Tensor) -> None:
    """As vLLM's backends for CPUs lay them out."""
    rows = cache.view(-1, DIM)
    rows[slots, :RANK], rows[slots, RANK:] = latent, rope[:, 0]


def rope_first(latent: Tensor, rope: Tensor, cache: Tensor, slots: Tensor) -> None:
    rows = cache.view(-1, DIM)
    rows[slots, :ROPE], rows[slots, ROPE:] = rope[:, 0], latent


def a_block_before(latent: Tensor, rope: Tensor, cache: Tensor, slots: Tensor) -> None:
    usual(latent, rope, cache, slots - TOKENS)


def without_rope(latent: Tensor, rope: Tensor, cache: Tensor, slots: Tensor) -> None:
    usual(latent, torch.zeros_like(rope), cache, slots)


def probe_of(write: Write) -> tuple[Probe, dict[str, Tensor]]:
    """Of an engine that writes so in its second layer, and as usual in the other."""

    def layer(own: Write) -> SimpleNamespace:
        def update(*given: Tensor) -> None:
            latent, rope, cache, slots = given[:4]
            own(latent, rope, cache, slots)

        impl = SimpleNamespace(do_kv_cache_update=update)
        scales = {"kv_cache_dtype": "auto", "_k_scale": 1.0}
        return SimpleNamespace(impl=impl, kv_lora_rank=RANK, **scales)

    caches = {name: torch.zeros((BLOCKS, 1, TOKENS, DIM)) for name in NAMES}
    memory = {name: BlockMemory(cache, None) for name, cache in caches.items()}
    layers = {"one": layer(usual), "two": layer(write)}
    return Probe(layers, caches, memory, [BlockGroup(TOKENS)], torch.float32), caches


def engine_layout() -> KVLayout:
    specs = [(0, Latent()) for _ in NAMES]
    return layout_of(specs, [BlockGroup(TOKENS)], "float32", (0, 1, 0, 1))


def pool_layout() -> KVLayout:
    group = LayerGroup(
        layers=2,
        kv_heads=1,
        head_dim=DIM,
        value_head_dim=RANK,
        dtype="float32",
        values="key_prefix",
    )
    return KVLayout.of([group], page_tokens=TOKENS)


@pytest.fixture
def pool(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[CXLPool]:
    layout: KVLayout = request.param()
    with CXLPool.create(tmp_path / "a.pool", layout=layout, capacity="8MiB", threads=1) as made:
        yield made
        assert made.admin.check()["clean"]


@pytest.mark.parametrize("pool", [engine_layout], indirect=True)
def test_the_usual_layout_is_served(pool: CXLPool) -> None:
    probe, caches = probe_of(usual)
    probe.run(pool)
    assert not any(cache.any() for cache in caches.values())
    assert pool.stats()["appended_bytes"] == TOKENS * DIM * 4 * len(NAMES)


@pytest.mark.parametrize("pool", [engine_layout], indirect=True)
@pytest.mark.parametrize("write", [rope_first, a_block_before, without_rope])
def test_another_layout_is_refused_by_name(pool: CXLPool, write: Write) -> None:
    probe, _ = probe_of(write)
    with pytest.raises(UnsupportedError, match=r"cxlkv: two: .* lays out its cache in a way"):
        probe.run(pool)


def indexers_probe(found: Callable[[Tensor], Tensor]) -> tuple[Probe, dict[str, Tensor]]:
    """found: what the second layer's indexer writes to, of what the engine shows."""
    caches = {name: torch.zeros((BLOCKS, 1, TOKENS, 132), dtype=torch.uint8) for name in NAMES}
    memory = {name: BlockMemory(one.view(torch.bfloat16), None) for name, one in caches.items()}
    kept = {"one": caches["one"][:, 0], "two": found(caches["two"][:, 0])}
    layers: dict[str, Attention] = {
        name: cast("Attention", SimpleNamespace(kv_cache=one)) for name, one in kept.items()
    }
    return Probe(layers, caches, memory, [BlockGroup(TOKENS)], torch.float32), caches


def indexers_layout() -> KVLayout:
    layout = layout_of([(0, INDEXER)] * 2, [BlockGroup(TOKENS)], "float32", (0, 1, 0, 1))
    assert (layout.head_dim, layout.dtype, layout.token_bytes) == (66, "bfloat16", 2 * 132)
    return layout


def shorter(blocks: Tensor) -> Tensor:
    return blocks.reshape(-1, TOKENS // 4, 132)


@pytest.mark.parametrize("pool", [indexers_layout], indirect=True)
@pytest.mark.parametrize("found", [lambda blocks: blocks, shorter], ids=["blocks", "kernels'"])
def test_an_indexers_blocks_are_served(pool: CXLPool, found: Callable[[Tensor], Tensor]) -> None:
    probe, caches = indexers_probe(found)
    probe.run(pool)
    assert not any(cache.any() for cache in caches.values())
    assert pool.stats()["appended_bytes"] == TOKENS * 132 * len(NAMES)


@pytest.mark.parametrize("pool", [indexers_layout], indirect=True)
@pytest.mark.parametrize(
    "found",
    [
        lambda blocks: blocks.clone(),
        lambda blocks: blocks.roll(1, 0),
        lambda blocks: blocks[1:],
        lambda blocks: blocks.view(BLOCKS, 132, TOKENS).transpose(1, 2),
    ],
    ids=["elsewhere", "rolled", "a block behind", "channels first"],
)
def test_an_indexer_with_another_layout_is_refused(
    pool: CXLPool, found: Callable[[Tensor], Tensor]
) -> None:
    probe, _ = indexers_probe(found)
    with pytest.raises(UnsupportedError, match=r"cxlkv: two: an indexer's bytes .* not where they"):
        probe.run(pool)


# ---- attention ----


class Text:
    """A request's queries and latents of each layer, and what attention must give."""

    def __init__(self, name: str, tokens: int):
        made = torch.Generator().manual_seed(len(name))
        self.name = name
        self.q = torch.randn((len(NAMES), tokens, HEADS, DIM), generator=made)
        self.k = torch.randn((len(NAMES), tokens, 1, DIM), generator=made)
        hashes = [f"{name} {index}".encode().ljust(32) for index in range(tokens // TOKENS)]
        self.keys = block_keys(hashes, TOKENS, namespace({})).packed.tobytes()

    def wanted(self, layer: int) -> Tensor:
        return attend_alone(self.q[layer], self.k[layer], self.k[layer][..., :RANK], SCORES)


def run(attention: PoolAttention, message: Message, of: Text, first: int, end: int) -> bool:
    """One step of the request in row 1; whether each layer's rows are right."""
    attention.hear(message)
    starts, found = np.array([0, end - first], np.int32), []
    for layer in range(len(NAMES)):
        step = attention.step([1], starts, [end])
        out = torch.full((end - first, HEADS, RANK), torch.nan)
        rows = slice(first, end)
        step.attend(layer, Rows(of.q[layer, rows], of.k[layer, rows], None, out), SCORES)
        found.append(torch.allclose(out, of.wanted(layer)[rows], atol=1e-5))
    attention.end_step()
    return all(found)


@pytest.mark.parametrize("pool", [pool_layout], indirect=True)
def test_rows_see_the_latents_of_their_text(pool: CXLPool) -> None:
    attention = PoolAttention(pool, NAMES, block_tokens=TOKENS)
    one = Text("one", 70)
    assert run(attention, Message([Started("one", [[1]], one.keys)]), one, 0, 40)
    assert all(run(attention, Message(), one, at, at + 1) for at in range(40, 70))
    assert not attention.report().failures
    attention.hear(Message(ended=["one"]))


@pytest.mark.parametrize("pool", [pool_layout], indirect=True)
def test_a_pool_without_room_leaves_a_step_its_own_latents(pool: CXLPool) -> None:
    attention = PoolAttention(pool, NAMES, block_tokens=TOKENS)
    taken = pool.pages.alloc(pool.stats()["pages_free"])
    one = Text("one", 70)
    assert run(attention, Message([Started("one", [[1]], one.keys)]), one, 0, 70)
    assert attention.report().failures.keys() == {"full"}
    pool.pages.free(taken)
    attention.hear(Message(ended=["one"]))


def test_ranks_of_any_number_have_the_pools_and_keys_of_the_shards_that_they_name(
    tmp_path: Path,
) -> None:
    """Unless their weights are random."""

    def found(tensor: int, shards: int | None, *, dummy: bool = False) -> tuple[list[str], bytes]:
        own = Latent(head_size_v=DIM, num_kv_heads=8 // tensor)
        engine = engine_of(tmp_path, tensor, dummy=dummy)
        specs = [own, replace(own, head_size=2 * DIM, num_kv_heads=4 // tensor)]
        kinds = [("FullAttentionSpec", one) for one in specs]
        words = pools.words_of(engine, kinds, "vec", shards=shards)
        ranks = [pools.ranks_of(engine, specs, rank, shards) for rank in range(tensor)]
        paths = [pools.pool_path(f"{tmp_path}/", words, r, n) for r in ranks for n in r.own]
        shard = [one.shard(number) for one in ranks for number in one.own]
        assert shard == [(number, len(paths), 0, 1) for number in range(len(paths))]
        return paths, space_of(words, "")

    assert found(1, 4) == found(2, 4) == found(4, 4) == found(4, None)
    assert found(1, 1) == found(1, None)
    assert len({found(tensor, 4, dummy=True)[1] for tensor in (1, 2, 4)}) == 3
    for tensor, shards in ((2, 1), (2, 3), (1, 8)):
        said = f"multiple of the {tensor} ranks .* the 4 or 8 kv heads of a layer"
        with pytest.raises(BadArgumentError, match=said):
            found(tensor, shards)


def test_shards_are_not_for_states_drafters_and_latents(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, 1)
    own = Latent(head_size_v=DIM, num_kv_heads=8)
    with pytest.raises(UnsupportedError, match='"shards": 2 with states'):
        pools.ranks_of(engine, [own, SimpleNamespace()], shards=2)
    with pytest.raises(BadArgumentError, match="the 1 kv heads of a layer: leave it out"):
        pools.ranks_of(engine, [Latent()], shards=2)
    engine.speculative_config = SimpleNamespace(method="eagle")
    with pytest.raises(UnsupportedError, match='"shards": 2 with a drafter'):
        pools.ranks_of(engine, [own], shards=2)
    assert pools.ranks_of(engine, [own], shards=1).pools == 1


@pytest.mark.parametrize("pool", [pool_layout], indirect=True)
def test_ranks_of_one_pool_go_on_from_pages_that_one_of_them_wrote(pool: CXLPool) -> None:
    with CXLPool.open(str(pool.path), threads=1) as again:
        ranks = [
            PoolAttention(own, NAMES, block_tokens=TOKENS, has_peers=True, shares=True)
            for own in (pool, again)
        ]
        one, start = Text("one", 70), Message([Started("one", [[1]], Text("one", 70).keys)])
        assert all(run(rank, start, one, 0, 40) for rank in ranks)
        used = pool.stats()["pages_total"] - pool.stats()["pages_free"]
        assert (used, pool.stats()["pages_published"]) == (2 * 2, 0)
        for at in range(40, 65):
            assert all(run(rank, Message(), one, at, at + 1) for rank in ranks)
        stats = pool.stats()
        assert stats["pages_total"] - stats["pages_free"] == stats["pages_published"] == 4
        for at in range(65, 70):
            assert all(run(rank, Message(), one, at, at + 1) for rank in ranks)
        assert not any(rank.report().failures for rank in ranks)
        for rank in ranks:
            rank.hear(Message(ended=["one"]))
        assert pool.stats()["pages_held"] == 0


@pytest.mark.parametrize("pool", [pool_layout], indirect=True)
def test_what_another_rank_could_not_compute_is_not_published(pool: CXLPool) -> None:
    """Its rows were zeros there, and what follows from them is wrong in all ranks."""
    attention = PoolAttention(pool, NAMES, block_tokens=TOKENS, has_peers=True)
    one = Text("one", 70)
    assert run(attention, Message([Started("one", [[1]], one.keys)]), one, 0, 40)
    attention.hear(Message(broken=["one"]))
    assert pool.stats()["pages_published"] == 0
    assert run(attention, Message(), one, 0, 40)
    attention.hear(Message(ended=["one"]))
    assert pool.stats()["pages_published"] == 2


@pytest.mark.parametrize("pool", [pool_layout], indirect=True)
def test_what_a_rank_could_not_compute_all_ranks_hear_of(pool: CXLPool, tmp_path: Path) -> None:
    attention = PoolAttention(pool, NAMES, block_tokens=TOKENS, has_peers=True)
    one = Text("one", 70)
    run(attention, Message([Started("one", [[1]], one.keys)]), one, 0, 40)
    attention.report()
    assert not run(attention, Message(), one, 50, 51), "it has 40 tokens of 50"
    report = attention.report()
    assert report.broken == ["one"]
    with engines_in(tmp_path) as engines:
        scheduling = engines(copies=2).scheduling
        scheduling.heard([report, Report()])
        assert [scheduling.message(Step()).broken for _ in range(2)] == [["one"], []]


@pytest.mark.parametrize("pool", [pool_layout], indirect=True)
def test_ranks_of_one_pool_are_admitted_together(pool: CXLPool) -> None:
    alone, both = Admission([pool]), Admission([pool], copies=2)
    assert both.tokens == alone.tokens // 2 // TOKENS * TOKENS
    assert alone.fits("one", 0, both.tokens + 2 * TOKENS)
    assert not both.fits("one", 0, both.tokens + 2 * TOKENS)


def test_what_keeps_latents() -> None:
    assert are_latents([Latent(), Latent()])
    assert not are_latents([Latent(), Latent(head_size_v=DIM)])
    assert not are_latents([SimpleNamespace(head_size=8)])
    assert engine_layout().values == "key_prefix"
