"""What keys and values in few bits cost a trained model: divergence and loss, text by text.

A first pass over a text in float32 uses transformers' own full attention. A second pass replaces
all values, and all keys after the rotary embedding, with their decoded codes, including those of
the current token. For encodings of single tokens this gives the same logits as decoding step by
step with an encoded cache. KIVI's newest tokens are kept in full for each query.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attention_of
from transformers import AttentionInterface, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from cxlkv.bench.lab import rivals
from cxlkv.bench.lab.run import begin, measure_units
from cxlkv.bench.lab.stored import Read, attention, in_sight, stored
from cxlkv.bench.lab.texts import TEXTS
from cxlkv.bench.lab.units import Arrays, names_like
from cxlkv.demo.full_attention import divergence_from
from cxlkv.demo.text import inputs
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.layout import FP8

ATTENTION = "cxlkv_lab_codes"
ROWS_MAX = 256
"""Logits are compared for so many tokens at a time."""
ERRORS = (0.0, 0.02, 0.03, 0.05, 0.1, 0.2)
"""Errors of attention, as `Budget.error` has them."""
FP8_TOKENS = 64
"""A scale by head is that of a text's first so many tokens."""
FP8_ROOM = 2
"""Later tokens may be so much larger before they are cut off."""


FP8_GAIN = 1.044
"""What is cut off towards zero is, on average over a power of two, so much smaller."""


@dataclass(frozen=True)
class Kind:
    """rows: what rows [heads, tokens, dim] are after their encoding. bits: of a channel, with
    scales, by head_dim."""

    rows: Callable[[Tensor], Tensor]
    bits: Callable[[int], float]


def of_pool(encoding: str, bits: int, scale_bits: int = 0) -> Kind:
    """What a pool of this encoding gives back."""
    return Kind(lambda raw: stored(raw, encoding), lambda dim: bits + scale_bits / dim)


def fp8_by_head(raw: Tensor) -> Tensor:
    largest = raw[:, :FP8_TOKENS].abs().amax((1, 2), keepdim=True)
    scale = largest * FP8_ROOM / rivals.FP8_MAX
    return stored((raw / scale).contiguous(), FP8) * scale


def by_kivi(bits: int, values: bool) -> Kind:
    group = rivals.KIVI_CHANNELS if values else rivals.KIVI_TOKENS
    of = rivals.kivi_values if values else rivals.kivi_keys
    return Kind(lambda raw: of(raw, bits), lambda dim: bits + 32 / group)


KINDS = {
    "none": Kind(lambda raw: raw, lambda dim: 16.0),
    "bf16": Kind(lambda raw: raw.bfloat16().float(), lambda dim: 16.0),
    "int8": of_pool("int8", 8, scale_bits=16),
    "int4": of_pool("int4", 4, scale_bits=16),
    "int4 by 32": Kind(lambda raw: rivals.int4_by_groups(raw, 32), lambda dim: 4.5),
    "fp8": of_pool(FP8, 8),
    "fp8 head": Kind(fp8_by_head, lambda dim: 8.0),
    "fp8 larger": Kind(lambda raw: stored(raw, FP8) * FP8_GAIN, lambda dim: 8.0),
    "fp8 nearest": Kind(rivals.nearest_fp8, lambda dim: 8.0),
    "kivi2 k": by_kivi(2, values=False),
    "kivi2 v": by_kivi(2, values=True),
    "kivi4 k": by_kivi(4, values=False),
    "kivi4 v": by_kivi(4, values=True),
    "q4_0": Kind(rivals.q4_0, lambda dim: 4.5),
    "q4_0 rotated": Kind(rivals.rotated_q4_0, lambda dim: 4.5),
}


@dataclass(frozen=True)
class Encoding:
    """k, v: of KINDS. dense: so many first layers, and as many last ones, keep what the model made.
    query_bits: queries are rotated and rounded to so many, 14 or 8; 0 is not at all. newest: the
    kind of the newest 128 tokens, if not that of all; sinks: and of so many first ones. error: the
    pool is in `progressive` and reads as many bits as this error of attention needs."""

    name: str
    k: str
    v: str
    dense: int = 0
    query_bits: int = 0
    newest: str = ""
    sinks: int = 0
    error: float | None = None

    def bits(self, dim: int, layers: int) -> float:
        """Bits a channel, mean of keys and values; layers kept as they are have 16. As in a long
        text, where the newest and the first tokens do not count.
        """
        coded = (KINDS[self.k].bits(dim) + KINDS[self.v].bits(dim)) / 2
        kept = min(1, 2 * self.dense / layers)
        return 16 * kept + coded * (1 - kept)


def both(kind: str, dense: int = 0, query_bits: int = 0) -> Encoding:
    words = [kind]
    words += [f"dense {dense}"] if dense else []
    words += [f"query {query_bits}"] if query_bits else []
    return Encoding(", ".join(words), kind, kind, dense, query_bits)


def alone(name: str, k: str, v: str, newest: str = "") -> list[Encoding]:
    return [
        Encoding(f"{name}, K only", k, "none", newest=newest),
        Encoding(f"{name}, V only", "none", v, newest=newest),
    ]


def every_encoding() -> tuple[Encoding, ...]:
    return (
        both("bf16"),
        both("int8"),
        *alone("int8", "int8", "int8"),
        both("int8", query_bits=14),
        both("int8", query_bits=8),
        both("int4"),
        *alone("int4", "int4", "int4"),
        both("int4", query_bits=8),
        both("int4", dense=1),
        both("int4", dense=2),
        both("int4 by 32"),
        Encoding("int4, newest int8", "int4", "int4", newest="int8"),
        Encoding("int4, newest int8, query 14", "int4", "int4", query_bits=14, newest="int8"),
        Encoding("int4, newest and first int8", "int4", "int4", newest="int8", sinks=16),
        Encoding("K int8, V int4", "int8", "int4"),
        both("fp8"),
        *alone("fp8", "fp8", "fp8"),
        both("fp8 head"),
        both("fp8 larger"),
        both("fp8 nearest"),
        Encoding("kivi4", "kivi4 k", "kivi4 v", newest="none"),
        Encoding("kivi2", "kivi2 k", "kivi2 v", newest="none"),
        *alone("kivi2", "kivi2 k", "kivi2 v", newest="none"),
        both("q4_0"),
        both("q4_0 rotated"),
        *(Encoding(f"progressive {error:g}", "int8", "int8", error=error) for error in ERRORS),
    )


def kinds_first() -> tuple[str, ...]:
    """All texts, one of each kind in front: a run that was stopped has read many kinds."""
    first = {text.kind: text.name for text in reversed(TEXTS)}
    names = [text.name for text in TEXTS]
    return tuple(sorted(names, key=lambda name: (name not in first.values(), names.index(name))))


@dataclass(frozen=True)
class CodesPlan:
    """Lengths are in tokens. texts: one of each kind first. prefix: what is read before the tokens
    whose predictions are compared; steps: how many these are."""

    texts: tuple[str, ...] = field(default_factory=kinds_first)
    prefix: int = 512
    steps: int = 512
    encodings: tuple[Encoding, ...] = field(default_factory=every_encoding)

    @classmethod
    def quick(cls) -> CodesPlan:
        """Too little to conclude from."""
        return cls(texts=("handbook", "argparse", "table"), prefix=256, steps=256)

    def only(self, patterns: list[str]) -> CodesPlan:
        """The encodings whose names are like a pattern (fnmatch); BadArgumentError for a pattern
        that no name is like."""
        found = names_like([one.name for one in self.encodings], patterns, "encoding")
        return replace(self, encodings=tuple(one for one in self.encodings if one.name in found))


class Coder:
    """A model whose layers attend to what an encoding makes of keys and values."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        nn.Module.to(model, torch.float32)  # in place
        self.own = str(model.config._attn_implementation)
        self.layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        self.encoding: Encoding | None = None
        self.counted, self.reads = 0, list[Read]()
        AttentionInterface.register(ATTENTION, self.attend)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)

    @contextmanager
    def under(self, encoding: Encoding) -> Iterator[None]:
        """reads: of each layer that attends in a pool."""
        self.encoding, self.reads = encoding, []
        self.model.set_attn_implementation(ATTENTION)
        try:
            yield
        finally:
            self.model.set_attn_implementation(self.own)
            self.encoding = None

    @torch.inference_mode()
    def chances(self, tokens: Tensor, keep: int) -> Tensor:
        """Log-probabilities behind the last `keep` of the tokens, float32 [keep, words]."""
        self.counted = keep
        logits = self.model(input_ids=tokens[None], use_cache=False, logits_to_keep=keep).logits[0]
        assert isinstance(logits, Tensor)
        for some in torch.split(logits, ROWS_MAX):
            some.copy_(torch.log_softmax(some, dim=-1))
        return logits

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **more: object,
    ) -> tuple[Tensor, None]:
        """Attention of one row over its whole text, [1, heads, tokens, dim] each."""
        window = cast(int | None, more.get("sliding_window"))
        if more.get("softcap") or (attention_mask is not None and window is None):
            raise UnsupportedError(f"{type(module).__name__}: logits are capped, or tokens masked")
        encoding, layer = self.encoding, int(getattr(module, "layer_idx"))  # noqa: B009
        assert encoding is not None
        if min(layer, self.layers - 1 - layer) < encoding.dense:
            return causal(query, key, value, scaling, window), None
        if encoding.query_bits:
            query = rivals.rounded_query(query, encoding.query_bits)
        if encoding.error is not None:
            rows, scale = (query[0], key[0], value[0]), scaling or query.shape[-1] ** -0.5
            out, read = attention(*rows, scale, encoding.error, self.counted, window)
            self.reads.append(read)
            return out.transpose(0, 1)[None].contiguous(), None
        coded = coded_rows(key, KINDS[encoding.k]), coded_rows(value, KINDS[encoding.v])
        if not encoding.newest:
            return causal(query, *coded, scaling, window), None
        kept = KINDS[encoding.newest]
        newest = coded_rows(key, kept), coded_rows(value, kept)
        return by_age(query, newest, coded, encoding.sinks, scaling, window), None


def causal(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None = None
) -> Tensor:
    """[1, tokens, heads, dim]."""
    grouped, tokens = key.shape[1] != query.shape[1], query.shape[2]
    seen = None if window is None or window >= tokens else in_sight(tokens, window)
    out = attention_of(
        query, key, value, seen, is_causal=seen is None, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous()


def coded_rows(rows: Tensor, kind: Kind) -> Tensor:
    """What the encoding makes of [1, heads, tokens, dim]."""
    return kind.rows(rows[0].contiguous())[None]


def by_age(
    query: Tensor,
    kept: tuple[Tensor, Tensor],
    coded: tuple[Tensor, Tensor],
    sinks: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Each query sees the newest tokens, 128 to 159, as they are kept, older ones as they are coded
    in groups of 32, and the first `sinks` tokens as they are kept, too."""
    tokens, step = query.shape[2], rivals.KIVI_TOKENS
    sight, out = in_sight(tokens, window), []
    for first in range(0, tokens, step):
        last, old = min(first + step, tokens), max(first - rivals.KIVI_WINDOW, 0)
        key, value = (
            torch.cat([k[:, :, : min(sinks, old)], c[:, :, sinks:old], k[:, :, old:last]], dim=2)
            for k, c in zip(kept, coded, strict=True)
        )
        seen = sight[first:last, :last]
        some = query[:, :, first:last]
        grouped = query.shape[1] != kept[0].shape[1]
        part = attention_of(some, key, value, attn_mask=seen, scale=scaling, enable_gqa=grouped)
        out.append(part)
    return torch.cat(out, dim=2).transpose(1, 2).contiguous()


def check_layers(config: PretrainedConfig) -> None:
    """Raises UnsupportedError for layers that are not measured, before weights are read."""
    decoder = config.get_text_config(decoder=True)
    kinds = set(getattr(decoder, "layer_types", None) or ["full_attention"])
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    if getattr(decoder, "attn_logit_softcapping", None):
        others.append("capped logits")
    if getattr(decoder, "kv_lora_rank", None):
        others.append("latent attention")
    if others:
        raise UnsupportedError(
            f"cxlkv lab encodings: a {decoder.model_type} model has {', '.join(others)}; measured "
            "are layers that attend to all tokens, or to the newest ones of a window"
        )


def measure(folder: Path, model: Path, plan: CodesPlan, console: Console) -> list[str]:
    """Read the texts that the folder lacks, but for those that another process reads now; these
    are returned. Raises what cxlkv.bench.lab.run.run() does."""
    check_layers(inputs.read_config(model))
    loaded, tokenizer = inputs.read_model(model), AutoTokenizer.from_pretrained(model)
    coder = Coder(loaded)
    length = plan.prefix + plan.steps + 1
    texts = {text.name: text.read() for text in TEXTS if text.name in plan.texts}
    ids = {
        name: torch.tensor(tokenizer(text[: 8 * length])["input_ids"][:length])
        for name, text in texts.items()
    }
    for name, tokens in ids.items():
        if len(tokens) < length:
            raise BadArgumentError(f"the text {name} has {len(tokens)} tokens, not {length}")
    digests = {n: hashlib.sha256(text.encode()).hexdigest()[:12] for n, text in texts.items()}
    begin(folder, model, asdict(plan), digests)
    steps = dict.fromkeys(plan.texts, len(plan.encodings) + 1)
    return measure_units(
        folder, steps, lambda name, advance: read(coder, plan, ids[name], advance), console
    )


def read(coder: Coder, plan: CodesPlan, tokens: Tensor, advance: Callable[[], None]) -> Arrays:
    """One text: losses and divergences in nats, and whether the most likely token is full
    attention's, [encodings, steps]; full: its own losses [steps]. reads: [encodings, 3], Read's
    figures, mean of the layers; NaN where all bits are read."""
    full = coder.chances(tokens[:-1], plan.steps)
    wanted, best = tokens[-plan.steps :, None], full.argmax(-1)
    advance()
    losses, divergences, agreed, reads = [], [], [], []
    for encoding in plan.encodings:
        with coder.under(encoding):
            chances = coder.chances(tokens[:-1], plan.steps)
        reads.append(np.mean(coder.reads or [Read(np.nan, np.nan)], axis=0))
        losses.append(-chances.gather(1, wanted)[:, 0].numpy())
        parts = zip(torch.split(full, ROWS_MAX), torch.split(chances, ROWS_MAX), strict=True)
        divergences.append(torch.cat([divergence_from(*pair) for pair in parts]).numpy())
        agreed.append((chances.argmax(-1) == best).numpy())
        advance()
    return {
        "full": -full.gather(1, wanted)[:, 0].numpy(),
        "losses": np.array(losses, np.float32),
        "divergences": np.array(divergences, np.float32),
        "agreed": np.array(agreed, np.bool_),
        "reads": np.array(reads, np.float32),
    }
