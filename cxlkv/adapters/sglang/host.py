"""Reads SGLang's host memory: the size, place and shape of its pages."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from cxlkv.adapters.sglang.names import Config, Words
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.layout import DTYPES
from cxlkv.objects import Buffers, RowForm

Meta = tuple[list[int], list[int]]

OF_THE_HOST = (
    "layout",
    "page_size",
    "dtype",
    "layer_num",
    "start_layer",
    "end_layer",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "storage_format_tag",
)


OF_HEADS = (
    "MHATokenToKVPoolHost",
    "AsymmetricMHATokenToKVPoolHost",
    "HiSparseMHATokenToKVPoolHost",
)
"""Host pools whose buffers are rows of K and of V in turn, of a token and head each; what others of
these names derive from has scales between its rows."""


class Memory(Protocol):
    """What is read of SGLang's HostKVCache."""

    layout: str
    page_size: int

    def get_page_buffer_meta(self, indices: torch.Tensor) -> Meta | None:
        """Addresses and bytes of the buffers of whole pages, page by page. indices: of all their
        tokens. None: this pool has indices only."""

    def get_split_heads_page_buffer_meta(self, indices: torch.Tensor, split_factor: int) -> Meta:
        """The same, of each page's heads in so many parts."""

    def get_dummy_flat_data_page(self) -> torch.Tensor: ...


class HostMemory:
    """One of the engine's host pools, by the name that SGLang gives it.

    sizes: bytes of an object's buffers, in the order in which SGLang names them, which is the order
    of its bytes. object_bytes: what they take in the pool. encoding: what rows of K and V become
    there; host pools beside them stay as they are. parts: objects of a page, more than one with
    split heads. Where a page lies SGLang is asked each time: some of its pools move pages. Raises
    UnsupportedError for a host pool whose pages have no addresses, and with an encoding for K and V
    that are no rows of numbers, or copies.
    """

    def __init__(
        self,
        pool: Memory,
        name: str,
        config: Config,
        zero_copy: bool = True,
        encoding: str = "none",
    ):
        self._pool, self._name, self._zero_copy = pool, name, zero_copy
        self.parts = 1
        if name == "kv" and config.should_split_heads and zero_copy:
            self.parts = (config.tp_lcm_size or config.tp_size) // config.tp_size
        self.page_tokens = int(pool.page_size or 1)
        try:
            found = self._meta(torch.arange(self.page_tokens))
        except (ValueError, AssertionError, NotImplementedError) as error:
            raise UnsupportedError(
                f"cxlkv: SGLang's host pool {name} ({type(pool).__name__}) cannot say where its "
                f"pages lie: {error}. --hicache-mem-layout page_first may mend it"
            ) from error
        if not found or not found[1]:
            raise UnsupportedError(
                f"cxlkv: SGLang's host pool {name} ({type(pool).__name__}) has no memory of its "
                "own, only those beside it have: such models are not served yet. Leave "
                "out --hicache-storage-backend"
            )
        self.sizes = [int(size) for size in found[1][: len(found[1]) // self.parts]]
        self._encoding = encoding
        self._forms = self._row_forms()
        one = Buffers([0] * len(self.sizes), self.sizes, [0, len(self.sizes)], self._forms)
        self.object_bytes = int(one.stored_bytes().sum())

    def _row_forms(self) -> list[RowForm]:
        kind, written = type(self._pool).__name__, f'cxlkv: "encoding": "{self._encoding}"'
        if self._encoding == "none" or (self._name != "kv" and kind not in OF_HEADS):
            return []
        if kind not in OF_HEADS:
            raise UnsupportedError(
                f"{written}, and SGLang's host pool {self._name} ({kind}) has no rows of K and V "
                "by head: leave encoding out"
            )
        if not self._zero_copy:
            raise UnsupportedError(
                f'{written} is for pages in place, not for copies of them: write "interface_v1": 1 '
                "beside module_path, or leave encoding out"
            )
        dtype = str(getattr(self._pool, "dtype", None)).removeprefix("torch.")
        if dtype not in DTYPES:
            raise UnsupportedError(
                f"{written}, and the engine keeps its cache as {dtype}, in fewer bits already: "
                "leave one of both out (--kv-cache-dtype)"
            )
        dims = [int(getattr(self._pool, name)) for name in ("head_dim", "v_head_dim")]
        return [RowForm(self._encoding, dtype, dims[i % 2]) for i in range(len(self.sizes))]

    @property
    def kinds(self) -> set[str]:
        """Names of its class and of those that it derives from."""
        return {one.__name__ for one in type(self._pool).__mro__}

    @property
    def is_state(self) -> bool:
        """Whether a page is the state of a layer without K and V, after all of a text."""
        return "MambaPoolHost" in self.kinds

    def words(self) -> Words:
        """Which pool it is, and how the bytes of its objects lie."""
        heads = getattr(self._pool, "head_num", None)
        return {
            "pool": self._name,
            "class": type(self._pool).__name__,
            **{one: str(getattr(self._pool, one, None)) for one in OF_THE_HOST},
            "heads": None if heads is None else int(heads) // self.parts,
            "sizes": self.sizes,
            "zero_copy": self._zero_copy,  # copies of pages may have another order
            **({"encoding": self._encoding} if self._forms else {}),
        }

    def _meta(self, indices: torch.Tensor) -> Meta | None:
        if self.parts > 1:
            return self._pool.get_split_heads_page_buffer_meta(indices, self.parts)
        return self._pool.get_page_buffer_meta(indices)

    def buffers(self, pages: int, indices: torch.Tensor | None) -> Buffers:
        """The buffers of so many pages' objects. Raises BadArgumentError for another number of
        indices"""
        tokens = 0 if indices is None else len(indices)
        if indices is None or tokens != pages * self.page_tokens:
            raise BadArgumentError(
                f"{tokens} indices for {pages} pages of {self.page_tokens} tokens"
            )
        found = self._meta(indices)
        assert found is not None, "a pool with memory has it still"
        each = len(self.sizes)
        return Buffers(
            np.array(found[0], np.uint64),
            np.array(found[1], np.uint64),
            np.arange(0, pages * self.parts * each + 1, each),
            self._forms,
        )
