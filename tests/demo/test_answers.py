"""The demo that answers questions: its forms on a random model, its checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from cxlkv import CXLPool
from cxlkv.adapters.transformers import layout_of
from cxlkv.demo import smollm2
from cxlkv.demo.answers import picture, run
from cxlkv.demo.answers.ask import FORMS, Answer, Asked, Examiner, Question, handbook

from ..support import command
from .test_demo_model import qwen, save

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %} 8 9"


@pytest.fixture
def examiner(tmp_path: Path) -> Examiner:
    folder = save(qwen(max_position_embeddings=1024), tmp_path / "qwen")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.chat_template = CHAT
    pool = CXLPool.create("anonymous:", layout=layout_of(model), capacity="16MiB")
    return Examiner(model, tokenizer, pool, 1.0)


def asked_twice(examiner: Examiner) -> list[Asked]:
    document = " ".join(str(word % 500) for word in range(0, 3000, 7))
    tokens = examiner.tokens(document)
    assert examiner.tail == " 8 9"
    examiner.read(tokens, lambda count: None)
    held = examiner.pool.stats()["pages_held"]
    found = [list(examiner.ask(Question("3 1 4 1 5", "never", 0)))[-1] for _ in range(2)]
    assert examiner.pool.stats()["pages_held"] == held
    assert examiner.cache.get_seq_length() == len(tokens)
    examiner.release()
    examiner.pool.close()
    return found


def test_all_pages_say_what_full_attention_says_and_a_question_leaves_nothing(
    examiner: Examiner,
) -> None:
    first, second = asked_twice(examiner)
    texts = {form: first.answers[form].text for form in FORMS}
    assert texts["selected"] == texts["full"] == texts["random"] != ""
    assert {form: second.answers[form].text for form in FORMS} == texts
    assert first.answers["selected"].bytes_read > 0


def test_few_pages_read_few_bytes_and_are_counted(examiner: Examiner) -> None:
    examiner.share = 0.25
    first, _ = asked_twice(examiner)
    full, selected, drawn = (first.answers[form] for form in FORMS)
    for form in (selected, drawn):
        assert form.bytes_read < 0.3 * full.bytes_read / full.steps * form.steps
    assert selected.bytes_scored > 0 == drawn.bytes_scored
    assert first.chosen.sum() > 0


@pytest.mark.parametrize("encoding", ["int8", "int4", "fp8_e4m3"])
def test_an_encoded_pool_reads_fewer_bytes(examiner: Examiner, encoding: str) -> None:
    """All keys are scored as they are kept; transformers' own cache is as the model made it."""
    rows = examiner.pool.layout
    examiner.pool.close()
    layout = rows.encoded(encoding)
    examiner.pool = CXLPool.create("anonymous:", layout=layout, capacity="16MiB")
    examiner.context, examiner.share = examiner.pool.sequence(), 0.25
    first, _ = asked_twice(examiner)
    full, selected, drawn = (first.answers[form] for form in FORMS)
    share = layout.stored_token_bytes / rows.token_bytes
    assert share < 0.6
    assert full.bytes_read % rows.token_bytes == 0
    for form in (selected, drawn):
        assert form.bytes_read < 0.3 * share * full.bytes_read / full.steps * form.steps
    keys = (
        full.bytes_read / full.steps * selected.steps * layout.stored_key_bytes / rows.token_bytes
    )
    assert selected.bytes_scored == pytest.approx(keys, rel=0.1)


def test_an_encoding_is_of_the_trained_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = command.run(capsys, "demo", "--encoding", "int4", "--model", "m", "--text", "t")
    assert code == 1
    assert "--encoding goes with SmolLM2" in err
    code, _, err = command.run(capsys, "demo", "--encoding", "int2")
    assert code == 1
    assert "one of none, int8, int4" in err


def test_the_handbook_answers_each_question_where_it_says() -> None:
    document, questions = handbook()
    for question in questions:
        (found, *_) = re.finditer(question.answer, document)
        # A token of this text is four characters and a half.
        assert abs(found.end() / 4.5 - question.at) < 0.05 * len(document) / 4.5, question


def asked_with(right: int, of: str) -> list[Asked]:
    """Ten questions that full attention answers, and `of` as many as `right` of them."""
    found = []
    for at in range(10):
        answers = {form: Answer("no", 4, 1.0, 10, 10) for form in FORMS}
        answers["full"].text = "yes"
        answers["selected"].text = "yes" if of == "random" or at < right else "no"
        if of == "random":
            answers["random"].text = "yes" if at < right else "no"
        found.append(Asked(Question("?", "yes", 0), answers))
    return found


def test_lost_answers_and_lucky_pages_fail_the_demo(tmp_path: Path) -> None:
    assert run.result_of(asked_with(8, "selected"), 1000).passed
    assert not run.result_of(asked_with(7, "selected"), 1000).passed
    assert run.result_of(asked_with(4, "random"), 1000).passed
    assert not run.result_of(asked_with(5, "random"), 1000).passed
    path = tmp_path / "answers.png"
    picture.draw(path, "answers", asked_with(8, "selected"), 7000, 32)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.nightly
@pytest.mark.skipif(smollm2.model_file() is None, reason=f"no model: {smollm2.INSTALL}")
def test_the_trained_model_answers_from_few_pages(tmp_path: Path) -> None:
    assert run.run(smollm2.prepare(Console()), tmp_path / "answers.json", tmp_path / "answers.png")
