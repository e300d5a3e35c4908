"""`cxlkv demo --model --text` on models made here: its figures, its files, and what it refuses."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
)

from cxlkv import Budget, CXLPool, Selection
from cxlkv.adapters.transformers import LayerStep, layout_of
from cxlkv.bench.lab.statistics import bootstrap_blocks
from cxlkv.demo import facts
from cxlkv.demo.forms import Form, FormsCache, Read
from cxlkv.demo.task import FIRST_FILLER, FIRST_QUERY, VALUES, VOCABULARY_SIZE
from cxlkv.demo.text import inputs, measure, run
from cxlkv.demo.text.measure import Plan, Reader, Row, Track
from cxlkv.demo.text.report import Found, result_of
from cxlkv.errors import CXLKVError
from cxlkv.machine.topology import probe

from ..support import command

PNG = b"\x89PNG\r\n\x1a\n"
WORDS = 512
SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for an address fails: the demo is offline."""

    def refuse(*arguments: object, **more: object) -> None:
        raise AssertionError("the demo asked for a network address")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def save(model: PreTrainedModel, folder: Path, words: int = WORDS) -> Path:
    """A folder as people have them: model and tokenizer; word 7 of a text is token 7."""
    model.save_pretrained(folder)
    save_tokenizer(folder, words)
    return folder


def save_tokenizer(folder: Path, words: int) -> None:
    tokenizer = Tokenizer(WordLevel({str(word): word for word in range(words)}, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    fast.save_pretrained(folder)


def qwen(**more: object) -> Qwen3ForCausalLM:
    torch.manual_seed(3)
    return Qwen3ForCausalLM(Qwen3Config.from_dict({**SHAPE, **more}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Qwen3, whose layers see the whole context."""
    return save(qwen(), tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """1,000 words, each a token of `folder`."""
    words = torch.randint(0, WORDS, (1000,), generator=torch.Generator().manual_seed(5))
    path = tmp_path / "text.txt"
    path.write_text(" ".join(map(str, words.tolist())))
    return path


def without_progress(err: str) -> str:
    """What a command said on stderr but for its steps, each a line that ends with dots."""
    return "".join(line for line in err.splitlines(keepends=True) if not line.endswith(" ...\n"))


class Refused(Protocol):
    """A choice of --model, --text and more options, and what the command says why it cannot run."""

    def __call__(self, model: object, text: object, *more: object) -> str: ...


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """The one line on stderr of a command that cannot run."""

    def run(model: object, text: object, *more: object) -> str:
        options = [("--model", model), ("--text", text)]
        given = [word for option in options if option[1] for word in option]
        code, _, err = command.run(capsys, "demo", *given, *more)
        assert code == 1
        said = without_progress(err)
        assert said.startswith("error: ")
        assert said.count("\n") == 1, err
        return said

    return run


def facts_model() -> LlamaForCausalLM:
    """The packaged model, which finds facts, saying a value as the question for the key of it."""
    trained = facts.load_model()
    assert isinstance(trained.score, torch.nn.Linear)
    config = LlamaConfig.from_pretrained(facts.MODEL)
    config.architectures = None
    model = LlamaForCausalLM(config)
    model.model.load_state_dict(trained.model.state_dict())
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[FIRST_QUERY : FIRST_QUERY + VALUES] = trained.score.weight
    return model


def facts_text(tokens: int) -> str:
    """Facts that lead from key to key, among fillers; then a walk along them to the end.

    Each next token of the walk is told by one token of the context and by nothing else.
    """
    random = np.random.default_rng(8)
    steps = Plan.of(tokens).steps
    walk = random.permutation(VALUES)
    facts = walk * VALUES + np.roll(walk, -1)
    context = random.integers(FIRST_FILLER, VOCABULARY_SIZE, size=tokens - steps - 1)
    # The last page or two are forced, so they tell nothing.
    context[random.choice(len(context) - 64, size=VALUES, replace=False)] = facts
    asked = FIRST_QUERY + walk[np.arange(steps + 1) % VALUES]
    return " ".join(map(str, [*context, *asked]))


def test_a_model_on_a_text_leaves_a_table_a_picture_and_a_result(
    capsys: pytest.CaptureFixture[str], folder: Path, text: Path, tmp_path: Path
) -> None:
    picture, result = tmp_path / "demo.png", tmp_path / "demo.json"
    code, out, err = command.run(
        capsys,
        "demo",
        *("--model", folder, "--text", text, "--tokens", 512),
        *("--json", result),
    )
    assert (code, without_progress(err)) == (0, "")
    assert out.endswith("demo: PASS\n")
    assert "its first 512 tokens, 495 of them context" in out
    assert "in 16 of 16 steps" in out
    start = out.index("16 tokens predicted")
    assert max(map(len, out[start : out.index("two_stage read every")].splitlines())) <= 80
    assert picture.read_bytes().startswith(PNG)
    assert picture.stat().st_size > 20_000

    found = json.loads(result.read_text())
    assert list(found) == [
        *("case", "machine", "commit", "emulated", "checks", "metrics", "ratios", "notes")
    ]
    assert (found["case"], list(found["checks"].values())) == ("demo-text", [True, True])
    metrics = {name: metric["median"] for name, metric in found["metrics"].items()}
    assert len(found["metrics"]["loss_full"]["samples"]) == 16
    assert len(found["metrics"]["loss_digest_at_25_percent"]["samples"]) == 16
    names = [f"pages_{form}_percent" for form in ("exact_at_10", "random_at_25", "full_at_100")]
    assert [metrics[name] for name in names] == [4, 8, 31]
    assert "pages_exact_at_5_percent" not in metrics
    assert "left out, as the forced pages are as many: 2 %, 5 %" in found["notes"]
    assert "two_stage read every key, as exact does, at 10 %, 25 %: it reads sketches" in out
    token_bytes = 2 * 2 * 2 * 16 * 4
    assert metrics["cache_bytes"] == 496 * token_bytes  # of the step that is counted
    assert metrics["bytes_scored_exact_at_25_percent"] == metrics["cache_bytes"] / 2
    assert metrics["bytes_scored_two_stage_at_25_percent"] == metrics["cache_bytes"] / 2
    assert 0 < metrics["bytes_scored_digest_at_25_percent"] < metrics["cache_bytes"] / 4
    assert metrics["bytes_scored_random_at_25_percent"] == 0
    fetched = metrics["bytes_fetched_exact_at_25_percent"]
    assert fetched == metrics["bytes_fetched_random_at_25_percent"] == 8 * 16 * token_bytes
    assert found["ratios"]["perplexity_full_at_100_percent_to_full"] == pytest.approx(1, abs=1e-4)


def test_full_attention_has_the_perplexity_of_the_whole_text_read_at_once(
    folder: Path, text: Path
) -> None:
    found = measured(folder, text, 512)
    tokens = torch.tensor([int(word) for word in text.read_text().split()[:512]])
    with torch.no_grad():
        logits = qwen()(tokens[None]).logits[0]
    losses = torch.nn.functional.cross_entropy(logits[495:511], tokens[496:512], reduction="none")
    assert found.full.losses == pytest.approx(losses.tolist(), abs=1e-4)
    assert found.full.perplexity == pytest.approx(float(losses.mean().exp()), rel=1e-4)
    assert found.full.best == logits[495:511].argmax(-1).tolist()
    assert max(found.full.divergences) == 0


def measured(folder: Path, text: Path, tokens: int) -> Found:
    """What the command measures, without its reports."""
    model, plan = inputs.read_model(folder), Plan.of(tokens)
    ids = inputs.read_tokens(folder, text.read_text(), VOCABULARY_SIZE)
    layout = layout_of(model)
    capacity = run.capacity_bytes(layout, plan)
    with CXLPool.create("anonymous:", layout=layout, capacity=capacity) as pool:
        found, _ = run.measure(model, pool, ids, plan, Console(quiet=True))
        assert pool.admin.check(deep=True)["clean"]
    return found


def test_selected_pages_find_what_random_pages_miss(tmp_path: Path) -> None:
    folder = save(facts_model(), tmp_path / "facts", VOCABULARY_SIZE)
    text = tmp_path / "text.txt"
    text.write_text(facts_text(1024))
    found = measured(folder, text, 1024)
    assert found.full.perplexity < 1.1
    rows = {row.form: row for row in found.rows}
    assert len(rows) == 1 + 4 * 3
    for share in (0.05, 0.1, 0.25):
        exact, random = (rows[Form(method, share)].track for method in ("exact", "random"))
        assert exact.agreement(found.full) == 1
        assert exact.perplexity < 1.2
        assert random.agreement(found.full) < 0.8
        assert random.perplexity > 5
        assert random.divergence > 10 * exact.divergence
        two_stage = rows[Form("two_stage", share)].track
        assert two_stage.losses == pytest.approx(exact.losses, abs=1e-4)
    assert result_of(found).passed


def test_a_context_read_in_chunks_is_the_same_context(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measured(folder, text, 512)
    monkeypatch.setattr(measure, "CHUNK_TOKENS", 247)  # 2 of them, and a chunk of one token
    chunked = measured(folder, text, 512)
    assert result_of(chunked).passed
    for one, other in zip(whole.rows, chunked.rows, strict=True):
        assert one.track.losses == pytest.approx(other.track.losses, abs=1e-3)


def test_a_model_is_used_in_the_dtype_that_it_is_stored_in(
    capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path
) -> None:
    folder = save(qwen().bfloat16(), tmp_path / ("long" * 40) / ("name" * 40))
    words = ("--tokens", 256, "--json", tmp_path / "demo.json")
    code, out, _ = command.run(capsys, "demo", "--model", folder, "--text", text, *words)
    assert (code, "parameters in bfloat16" in out) == (0, True)
    assert "0.25 nats in bfloat16 pass as a tie" in out


def test_a_model_that_takes_fewer_tokens_sets_the_end(
    capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path
) -> None:
    folder = save(qwen(max_position_embeddings=300), tmp_path / "short")
    words = ("--json", tmp_path / "demo.json")
    code, out, _ = command.run(capsys, "demo", "--model", folder, "--text", text, *words)
    assert (code, "takes no more than 300 tokens" in out) == (0, True)
    assert "its first 300 tokens" in out


def test_pages_that_are_not_those_of_full_attention_fail_with_exit_code_1_and_no_ratios(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Form, "budget", lambda form: Budget(pages=3))
    folder = save(facts_model(), tmp_path / "facts", VOCABULARY_SIZE)
    (tmp_path / "text.txt").write_text(facts_text(512))
    monkeypatch.chdir(tmp_path)
    code, out, _ = command.run(
        capsys, "demo", "--model", folder, "--text", "text.txt", "--json", "demo.json"
    )
    assert code == 1
    assert out.endswith("demo: FAIL\n")
    found = json.loads((tmp_path / "demo.json").read_text())
    assert list(found["checks"].values()) == [False, False]
    assert found["ratios"] == {}
    assert (tmp_path / "demo.png").exists()


def test_an_interrupted_run_ends_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, calls = Reader.read, iter(range(9))

    def interrupted(reader: Reader, tokens: Tensor, keep: int = 1) -> Tensor:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return read(reader, tokens, keep)

    monkeypatch.setattr(Reader, "read", interrupted)
    code, out, err = command.run(capsys, "demo", "--model", folder, "--text", text)
    assert (code, without_progress(err)) == (130, "")
    assert "perplexity" not in out


def track(best: list[int], gap: float = 0.0, divergence: float = 0.0) -> Track:
    """Steps of which the last is `gap` nats and all are `divergence` off full attention."""
    steps = len(best)
    gaps = [0.0] * (steps - 1) + [gap]
    return Track([1.0] * steps, best, gaps, [divergence] * steps)


@pytest.mark.parametrize(
    ("gap", "divergence", "checks"),
    [(0.0009, 0.9e-4, [True, True]), (0.0011, 0.0, [False, True]), (0.0, 1.1e-4, [True, False])],
)
def test_all_pages_may_part_from_full_attention_by_rounding_only(
    gap: float, divergence: float, checks: list[bool]
) -> None:
    every, full = track([1, 2, 3, 5], gap, divergence), track([1, 2, 3, 4])
    row = Row(Form.full(), 16, every, Read(1, 0, 10))
    result = result_of(Found(Plan.of(256), "float32", full, [row]))
    assert list(result.checks.values()) == checks
    assert "in 3 of 4 steps, another in 1" in result.notes[-1]


def test_a_step_is_held_against_full_attention() -> None:
    full = torch.tensor([0.5, 0.25, 0.25, 0.0]).log()
    other = torch.tensor([0.25, 0.5, 0.125, 0.125]).log()
    noted = Track()
    noted.note(other, full, target=2)
    assert noted.losses == [pytest.approx(np.log(8))]
    assert noted.best == [1]
    assert noted.gaps == [pytest.approx(np.log(2))]
    assert noted.divergences == [pytest.approx(0.5 * np.log(2))]
    with pytest.raises(CXLKVError, match="no finite likelihood"):
        noted.note(full, full, target=3)


def test_a_plan_counts_every_token_and_leaves_out_budgets_without_a_choice() -> None:
    plan = Plan.of(4096)
    assert (plan.context, plan.steps, plan.tokens, plan.page_count) == (3967, 128, 4096, 248)
    pages = {form.share: plan.pages_of(form) for form in plan.forms() if form.method == "exact"}
    assert pages == {0.02: 5, 0.05: 13, 0.1: 25, 0.25: 62}
    assert [form.share for form in Plan.of(256).forms() if form.method == "digest"] == [0.25]
    assert Plan.of(20_000).steps == measure.STEPS_MAX


def test_random_pages_are_drawn_anew_at_each_step(folder: Path, text: Path) -> None:
    model, plan = inputs.read_model(folder), Plan.of(512)
    ids = inputs.read_tokens(folder, text.read_text(), WORDS)
    layout = layout_of(model)
    capacity = run.capacity_bytes(layout, plan)
    with CXLPool.create("anonymous:", layout=layout, capacity=capacity) as pool:
        drawn: list[list[int]] = []

        class Watched(FormsCache):
            def choose(self, part: LayerStep, queries: Tensor) -> Selection | None:
                picked = super().choose(part, queries)
                assert picked is not None
                drawn.extend(picked.pages[0].tolist())
                return picked

        cache = Watched(pool, model, [Form("random", 0.25)], [pool.sequence()])
        reader = Reader(model, "cxlkv", cache)
        reader.prefill(ids[:480])
        for at in range(480, 484):
            reader.read(ids[None, at : at + 1])
        cache.release()
    assert len(drawn) == 4 * 2 * 2  # steps, layers, heads
    assert {len(pages) for pages in drawn} == {8}
    assert len({tuple(pages) for pages in drawn}) == len(drawn)
    assert all(pages[0] == 0 and pages[-2:] == [29, 30] for pages in drawn)


def test_neighbouring_steps_count_as_fewer() -> None:
    """Blocks widen the interval of a mean whose samples come in runs, by the root of a run."""
    random = np.random.default_rng(2)
    runs = np.repeat(random.normal(size=64), 8)
    alone, together = bootstrap_blocks(runs, 1), bootstrap_blocks(runs, 8)
    assert 2 < (together.high - together.low) / (alone.high - alone.low) < 4
    assert bootstrap_blocks([0.5] * 5) == pytest.approx((0.5, 0.5, 0.5))


# ---- what is refused, each in a line that names it ----


def test_a_name_of_the_hub_is_not_downloaded(refused: Refused, text: Path, tmp_path: Path) -> None:
    assert "hf download Qwen/Qwen3-0.6B --local-dir" in refused("Qwen/Qwen3-0.6B", text)
    assert f"no folder {tmp_path}/absent" in refused(tmp_path / "absent", text)
    assert "is a file" in refused(text, text)
    assert "has no config.json" in refused(tmp_path, text)


def test_a_folder_that_is_no_causal_model_is_refused(
    refused: Refused, text: Path, tmp_path: Path
) -> None:
    T5Config().save_pretrained(tmp_path / "t5")
    assert "encoder-decoder" in refused(tmp_path / "t5", text)

    save_tokenizer(tmp_path / "facts", VOCABULARY_SIZE)
    facts.load_model().save_pretrained(tmp_path / "facts")
    assert "lack lm_head.weight" in refused(tmp_path / "facts", text)

    config = BertConfig.from_dict({**SHAPE, "num_key_value_heads": 4})
    bert = BertForMaskedLM(config)
    folder = save(bert, tmp_path / "bert")
    assert "keeps no keys and values" in refused(folder, text)


def test_a_model_with_an_attention_of_its_own_is_refused(
    refused: Refused, text: Path, tmp_path: Path
) -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=WORDS, hidden_size=64, n_layer=1, n_head=4))
    folder = save(model, tmp_path / "bloom")
    assert "BloomForCausalLM takes no attention but its own" in refused(folder, text)


def test_code_of_a_folder_is_not_run(refused: Refused, text: Path, tmp_path: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('this was run')")
    assert "code of its own" in refused(tmp_path, text)


def test_a_damaged_folder_is_one_line(refused: Refused, text: Path, tmp_path: Path) -> None:
    folder = save(qwen(), tmp_path / "qwen")
    (folder / "model.safetensors").write_bytes(b"no weights")
    assert "the model cannot be read" in refused(folder, text)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert "no tokenizer that knows" in refused(folder, text)
    (folder / "tokenizer.json").write_text("{}")
    assert "no tokenizer can be read" in refused(folder, text)
    (folder / "config.json").write_text("{")
    assert "the config cannot be read" in refused(folder, text)


def test_a_tokenizer_of_another_model_is_refused(
    refused: Refused, text: Path, tmp_path: Path
) -> None:
    folder = save(qwen(vocab_size=100), tmp_path / "qwen")
    assert "the tokenizer is of another model" in refused(folder, text)


def test_weights_that_overflow_are_named(refused: Refused, text: Path, tmp_path: Path) -> None:
    model = qwen()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    folder = save(model, tmp_path / "nan")
    assert "no finite likelihood" in refused(folder, text)


def test_a_text_that_is_none_is_refused(refused: Refused, folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    assert "text.txt" in refused(folder, text)
    text.write_bytes("Müller".encode("latin-1") * 400)
    assert "iconv -f ENCODING" in refused(folder, text)
    text.write_bytes(bytes(1000))
    assert "zero bytes" in refused(folder, text)
    text.write_text("1 2 3 " * 85)
    assert f"{text} has 255 tokens; at least 256 are needed" in refused(folder, text)
    assert "text" in refused(folder, tmp_path)


def test_a_file_that_could_not_be_written_is_refused_at_the_start(
    refused: Refused, folder: Path, text: Path, tmp_path: Path
) -> None:
    err = refused(folder, text, "--json", tmp_path / "absent" / "demo.json")
    assert "absent does not exist" in err


def test_options_that_do_not_go_together_are_refused(
    refused: Refused, folder: Path, text: Path
) -> None:
    for options in ((folder, None), (None, text)):
        assert "go together" in refused(*options)
    for budget in ("0%", "much", "5%,", "1"):
        assert "a share of the pages: write it like 0.05 or 5%" in refused(
            folder, text, "--budget", budget
        )
    assert "method 'best': use one of exact" in refused(folder, text, "--method", "best")
    assert "at least 256" in refused(folder, text, "--tokens", 100)


def test_a_machine_without_room_is_told_what_takes_it(
    refused: Refused, folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = probe()
    small = replace(machine, memory=replace(machine.memory, available_bytes=1 << 20))
    monkeypatch.setattr(run, "probe", lambda: small)
    err = refused(folder, text)
    assert "1 MiB there: the weights take" in err
    assert "Give fewer --tokens than 1000" in err
