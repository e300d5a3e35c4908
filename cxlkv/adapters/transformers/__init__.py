"""Hugging Face transformers: a Cache that keeps keys and values in a CXLPool.

    pool = CXLPool.create("anonymous:", layout=layout_of(model), capacity="2GiB")
    cache = CXLCache(pool, model, budget=0.05)  # of the pages; None: full attention
    model.set_attn_implementation("cxlkv")
    model.generate(ids, past_key_values=cache)

A forward pass through one layer: the model calls `FarLayer.update` with the new keys and values,
which keeps them until our attention function comes for them, appends them to the pool and attends
there. The prefill of an empty cache attends to the given tensors; a step of one token for each
sequence selects pages under the budget and attends to these only. Three calls into the core a
layer at most, whatever the number of sequences.

`layouts` says what a model's pool must store, `cache` has the cache, `gpu_steps` attention on a
device, `latent` the algebra of MLA, `attention` what transformers calls, `requests` prefixes that
calls of generate() share, `states` and `row_states` what recurrent layers keep, `pieces` how a
prompt is read up to checkpoints of it, `hints` what brings pages near beforehand, `queries` keeps
those of the last tokens, `handover` rows that another process goes on from.

Importing this module registers "cxlkv" as an attention implementation. Raises UnsupportedError
where transformers is missing or too old.
"""

from cxlkv.adapters.common.steps import LayerStep, Step
from cxlkv.adapters.transformers import _installed as _installed  # first: it may refuse
from cxlkv.adapters.transformers.attention import attention, padding_mask, register
from cxlkv.adapters.transformers.cache import Counters, CXLCache, FarLayer
from cxlkv.adapters.transformers.handover import hand_over, take_over
from cxlkv.adapters.transformers.hints import Hints
from cxlkv.adapters.transformers.layouts import layout_of
from cxlkv.adapters.transformers.queries import LastQueries
from cxlkv.adapters.transformers.requests import CXLRequests

__all__ = [
    "CXLCache",
    "CXLRequests",
    "Counters",
    "FarLayer",
    "Hints",
    "LastQueries",
    "LayerStep",
    "Step",
    "attention",
    "hand_over",
    "layout_of",
    "padding_mask",
    "register",
    "take_over",
]

register()
