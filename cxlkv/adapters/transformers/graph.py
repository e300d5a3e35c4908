"""A decode step of a whole transformers model as one CUDA graph: captured once, then replayed.

What Python does in a pass is done once, while the step is captured. A graph therefore reads token
ids, positions, and all that a Decoder knows of a step, from tensors that each step fills. Where the
code of a model counts cached tokens itself, UNCOUNTED refuses to be counted with.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import TYPE_CHECKING, NoReturn, Protocol, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils.generic import ModelOutput

from cxlkv.adapters.transformers.layouts import check_layout, layout_of, text_config
from cxlkv.adapters.transformers.modules import Kept, global_hooks
from cxlkv.adapters.transformers.ropes import depends_on_length
from cxlkv.errors import BadArgumentError, CXLKVError, UnsupportedError
from cxlkv.machine.lifetime import Closing
from cxlkv.numbers import is_whole

if TYPE_CHECKING:
    from cxlkv.adapters.transformers.cache import CXLCache

ARGUMENTS = {
    *("input_ids", "position_ids", "attention_mask", "past_key_values"),
    *("use_cache", "return_dict", "logits_to_keep"),
}
"""Arguments of a model's forward() that a replay follows."""


class Graph(Protocol):
    """Work of one device, as it was captured."""

    def capture(self, work: Callable[[], object]) -> None: ...

    def replay(self) -> None: ...


class Forward(Protocol):
    """A model's method."""

    def __call__(self, *args: object, **given: object) -> object: ...


class CudaGraph:
    def __init__(self, device: torch.device):
        self._device, self._graph = device, torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], object]) -> None:
        with torch.cuda.device(self._device):
            now = torch.cuda.current_stream()
            # Other threads of the process may go on with CUDA meanwhile.
            graph = torch.cuda.graph(
                self._graph,
                stream=_stream(torch.cuda.current_device()),
                capture_error_mode="thread_local",
            )
            with torch.cuda.stream(now), graph:  # a graph that failed leaves its stream current
                work()

    def replay(self) -> None:
        with torch.cuda.device(self._device):
            self._graph.replay()


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """One for all captures of a device: torch keeps a workspace for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def graph_on(device: torch.device) -> Graph:
    """An empty graph. Raises UnsupportedError without CUDA."""
    if device.type != "cuda":
        raise UnsupportedError(
            f"compile() makes CUDA graphs, and the model lies on {device}: move it to a GPU, or "
            "leave compile() out"
        )
    return CudaGraph(device)


class Uncounted:
    """Stands for the number of cached tokens while a step is captured, and refuses to be used."""

    def _refuse(self, *_: object) -> NoReturn:
        raise UnsupportedError(
            "the model's code counts the cached tokens in a step, and a graph would keep that "
            "number for ever: leave compile() out for this model"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __index__ = __float__ = _refuse
    __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__


UNCOUNTED = cast(int, Uncounted())


class _Changed(Exception):
    """The model is not what was captured."""


class _Model:
    """What a graph has read of a model by its address, or once and for all."""

    def __init__(self, model: torch.nn.Module):
        self._kept = Kept(model.modules(), global_hooks())
        # The second of each is held, so that a replay never reads memory that was freed.
        self._places = [
            (one, one.detach())
            for one in (*model.parameters(), *model.buffers())
            if not hasattr(one, "__tensor_flatten__")
        ]

    def still(self) -> bool:
        same = all(one.data_ptr() == held.data_ptr() for one, held in self._places)
        return same and self._kept.still()


@dataclass(frozen=True)
class Captured:
    """A step of a decoder and a model, with what goes in, [batch, 1] each, and what comes out."""

    graph: Graph
    model: _Model
    ids: Tensor
    positions: Tensor
    out: ModelOutput

    def replay(self, ids: Tensor, positions: Tensor) -> dict[str, object]:
        """The fields of the output; raises _Changed."""
        self.ids.copy_(ids)
        self.positions.copy_(positions)
        self.graph.replay()
        made = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in self.out.items()
        }
        if not self.model.still():  # this host looks while the device works
            raise _Changed
        return made


class CompiledSteps(Closing):
    """The model's forward(), by which a cache's decode steps are replayed: CXLCache.compile().

    replays, captures: how many there were; eager: the cache's other passes, by their reason. A step
    is captured behind one that ran eagerly, and anew for another batch size or budget, a text that
    has outgrown the decoder, or a model that has changed.
    """

    def __init__(self, cache: CXLCache, model: object, batch_sizes: Sequence[int]):
        given: object = batch_sizes
        sizes = [*given] if isinstance(given, Iterable) else []
        if not sizes or not all(is_whole(size, 1, 2**31 - 1) for size in sizes):
            raise BadArgumentError(
                f"batch_sizes={batch_sizes!r:.40}: whole numbers, 1 or more, such as (1, 4)"
            )
        model = getattr(model, "get_base_model", lambda: model)()  # PEFT's wrapper
        if not isinstance(model, torch.nn.Module):
            raise BadArgumentError(f"compile() takes the model, not {type(model).__name__}")
        check_layout(cache.pool.layout, layout_of(model))
        self._device = _checked(cache, model)
        self._cache, self._model, self._sizes = cache, model, frozenset(sizes)
        self._forward: Forward = model.forward
        self._own = vars(model).get("forward")  # what another one has put there
        self._names = [*inspect.signature(self._forward).parameters]
        if "position_ids" not in self._names:
            raise UnsupportedError(
                f"{type(model).__name__} takes no position_ids: it counts positions itself, which "
                "a graph cannot; leave compile() out"
            )
        self.replays = self.captures = 0
        self.eager: Counter[str] = Counter()
        self._closed = False

        @wraps(self._forward)
        def forward(*args: object, **given: object) -> object:
            return self._pass(args, given)

        self._wrapper = forward
        model.forward = forward

    def close(self) -> None:
        """Give the model its forward() back, and free the graph."""
        if self._closed:
            return
        self._closed = True
        if self._cache._gpu is not None:
            self._cache._gpu.captured = None
        if vars(self._model).get("forward") is not self._wrapper:
            return  # another one lies over it, through which calls go on to the model's own
        if self._own is None:
            del self._model.forward
        else:
            self._model.forward = self._own

    def _pass(self, args: tuple[object, ...], given: Mapping[str, object]) -> object:
        named = {**dict(zip(self._names, args, strict=False)), **given}
        if self._closed or named.get("past_key_values") is not self._cache:
            return self._forward(*args, **given)
        why = self._why_eager(named)
        if why is None:
            out, why = self._by_graph(named)
            if out is not None:
                return out
        self.eager[why] += 1
        return self._forward(*args, **given)

    def _why_eager(self, named: Mapping[str, object]) -> str | None:
        """The reason why a graph cannot run this pass, judged by its arguments; None: it can."""
        for name, value in named.items():
            if name not in ARGUMENTS and value is not None and value is not False:
                return f"{name}= is given"
        config: object = self._model.config
        told = named.get("return_dict")
        if told is None:
            told = getattr(config, "return_dict", True)
        if told is False or named.get("use_cache") is False:
            return "use_cache=False or return_dict=False"
        for name in ("output_hidden_states", "output_attentions"):
            if getattr(config, name, False):
                return f"{name} of the config"
        if isinstance(named.get("logits_to_keep"), Tensor):
            return "logits_to_keep= is a tensor"
        ids, positions, mask = (
            named.get(name) for name in ("input_ids", "position_ids", "attention_mask")
        )
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] != 1:
            return "not a token of each row"
        if not isinstance(positions, Tensor) or tuple(positions.shape) not in ((1, 1), ids.shape):
            return "no position_ids"
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
            return "a mask of more than padding"
        if len(ids) not in self._sizes:
            return f"batch of {len(ids)}"
        if ids.device != self._device:
            return "token ids on another device"
        cache = self._cache
        if cache.get_seq_length() == 0:
            return "the cache is empty"
        if cache.on_query is not None or cache.on_choice is not None:
            return "on_query or on_choice is set"
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self._device.type):
            return "gradients or autocast"
        return "training" if self._model.training else None

    def _by_graph(self, named: Mapping[str, object]) -> tuple[object, str]:
        """The step's output; None, and why it is to run eagerly."""
        cache, gpu = self._cache, self._cache._gpu
        assert gpu is not None
        ids, positions = named["input_ids"], named["position_ids"]
        mask = named.get("attention_mask")
        assert isinstance(ids, Tensor)
        assert isinstance(positions, Tensor)
        assert mask is None or isinstance(mask, Tensor)
        step = cache._next_step(len(ids), mask, positions)
        if isinstance(step, str):
            return None, step
        if gpu.captured is None:
            gpu.captured = self._capture(len(ids), lambda work: cache._whole_step(step, work, True))
            self.captures += 1
        captured, found = gpu.captured, dict[str, object]()
        try:
            cache._whole_step(step, lambda: found.update(captured.replay(ids, positions)))
        except _Changed:
            gpu.captured = None
            return None, "the model has changed"
        self.replays += 1
        return type(captured.out)(**found), ""

    def _capture(self, batch: int, within: Callable[[Callable[[], object]], None]) -> Captured:
        """within: calls its argument in a step, which is undone behind it."""
        with torch.inference_mode(False):  # also a step without it may fill these
            ids = torch.zeros((batch, 1), dtype=torch.int64, device=self._device)
            positions = torch.zeros_like(ids)
        graph, name = graph_on(self._device), type(self._model).__name__
        made, failed = list[object](), list[Exception]()

        def work() -> None:
            try:
                out = self._forward(
                    input_ids=ids,
                    position_ids=positions,
                    past_key_values=self._cache,
                    use_cache=True,
                    return_dict=True,
                )
            except Exception as error:
                failed.append(error)
                raise
            made.append(out)

        def capture() -> None:
            try:
                graph.capture(work)
            except Exception as error:
                cause = (*failed, error)[0]  # a capture that failed ends with another error
                if isinstance(cause, CXLKVError):
                    raise cause from None
                line = next(iter(str(cause).splitlines()), type(cause).__name__)
                raise UnsupportedError(
                    f"a decode step of {name} cannot be captured ({line}): leave compile() out for "
                    "this model"
                ) from cause

        within(capture)
        out = made[0]
        if not isinstance(out, ModelOutput) or not all(
            isinstance(value, Tensor) or value is self._cache for value in out.values()
        ):
            raise UnsupportedError(
                f"{name} returns more than tensors, such as hidden states: leave them out of its "
                "config, or compile() out"
            )
        return Captured(graph, _Model(self._model), ids, positions, out)


def _checked(cache: CXLCache, model: torch.nn.Module) -> torch.device:
    """The device of a model whose steps a graph can have. Raises UnsupportedError."""
    if cache.attention != "gpu":
        raise UnsupportedError('compile() is for caches made with attention="gpu"')
    if cache.pool.layout.states is not None:
        raise UnsupportedError(
            f"{type(model).__name__} has layers with states, whose own code takes part in its "
            "steps: leave compile() out"
        )
    for config in (text_config(model), getattr(model, "config", None)):
        found = _experts(config) if isinstance(config, PreTrainedConfig) else None
        if found is not None:
            raise UnsupportedError(
                f"{type(model).__name__} has experts ({found}): the host takes part in its steps, "
                "which cannot be captured; leave compile() out"
            )
    if any(depends_on_length(module) for module in model.modules()):
        raise UnsupportedError(
            f"{type(model).__name__} turns keys as the text's length says (dynamic or longrope), "
            "which the host decides in each step; leave compile() out"
        )
    devices = {one.device for one in model.parameters()}
    if len(devices) != 1:
        raise UnsupportedError(
            f"the weights lie on {', '.join(sorted(map(str, devices))) or 'no device'}: a graph "
            "has one device; leave compile() out"
        )
    device = devices.pop()
    graph_on(device)
    return device


def _experts(config: PreTrainedConfig) -> str | None:
    """The setting that says how many experts a model has; None: it is dense."""
    for name, value in vars(config).items():
        counts = name.endswith("experts") and "shared" not in name and "top_k" not in name
        if counts and is_whole(value, 1):
            return f"{name}={value}"
    return None
