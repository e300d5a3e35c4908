"""llama.cpp on a GGUF file: decode steps behind a text, by type of the cache's K and V.

    {"op": "open", "model": path, "ids": [id, ...], "behind": [500, ...], "steps": 16,
     "threads": 2}                                                        {"weights": "... Q4_1"}
    {"op": "steps", "form": "q8_0", "behind": 500}       {"seconds": [...], "losses": [...]}

Each type and length has a context of its own; the text is read once for each type. A step is one
token of the text, given: all of llama.cpp's work for it, the logits included. losses: of the tokens
that come next, in nats.
"""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass
from typing import ClassVar, cast

import llama_cpp
import numpy as np

from .serving import Peer, confine, must

TYPES = {
    "f16": (llama_cpp.GGML_TYPE_F16, llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED),
    "q8_0": (llama_cpp.GGML_TYPE_Q8_0, llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED),
    "q4_0": (llama_cpp.GGML_TYPE_Q4_0, llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED),
}
"""Types of K and V, and whether attention is fused: for V in blocks it must be; f16 gets slower."""
BATCH_TOKENS = 512


@dataclass(frozen=True)
class Given:
    """What is to be read: ids has `steps` more than the longest of `behind`."""

    model: str
    ids: list[int]
    behind: list[int]
    steps: int
    threads: int


class Llama(Peer):
    version = f"llama-cpp-python {llama_cpp.__version__}"
    forms: ClassVar = dict.fromkeys(TYPES, ("steps",))

    def __init__(self) -> None:
        self.silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.silent, ctypes.c_void_p())  # it tells of each tensor
        llama_cpp.llama_backend_init()
        self.contexts: dict[tuple[str, int], object] = {}

    def answer(self, asked: dict[str, object]) -> dict[str, object]:
        if asked.pop("op") == "open":
            self.given = Given(**asked)  # type: ignore[arg-type]
            return {"weights": self.open()}
        seconds, losses = self.steps(str(asked["form"]), cast("int", asked["behind"]))
        return {"seconds": seconds, "losses": losses}

    def open(self) -> str:
        """What llama.cpp says of the model."""
        given = self.given
        confine(given.threads)
        self.model = llama_cpp.llama_model_load_from_file(
            os.fsencode(given.model), llama_cpp.llama_model_default_params()
        )
        must(bool(self.model), f"llama.cpp does not read {given.model}")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocabulary_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        for form in TYPES:
            self.read(form)
        text = ctypes.create_string_buffer(128)
        llama_cpp.llama_model_desc(self.model, text, len(text))
        return text.value.decode()

    def read(self, form: str) -> None:
        """Reads the text into the longest context, and copies it from there at each length."""
        lengths, read = sorted(self.given.behind), 0
        longest = self.context(form, lengths[-1])
        for behind in lengths:
            for first in range(read, behind, BATCH_TOKENS):
                self.decode(longest, self.given.ids[first : min(first + BATCH_TOKENS, behind)])
            read = behind
            self.contexts[form, behind] = longest
            if behind < lengths[-1]:
                self.contexts[form, behind] = self.copy(longest, self.context(form, behind))

    def context(self, form: str, behind: int) -> object:
        """An empty one, for so many tokens and the steps."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = behind + self.given.steps
        params.n_batch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = self.given.threads
        params.type_k = params.type_v = TYPES[form][0]
        params.flash_attn_type = TYPES[form][1]
        context = llama_cpp.llama_init_from_model(self.model, params)
        must(bool(context), f"llama.cpp makes no context of {form}")
        return context

    def copy(self, context: object, to: object) -> object:
        """What `context` holds, in `to`."""
        size = llama_cpp.llama_state_seq_get_size(context, 0)
        state = (ctypes.c_uint8 * size)()
        written = llama_cpp.llama_state_seq_get_data(context, state, size, 0)
        must(0 < written == llama_cpp.llama_state_seq_set_data(to, state, written, 0), "no state")
        return to

    def decode(self, context: object, ids: list[int]) -> None:
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        code = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(ids)))
        must(code == 0, f"llama_decode gave {code}")

    def steps(self, form: str, behind: int) -> tuple[list[float], list[float]]:
        """Seconds and losses; the context then holds `behind` tokens again."""
        context, ids = self.contexts[form, behind], self.given.ids
        memory = llama_cpp.llama_get_memory(context)
        seconds, losses = [], []
        for at in range(behind, behind + self.given.steps):
            last = llama_cpp.llama_memory_seq_pos_max(memory, 0)
            must(last == at - 1, f"{last + 1} tokens are in the context, not {at}")
            began = time.perf_counter()
            self.decode(context, [ids[at]])
            logits = llama_cpp.llama_get_logits_ith(context, -1)
            seconds.append(time.perf_counter() - began)
            if at + 1 < behind + self.given.steps:
                losses.append(self.loss(logits, ids[at + 1]))
        llama_cpp.llama_memory_seq_rm(memory, 0, behind, -1)
        return seconds, losses

    def loss(self, logits: object, wanted: int) -> float:
        row = np.ctypeslib.as_array(logits, (self.vocabulary_size,)).astype(np.float64)
        return float(np.logaddexp.reduce(row) - row[wanted])


PEER = Llama
