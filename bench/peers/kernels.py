"""What scoring and attending by codes is held against: numkong's int8 products, and ggml's matrix
product and fused attention over q8_0, q4_0 and f16, which llama.cpp decodes with.

Each has the keys and values of an encoded pool in its own form, a copy for each layer and sequence.
Scores are products alone: a pool's select also turns and rounds the queries, and chooses pages.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cxlkv.arrays import Bytes
from cxlkv.bench.cases.decode_layers import Decoding
from cxlkv.bench.peers.running import ENVIRONMENTS

Wholes = npt.NDArray[np.int8]
Numbers = npt.NDArray[np.float32]


class MissingError(Exception):
    """A rival is not there; says why."""


@dataclass(frozen=True)
class Given:
    """What a pool holds in each layer, [tokens, kv_heads, dim], and the first sequence's queries,
    [q_heads, dim]."""

    shape: Decoding
    keys: Tensor
    values: Tensor
    queries: Tensor

    def by_head(self, rows: Tensor) -> Numbers:
        """[kv_heads, tokens, dim]."""
        return rows.transpose(0, 1).float().contiguous().numpy()

    @property
    def grouped(self) -> Numbers:
        """[kv_heads, group, dim]."""
        rows = self.queries.float().view(self.shape.kv_heads, -1, self.shape.head_dim)
        return rows.contiguous().numpy()

    @property
    def copies(self) -> int:
        return self.shape.layers * self.shape.sequences

    @property
    def scores(self) -> Numbers:
        """[kv_heads, group, tokens], in float32."""
        found = self.grouped @ self.by_head(self.keys).swapaxes(1, 2)
        return np.asarray(found, np.float32)

    @property
    def attended(self) -> Numbers:
        """[kv_heads, group, dim]."""
        scores = torch.from_numpy(self.scores) * self.shape.head_dim**-0.5
        found = scores.softmax(-1) @ self.values.transpose(0, 1).float()
        return np.asarray(found.numpy(), np.float32)


@dataclass(frozen=True)
class Rival:
    """One form: what it does to a copy, and what it found there last, as Given has it."""

    version: str
    call: Callable[[int], object]
    found: Callable[[], Numbers]

    def walk(self, given: Given) -> float:
        """Seconds a layer, all of its sequences."""
        began = perf_counter()
        for copy in range(given.copies):
            self.call(copy)
        return (perf_counter() - began) / given.shape.layers

    def error(self, wanted: Numbers) -> float:
        """Root mean square of the error over that of the right result."""
        return float(np.sqrt(((self.found() - wanted) ** 2).mean() / (wanted**2).mean()))


def forms(given: Given, environments: Path = ENVIRONMENTS) -> Iterator[tuple[str, Rival | str]]:
    """Each form by its name, score_FORM or attend_FORM, or why there is none, by one thread."""
    try:
        yield from numkong_forms(given, numkong())
    except MissingError as error:
        yield "numkong", str(error)
    try:
        yield from ggml_forms(given, Ggml(environments))
    except MissingError as error:
        yield "ggml", str(error)


# ---- numkong ----


def numkong() -> ModuleType:
    try:
        return importlib.import_module("numkong")
    except ModuleNotFoundError:
        raise MissingError("not installed: pip install numkong") from None


def numkong_forms(given: Given, module: ModuleType) -> Iterator[tuple[str, Rival]]:
    """The keys of a head times its queries, in int32, with the queries packed for each call, or
    with keys that were packed before."""
    keys, queries = whole(given.by_head(given.keys)), whole(given.grouped)
    copies = [[module.Tensor(head.copy()) for head in keys[0]] for _ in range(given.copies)]
    packed = [[module.dots_pack(head, dtype="int8") for head in copy] for copy in copies]
    asked = [module.Tensor(head) for head in queries[0]]
    tokens, group = keys[0].shape[1], queries[0].shape[1]
    outs = [module.zeros((tokens, group), dtype="int32") for _ in asked]
    turned = [module.zeros((group, tokens), dtype="int32") for _ in asked]

    def by_queries(copy: int) -> None:
        for head, (rows, out) in enumerate(zip(asked, outs, strict=True)):
            module.dots_packed(copies[copy][head], module.dots_pack(rows, dtype="int8"), out=out)

    def by_keys(copy: int) -> None:
        for head, (rows, out) in enumerate(zip(asked, turned, strict=True)):
            module.dots_packed(rows, packed[copy][head], out=out)

    def scaled(outs: list[object], turn: bool) -> Callable[[], Numbers]:
        scales = queries[1][:, :, None] * keys[1][:, None, :]

        def found() -> Numbers:
            products = np.stack([np.asarray(out) for out in outs])
            return np.asarray((products.swapaxes(1, 2) if turn else products) * scales, np.float32)

        return found

    name = f"numkong {version('numkong')}"
    yield "score_numkong_int8", Rival(name, by_queries, scaled(outs, turn=True))
    yield "score_numkong_int8_packed", Rival(name, by_keys, scaled(turned, turn=False))


def whole(rows: Numbers) -> tuple[Wholes, Numbers]:
    """int8 like rows, and a scale for each row: the largest number is 127."""
    scales = np.abs(rows).max(-1) / np.float32(127)
    return np.rint(rows / scales[..., None]).astype(np.int8), scales


# ---- ggml: llama.cpp's ----


class Params(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("size", ctypes.c_size_t), ("at", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Plan(ctypes.Structure):
    """ggml_cplan."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work", ctypes.c_void_p),
        ("threads", ctypes.c_int),
        ("pool", ctypes.c_void_p),
        ("abort", ctypes.c_void_p),
        ("abort_data", ctypes.c_void_p),
        ("use_reference", ctypes.c_bool),
    )


TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8}
"""ggml_type."""
F32 = 0
OVERHEAD_BYTES = 1 << 20
"""Bytes of a copy beside its tensors: two graphs, and names."""
LIBRARIES = "lib/python*/site-packages/llama_cpp/lib/libggml-cpu.so"


class Ggml:
    """The libraries of llama-cpp-python's environment, in this process."""

    def __init__(self, environments: Path) -> None:
        found = sorted((environments / "llama").glob(LIBRARIES))
        if not found:
            raise MissingError(f"no ggml in {environments / 'llama'}: make build/peers/llama")
        self.version = f"ggml of {self._package(found[0])}"
        try:
            self.base = ctypes.CDLL(str(found[0].with_name("libggml-base.so")), ctypes.RTLD_GLOBAL)
            self.cpu = ctypes.CDLL(str(found[0]), ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise MissingError(f"cannot be loaded: {error}") from None
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        for name, returned, given in (
            ("ggml_init", pointer, [Params]),
            ("ggml_free", None, [pointer]),
            ("ggml_new_tensor_3d", pointer, [pointer, ctypes.c_int, size, size, size]),
            ("ggml_get_data", pointer, [pointer]),
            ("ggml_nbytes", ctypes.c_size_t, [pointer]),
            ("ggml_mul_mat", pointer, [pointer] * 3),
            ("ggml_flash_attn_ext", pointer, [pointer] * 5 + [ctypes.c_float] * 3),
            ("ggml_new_graph", pointer, [pointer]),
            ("ggml_build_forward_expand", None, [pointer] * 2),
            (
                "ggml_quantize_chunk",
                ctypes.c_size_t,
                [ctypes.c_int, pointer, pointer, size, size, size, pointer],
            ),
        ):
            function = getattr(self.base, name)
            function.restype, function.argtypes = returned, given
        self.cpu.ggml_cpu_init()
        self.cpu.ggml_graph_plan.restype = Plan
        self.cpu.ggml_graph_plan.argtypes = [pointer, ctypes.c_int, pointer]
        self.cpu.ggml_graph_compute.argtypes = [pointer, ctypes.POINTER(Plan)]

    @staticmethod
    def _package(library: Path) -> str:
        for folder in library.parents[2].glob("llama_cpp_python-*.dist-info"):
            return f"llama-cpp-python {folder.name.removesuffix('.dist-info').split('-')[1]}"
        return "llama.cpp"

    def coded(self, rows: Numbers, kind: int) -> Bytes:
        """Rows [kv_heads, tokens, dim] in a type."""
        found = np.empty(rows.size * 2, np.uint8)  # f16 is the largest
        heads, tokens, dim = rows.shape
        count = self.base.ggml_quantize_chunk(
            kind, rows.ctypes.data, found.ctypes.data, 0, heads * tokens, dim, None
        )
        return found[:count].copy()


class Context:
    """Copies in one type, with a graph of scores and one of attention for each."""

    def __init__(self, ggml: Ggml, given: Given, kind: int) -> None:
        self.ggml, self.given = ggml, given
        rows = [ggml.coded(given.by_head(part), kind) for part in (given.keys, given.values)]
        shape, base = given.shape, ggml.base
        dim, heads = shape.head_dim, shape.kv_heads
        outputs = 4 * heads * shape.group * (shape.tokens + 2 * dim)
        room = given.copies * (sum(one.nbytes for one in rows) + 2 * outputs + OVERHEAD_BYTES)
        self.context = base.ggml_init(Params(room, None, False))
        if not self.context:
            raise MissingError(f"ggml makes no context of {room} bytes")
        grouped = self._tensor(F32, (dim, shape.group, heads), given.grouped)
        alone = self._tensor(F32, (dim, 1, heads * shape.group), given.grouped)
        self.score_plans, self.attend_plans = [], []
        for _ in range(given.copies):
            keys, values = (self._tensor(kind, (dim, shape.tokens, heads), one) for one in rows)
            scores = base.ggml_mul_mat(self.context, keys, grouped)
            out = base.ggml_flash_attn_ext(
                self.context, alone, keys, values, None, dim**-0.5, 0.0, 0.0
            )
            self.score_plans.append(self._plan(scores))
            self.attend_plans.append(self._plan(out))
            self.scores, self.attended = scores, out

    def _tensor(self, kind: int, sizes: tuple[int, int, int], rows: Numbers | Bytes) -> int:
        tensor = self.ggml.base.ggml_new_tensor_3d(self.context, kind, *sizes)
        assert self.ggml.base.ggml_nbytes(tensor) == rows.nbytes
        ctypes.memmove(self.ggml.base.ggml_get_data(tensor), rows.ctypes.data, rows.nbytes)
        return int(tensor)

    def _plan(self, tensor: int) -> tuple[int, Plan, Bytes]:
        """A graph, its plan, and the memory that the plan works in."""
        graph = self.ggml.base.ggml_new_graph(self.context)
        self.ggml.base.ggml_build_forward_expand(graph, tensor)
        plan = self.ggml.cpu.ggml_graph_plan(graph, 1, None)
        work = np.zeros(plan.work_size + 64, np.uint8)
        plan.work = work.ctypes.data
        return graph, plan, work

    def compute(self, plans: Sequence[tuple[int, Plan, Bytes]], copy: int) -> None:
        graph, plan, _ = plans[copy]
        code = self.ggml.cpu.ggml_graph_compute(graph, ctypes.byref(plan))
        assert code == 0, f"ggml_graph_compute gave {code}"

    def read(self, tensor: int, *shape: int) -> Numbers:
        found = np.empty(shape, np.float32)
        ctypes.memmove(found.ctypes.data, self.ggml.base.ggml_get_data(tensor), found.nbytes)
        return found

    def __del__(self) -> None:
        self.ggml.base.ggml_free(self.context)

    def rivals(self, name: str) -> Iterator[tuple[str, Rival]]:
        shape = self.given.shape
        sides = (
            ("score", self.score_plans, self.scores, shape.tokens),
            ("attend", self.attend_plans, self.attended, shape.head_dim),
        )
        for kind, plans, tensor, width in sides:
            call = partial(self.compute, plans)
            found = partial(self.read, tensor, shape.kv_heads, shape.group, width)
            yield f"{kind}_{name}", Rival(self.ggml.version, call, found)


def ggml_forms(given: Given, ggml: Ggml) -> Iterator[tuple[str, Rival]]:
    for name, kind in TYPES.items():
        yield from Context(ggml, given, kind).rivals(name)
