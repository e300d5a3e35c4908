"""Chunks in fewer bits, without LMCache: what its metadata says of their rows, and their memory.

With LMCache around it: tests/lmcache/test_encoded.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cxlkv import KVLayout, ObjectPool, RowForm
from cxlkv.adapters.lmcache.encoded import buffers_of, group_bytes, row_forms, stored_bytes
from cxlkv.adapters.lmcache.form import Form
from cxlkv.adapters.lmcache.names import file_name, words_of
from cxlkv.adapters.lmcache.settings import check_memory
from cxlkv.errors import UnsupportedError

from ..support.kept_rows import check_kept

TOKENS = 24
TWO = Form("KV_2LTD", ("bfloat16", "float32"), ((2, 3, TOKENS, 4 * 64), (2, 1, TOKENS, 2 * 80)))
FORMS = (RowForm("int8", "bfloat16", 64), RowForm("int8", "float32", 80))


def metadata(**changes: object) -> SimpleNamespace:
    given = {"model_name": "m", "kv_shape": (3, 2, TOKENS, 4, 64), "kv_dtype": torch.bfloat16}
    return SimpleNamespace(
        **{**given, "use_mla": False, "kv_layer_groups_manager": None, **changes}
    )


def group(heads: int, dim: int, dtype: torch.dtype, **changes: object) -> SimpleNamespace:
    shape = SimpleNamespace(kv_size=2, nh=heads, hs=dim)
    return SimpleNamespace(
        **{"shape_desc": shape, "dtype": dtype, "recurrent_state": False, **changes}
    )


def test_forms_are_those_of_the_groups() -> None:
    assert row_forms(metadata(), "none") == ()
    assert row_forms(metadata(), "int4") == (RowForm("int4", "bfloat16", 64),)
    groups = [group(4, 64, torch.bfloat16), group(2, 80, torch.float32)]
    manager = SimpleNamespace(kernel_groups=groups)
    assert row_forms(metadata(kv_layer_groups_manager=manager), "int8") == FORMS
    for wrong, said in (
        (metadata(use_mla=True), "MLA"),
        (metadata(kv_shape=(3, 1, TOKENS, 1, 576)), "MLA"),
        (metadata(kv_dtype=torch.uint8), "keeps its cache as uint8, in fewer bits already"),
    ):
        assert row_forms(wrong, "none") == ()
        with pytest.raises(UnsupportedError, match=said):
            row_forms(wrong, "int8")
    manager.kernel_groups = [*groups, group(1, 64, torch.float32, recurrent_state=True)]
    with pytest.raises(UnsupportedError, match="states"):
        row_forms(metadata(kv_layer_groups_manager=manager), "int8")


def test_groups_of_a_chunk_are_encoded_one_behind_the_other() -> None:
    """And what is behind the payload stays as it is."""
    sizes = group_bytes(TWO)
    assert sizes == [2 * 3 * TOKENS * 4 * 64 * 2, 2 * TOKENS * 2 * 80 * 4]
    made = torch.Generator().manual_seed(3)
    groups = [
        torch.randn(shape, generator=made).to(getattr(torch, dtype))
        for dtype, shape in zip(TWO.dtypes, TWO.shapes, strict=True)
    ]
    payload = torch.cat([one.reshape(-1).view(torch.uint8) for one in groups])
    foot = np.arange(100, dtype=np.uint8)
    got, got_foot = torch.zeros_like(payload), np.zeros_like(foot)
    with ObjectPool.create(
        "anonymous:", layout=KVLayout.objects("256KiB"), capacity="8MiB"
    ) as pool:
        pool.put_batch(["a"], buffers_of([payload], [TWO], [foot], FORMS))
        wanted = stored_bytes(TWO, FORMS) + len(foot)
        found = pool.get_batch_into(["a"], buffers_of([got], [TWO], [got_foot], FORMS))
        assert found.tolist() == [wanted]
        with pool.lease(["a"]) as lease:
            assert bytes(lease.views[0] or b"")[-len(foot) :] == foot.tobytes()
        pool.put_batch(["b"], buffers_of([payload], [TWO], [foot], ()))
        assert pool.object_sizes(["b"]).tolist() == [payload.nbytes + len(foot)]
    assert np.array_equal(got_foot, foot)
    for part, given, dim in zip(torch.split(got, sizes), groups, (64, 80), strict=True):
        check_kept(part.view(given.dtype).view(-1, dim), given.view(-1, dim), "int8")


def test_the_encoding_is_in_key_and_file() -> None:
    config = SimpleNamespace(chunk_size=256, use_layerwise=False, pre_caching_hash_algorithm="x")
    words = [words_of(metadata(), config, "0.5.6", one) for one in ("none", "int8", "int4")]
    assert words[0] == words_of(metadata(), config, "0.5.6")
    assert len({file_name(one) for one in words}) == 3


def test_what_is_decoded_wants_memory_of_lmcaches() -> None:
    with pytest.raises(UnsupportedError, match="max_local_cpu_size is 0: give it some"):
        check_memory(["LocalCPUBackend"], "int8")
