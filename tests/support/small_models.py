"""What the tests of the transformers adapter share: prompts for small random models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar, cast

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from cxlkv import CXLPool
from cxlkv.adapters.transformers import CXLCache, layout_of

from ..conftest import audit

VOCABULARY_SIZE = 64
LAYERS = 3
PAGE_TOKENS = 4
SHAPE: dict[str, object] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
SMALLER: dict[str, object] = {
    **SHAPE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
}
NO_KERNEL = ("gemma2", "gpt_oss", "hy_v4", "mimo_v2_flash")
"""Their softcap and sinks are left out by transformers' sdpa."""


Model = TypeVar("Model", bound=PreTrainedModel)


def built(
    config: type[PreTrainedConfig], kind: type[Model], seed: int = 7, /, **more: object
) -> Model:
    """A random model that attends in pools. more: what differs from SMALLER."""
    torch.manual_seed(seed)
    made = config.from_dict({**SMALLER, **more})
    assert isinstance(made, PreTrainedConfig)
    model = kind(made)
    model.train(False)
    model.set_attn_implementation("cxlkv")
    return model


@contextmanager
def pool_for(
    model: object, page_tokens: int = PAGE_TOKENS, capacity: str = "16MiB", **layout: str
) -> Iterator[CXLPool]:
    """A pool of a model's own, clean at the end. layout: as in layout_of()."""
    shape = layout_of(model, page_tokens, **layout)
    with CXLPool.create("anonymous:", layout=shape, capacity=capacity, threads=1) as made:
        yield made
        audit(made)


def save_with_words(folder: Path, shape: Mapping[str, object], words: Iterable[str]) -> Path:
    """A random Llama of this shape in float32, whose tokens are words between spaces."""
    torch.manual_seed(4)
    LlamaForCausalLM(LlamaConfig.from_dict({**shape})).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    fast.save_pretrained(folder)
    return folder


def save_with_windows(model: Path, folder: Path, shape: Mapping[str, object], window: int) -> Path:
    """A Gemma 3 of this shape, with windows in four of six layers, the first among them, and with
    another model's tokenizer."""
    kinds = [*["sliding_attention"] * 2, "full_attention"] * 2
    made = {**shape, "num_hidden_layers": 6, "layer_types": kinds, "sliding_window": window}
    torch.manual_seed(5)
    Gemma3ForCausalLM(Gemma3TextConfig.from_dict(made)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    return folder


def prompts(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask [rows, the longest], padded on the left."""
    random = torch.Generator().manual_seed(3)
    longest = max(lengths)
    ids = torch.randint(1, VOCABULARY_SIZE, (len(lengths), longest), generator=random)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return ids * mask, mask.long()


class Generates(Protocol):
    """What transformers' own annotations do not say of generate(): it takes a model."""

    def generate(self, inputs: Tensor, **settings: object) -> Tensor: ...


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def attend_by(model: PreTrainedModel, cache: object) -> None:
    own = "eager" if model.config.model_type in NO_KERNEL else "sdpa"
    model.set_attn_implementation("cxlkv" if isinstance(cache, CXLCache) else own)


def generate(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None, cache: object, **more: object
) -> Tensor:
    """Tokens, prompt included: greedy ones if not told otherwise."""
    attend_by(model, cache)
    torch.manual_seed(11)
    settings = {"max_new_tokens": 16, "do_sample": False, **more}
    if mask is not None:
        settings["attention_mask"] = mask
    return cast(Generates, model).generate(ids, past_key_values=cache, **settings)


@torch.no_grad()
def run(model: PreTrainedModel, ids: Tensor, cache: object, mask: Tensor | None = None) -> Tensor:
    """Logits of one forward pass, [rows, tokens, vocabulary]."""
    attend_by(model, cache)
    logits = model(ids, attention_mask=mask, past_key_values=cache).logits
    assert isinstance(logits, Tensor)
    return logits


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every tensor that any operation makes, but for views of a model's weights; keeps how
    much memory the largest has."""

    def __init__(self, model: PreTrainedModel | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest_bytes = 0
        self._known = {p.data_ptr() for p in model.parameters()} if model is not None else set()

    def __torch_dispatch__(  # type: ignore[explicit-any]
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, Tensor) and one.data_ptr() not in self._known:
                size = min(one.numel() * one.element_size(), one.untyped_storage().size())
                self.largest_bytes = max(self.largest_bytes, size)  # an expanded one has no more
        return made
