"""The guests' model in numpy is the demo's: the same scores as transformers gives."""

from __future__ import annotations

import numpy as np
import torch

from cxlkv import CXLPool
from cxlkv.demo.facts import MODEL, load_model
from cxlkv.demo.task import make_context
from tests.qemu.guest.llama import Llama


def test_scores_are_those_of_transformers() -> None:
    model, torch_model = Llama(MODEL), load_model()
    context = make_context(7, 333, 64, 8)
    ids = np.concatenate([context.tokens, context.questions])
    with torch.inference_mode():
        wanted = torch_model(torch.from_numpy(ids)[None]).logits[0].numpy()
    with CXLPool.create("anonymous:", layout=model.layout, capacity="4MiB") as pool:
        sequence = pool.sequence()
        first = model.read(sequence, context.tokens)
        np.testing.assert_allclose(first, wanted[332], rtol=1e-4, atol=1e-4)
        for at, question in enumerate(context.questions):
            scores = model.read(sequence, np.array([question]))
            np.testing.assert_allclose(scores, wanted[333 + at], rtol=1e-4, atol=1e-4)
            assert scores.argmax() == context.answers[at]
