"""Only a model that is as it was then finds pages: adapters, weights, buffers, switches, hooks.

Every text that is read gives DynamicCache's tokens, whatever it goes on from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import peft
import pytest
import torch
from accelerate import cpu_offload
from peft import IA3Config, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from cxlkv import CXLPool
from cxlkv.adapters.transformers import (
    CXLCache,
    CXLRequests,
    hand_over,
    identity,
    layout_of,
    take_over,
)
from cxlkv.adapters.transformers.identity import Identity
from cxlkv.errors import BadArgumentError, StaleError, UnsupportedError

from ..conftest import audit
from ..support.adapted_worker import PAGE, adapted, base, lora, read
from ..support.processes import Prepared
from ..support.small_models import Generates, pool_for, prompts

pytestmark = [
    # PEFT asks transformers by an old name; a second adapter, and positions, are no news.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning"),
]

IDS = prompts((30,))[0]
ALL = 24
"""How many tokens of IDS a hit has: full pages, the last token never."""


@pytest.fixture
def pool() -> Iterator[CXLPool]:
    with pool_for(base(), PAGE) as made:
        yield made


@contextmanager
def rightly(model: torch.nn.Module) -> Iterator[list[Tensor]]:
    """What is added within is what DynamicCache makes."""
    made: list[Tensor] = []
    yield made
    own = cast(PreTrainedModel, model)
    own.set_attn_implementation("sdpa")
    settings = {"max_new_tokens": 12, "do_sample": False, "past_key_values": DynamicCache()}
    wanted = cast(Generates, model).generate(IDS, **settings)
    own.set_attn_implementation("cxlkv")
    assert all(torch.equal(one, wanted) for one in made)


def hit(requests: CXLRequests, model: torch.nn.Module) -> int:
    """How many tokens of IDS were found; asserts that what is made of them is right."""
    with rightly(model) as made:
        tokens, out = read(requests, model, IDS)
        made.append(out)
    return tokens


def hits(requests: CXLRequests, model: torch.nn.Module) -> list[int]:
    """Hits of two calls."""
    return [hit(requests, model), hit(requests, model)]


def layers_of(model: torch.nn.Module) -> list[peft.tuners.lora.Linear]:
    return [one for one in model.modules() if isinstance(one, peft.tuners.lora.Linear)]


def part_of(model: torch.nn.Module, name: str) -> torch.nn.Linear:
    """What the adapter x has in the first of its layers."""
    return cast(torch.nn.Linear, layers_of(model)[0].get_submodule(f"{name}.x"))


# ---- PEFT ----


def test_lora_switched_added_and_deleted(pool: CXLPool) -> None:
    model = adapted("x")
    requests = CXLRequests(pool, model)
    assert hits(requests, model) == [0, ALL]
    model.add_adapter("y", lora())
    assert hit(requests, model) == ALL, "y takes no part"
    model.set_adapter("y")
    assert hits(requests, model) == [0, ALL]
    model.set_adapter("x")
    assert hit(requests, model) == ALL, "the first one again"
    model.add_weighted_adapter(["x", "y"], [0.5, 0.7], "both", combination_type="linear")
    model.set_adapter("both")
    assert hits(requests, model) == [0, ALL]
    cast(peft.LoraModel, model.base_model).set_adapter(["x", "y"])
    assert hits(requests, model) == [0, ALL]
    model.set_adapter("x")
    model.delete_adapter("y")
    assert hit(requests, model) == ALL


def test_lora_disabled_is_the_base_model(pool: CXLPool) -> None:
    model = adapted("x")
    requests = CXLRequests(pool, model)
    assert hit(requests, model) == 0
    with model.disable_adapter():
        assert hits(requests, model) == [0, ALL]
    assert hit(requests, model) == ALL
    plain = base()
    assert hit(CXLRequests(pool, plain), plain) == ALL


def test_lora_merged_and_unmerged(pool: CXLPool) -> None:
    model = adapted("x")
    requests = CXLRequests(pool, model)
    assert hit(requests, model) == 0
    model.merge_adapter()
    assert hits(requests, model) == [0, ALL]
    with model.disable_adapter():  # unmerges in its first pass
        assert hit(requests, model) == 0
        hits(requests, model)
    model.merge_adapter()
    model.unmerge_adapter()
    hits(requests, model)  # the same but for rounding, so whatever it finds is right
    merged = model.merge_and_unload()
    merged.set_attn_implementation("cxlkv")
    assert hit(CXLRequests(pool, merged), merged) in (0, ALL)


def test_lora_scaled_and_trained(pool: CXLPool) -> None:
    model = adapted("x")
    requests = CXLRequests(pool, model)
    assert hit(requests, model) == 0
    layers_of(model)[1].scale_layer(0.5)
    assert hits(requests, model) == [0, ALL]
    layers_of(model)[1].unscale_layer()
    assert hit(requests, model) == ALL
    layers_of(model)[0].set_scale("x", 3.0)
    assert hits(requests, model) == [0, ALL]
    with torch.no_grad():
        part_of(model, "lora_B").weight[3, 1] += 0.5
    assert hits(requests, model) == [0, ALL]


def test_adapters_of_transformers_itself(pool: CXLPool) -> None:
    """model.add_adapter() finds what PeftModel has published: the layers are the same."""
    wrapped = adapted("x")
    assert hit(CXLRequests(pool, wrapped), wrapped) == 0
    model = base()
    requests = CXLRequests(pool, model)
    assert hit(requests, model) == 0
    torch.manual_seed(3)
    model.add_adapter(lora(), "other name")
    assert hit(requests, model) == ALL
    model.disable_adapters()
    assert hit(requests, model) == ALL, "the base model's"
    model.enable_adapters()
    model.add_adapter(lora(), "y")
    model.set_adapter("y")
    assert hits(requests, model) == [0, ALL]


@pytest.mark.parametrize(
    "config",
    [
        lora(use_dora=True),
        lora(use_rslora=True),
        IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"],
            feedforward_modules=["down_proj"],
            init_ia3_weights=False,
        ),
        peft.VeraConfig(target_modules=["k_proj"], r=4, init_weights=False, d_initial=1.0),
    ],
    ids=["dora", "rslora", "ia3", "vera"],
)
def test_other_kinds_of_adapters(pool: CXLPool, config: peft.PeftConfig) -> None:
    torch.manual_seed(3)
    model = get_peft_model(base(), config)
    model.train(False)
    requests = CXLRequests(pool, model)
    assert hits(requests, model) == [0, ALL]
    torch.manual_seed(4)
    model.add_adapter("y", config)
    model.train(False)
    model.set_adapter("y")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "y" in name.split("."):
                weight.add_(torch.rand_like(weight))
    assert hits(requests, model) == [0, ALL]
    model.set_adapter("default")
    assert hit(requests, model) in (0, ALL)
    with model.disable_adapter():
        assert hits(requests, model) == [0, ALL]


def test_an_adapter_for_each_row_of_a_batch(pool: CXLPool) -> None:
    """PEFT's adapter_names take part by hooks, which are there in a pass only."""
    model = adapted("x")
    model.add_adapter("y", lora())
    requests = CXLRequests(pool, model)
    with requests.begin(IDS) as cache:
        cast(Generates, model).generate(
            IDS, past_key_values=cache, max_new_tokens=2, adapter_names=["y"]
        )
    assert pool.stats()["pages_published"] == 0
    assert requests.failures()["changed"] + requests.failures()["doubt"] > 0
    assert hits(requests, model) == [0, ALL]
    with pytest.raises(BadArgumentError, match="made otherwise"), requests.begin(IDS) as cache:
        cast(Generates, model).generate(
            IDS, past_key_values=cache, max_new_tokens=2, adapter_names=["y"]
        )


def test_alora_shares_nothing(pool: CXLPool) -> None:
    """Where it begins to take part hangs on the last invocation, so on later tokens."""
    torch.manual_seed(3)
    config = lora(alora_invocation_tokens=IDS[0, 9:11].tolist(), task_type="CAUSAL_LM")
    model = get_peft_model(base(), config)
    requests = CXLRequests(pool, model)
    assert hits(requests, model) == [0, 0]
    assert requests.failures()["doubt"] > 0


def test_virtual_tokens_are_refused(pool: CXLPool) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = get_peft_model(base(), config)
    with pytest.raises(UnsupportedError, match="virtual tokens"):
        CXLRequests(pool, model)
    model.train(False)
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    with rightly(model) as made:
        cache = CXLCache(pool, model)
        made.append(cast(Generates, model).generate(IDS, past_key_values=cache, **settings))
        cache.release()


def test_two_processes(shm_path: Path) -> None:
    """Each has its own copy of the model, and another adapter on."""
    layout = layout_of(base(), PAGE)
    with CXLPool.create(str(shm_path), layout=layout, capacity="16MiB", threads=1) as pool:
        model = adapted("x")
        model.add_adapter("y", lora())
        assert hit(CXLRequests(pool, model), model) == 0
        told = json.dumps({"path": str(shm_path), "use": ["y", "x", None], "ids": IDS.tolist()})
        with Prepared("tests.support.adapted_worker", told) as child:
            found = json.loads(child.end())
        assert [one["hit"] for one in found] == [0, ALL, 0]
        requests = CXLRequests(pool, model)
        for name, one in zip(("y", "x"), found, strict=False):
            model.set_adapter(name)
            assert hit(requests, model) == ALL, "what the other one has read"
            with rightly(model) as made:
                made.append(torch.tensor(one["ids"]))
        with model.disable_adapter():
            assert hit(requests, model) == ALL
        audit(pool)


# ---- what else a model is ----


class Switched(torch.nn.Linear):
    """An adapter that PEFT did not make: an attribute says which one is on."""

    active: str

    def forward(self, input: Tensor) -> Tensor:
        parts = cast(torch.nn.ParameterDict, self.parts)
        made: Tensor = super().forward(input) + input @ parts[self.active].T
        return made


def switched() -> LlamaForCausalLM:
    model = base()
    torch.manual_seed(5)
    for layer in model.model.layers:
        linear = layer.self_attn.k_proj
        linear.__class__ = Switched
        linear.parts = torch.nn.ParameterDict(
            {name: torch.randn(linear.out_features, linear.in_features) * 0.3 for name in "xy"}
        )
        linear.active = "x"
    return model


def use(model: LlamaForCausalLM, name: str) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj.active = name


def test_an_attribute_that_switches(pool: CXLPool) -> None:
    model = switched()
    requests = CXLRequests(pool, model)
    assert hits(requests, model) == [0, ALL]
    use(model, "y")
    assert hits(requests, model) == [0, ALL]
    use(model, "x")
    assert hit(requests, model) == ALL


@torch.enable_grad()
def trained(model: LlamaForCausalLM) -> None:
    """One step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model.set_attn_implementation("sdpa")
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    model.set_attn_implementation("cxlkv")


def loaded(model: LlamaForCausalLM) -> None:
    model.load_state_dict(base(seed=9).state_dict())


def by_data(model: LlamaForCausalLM) -> None:
    model.model.layers[1].self_attn.v_proj.weight.data.mul_(1.5)


def replaced(model: LlamaForCausalLM) -> None:
    own = model.model.layers[0].self_attn.k_proj
    other = torch.nn.Linear(own.in_features, own.out_features, bias=False)
    model.model.layers[0].self_attn.k_proj = other


def another_epsilon(model: LlamaForCausalLM) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.1


def slower_rope(model: LlamaForCausalLM) -> None:
    model.model.rotary_emb.inv_freq *= 0.9


def louder_rope(model: LlamaForCausalLM) -> None:
    model.model.rotary_emb.attention_scaling = 1.1


def another_activation(model: LlamaForCausalLM) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()


def a_nested_switch(model: LlamaForCausalLM) -> None:
    model.model.layers[0].self_attn.settings = {"gate": [1, {"on": False}]}


def a_config(model: LlamaForCausalLM) -> None:
    model.config.rms_norm_eps = 0.5


CHANGES = (trained, loaded, by_data, replaced, another_epsilon, slower_rope, louder_rope)
MORE = (another_activation, a_nested_switch, a_config)


@pytest.mark.parametrize("change", CHANGES + MORE, ids=lambda one: one.__name__)
def test_a_change_of_the_model(pool: CXLPool, change: Callable[[LlamaForCausalLM], None]) -> None:
    model = base()
    requests = CXLRequests(pool, model)
    assert hits(requests, model) == [0, ALL]
    with requests.begin(IDS) as cache:
        change(model)
        with pytest.raises(BadArgumentError, match="made otherwise"):
            model(IDS[:, ALL:], past_key_values=cache)
    assert hits(requests, model) == [0, ALL]
    assert hit(CXLRequests(pool, model), model) == ALL, "who comes later sees the same"


@pytest.mark.parametrize("change", CHANGES + MORE, ids=lambda one: one.__name__)
def test_a_change_while_a_prompt_is_read(
    pool: CXLPool, change: Callable[[LlamaForCausalLM], None]
) -> None:
    """Nothing is published; what was begun goes on."""
    model = base()
    requests = CXLRequests(pool, model)
    with requests.begin(IDS) as cache, torch.no_grad():
        model(IDS[:, :20], past_key_values=cache)
        change(model)
        model(IDS[:, 20:], past_key_values=cache)
        assert requests.keep(cache, IDS) == 0
    assert pool.stats()["pages_published"] == 0
    assert requests.failures()["changed"] == 2
    with pytest.raises(BadArgumentError, match="another model"):
        take_over(handed(pool, base()), pool, model)


def handed(pool: CXLPool, model: torch.nn.Module) -> bytes:
    cache = CXLCache(pool, model)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    data = hand_over(cache, model)
    cache.release()
    return data


def test_hand_over_to_another_adapter(pool: CXLPool) -> None:
    model = adapted("x")
    model.add_adapter("y", lora())
    data = handed(pool, model)
    same = adapted("of another name")
    with pytest.raises(StaleError):  # the model is right, and its rows were released
        take_over(data, pool, same)
    model.set_adapter("y")
    for other in (model, base(), adapted("x").merge_and_unload()):
        with pytest.raises(BadArgumentError, match="which adapters are on"):
            take_over(data, pool, other)


def test_another_dtype_and_autocast(pool: CXLPool) -> None:
    model = base()
    requests = CXLRequests(pool, model)
    assert hits(requests, model) == [0, ALL]
    with torch.autocast("cpu", torch.bfloat16):
        assert read(requests, model, IDS)[0] == 0
    model.to(torch.bfloat16)  # type: ignore[arg-type]
    assert read(requests, model, IDS)[0] == 0


def test_hooks_that_nobody_knows(pool: CXLPool) -> None:
    """What they do is not known, so pages are shared neither with them nor without."""
    model = base()
    requests = CXLRequests(pool, model)
    layer = model.model.layers[0]
    for hook in (
        layer.register_forward_hook(lambda module, args, output: output * 1.5),
        torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None),
    ):
        assert hits(requests, model) == [0, 0]
        hook.remove()
    layer.forward = lambda *args, own=layer.forward, **given: own(*args, **given) * 2
    assert hits(requests, model) == [0, 0]
    assert requests.failures()["doubt"] > 0
    del layer.forward
    assert hits(requests, model) == [0, ALL]


def test_weights_that_are_brought_when_they_are_used(pool: CXLPool) -> None:
    model = cpu_offload(base(), execution_device=torch.device("cpu"))
    with pytest.raises(BadArgumentError, match="say weights="):
        CXLRequests(pool, model)
    requests = CXLRequests(pool, model, weights="revision 1")
    assert [read(requests, model, IDS)[0] for _ in range(2)] == [0, ALL]
    assert not requests.failures()


def test_dropout_that_is_on(pool: CXLPool) -> None:
    model = get_peft_model(base(), lora(lora_dropout=0.3))
    assert CXLRequests(pool, model).keys(IDS[0].tolist()) != CXLRequests(pool, model).keys(
        IDS[0].tolist()
    )
    model.train(False)
    requests = CXLRequests(pool, model)
    assert hits(requests, model) == [0, ALL]


def test_only_what_has_changed_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read_tensors = adapted("x"), list[tuple[int, ...]]()
    digest = identity._digest

    def counted(weight: Tensor) -> bytes:
        read_tensors.append(tuple(weight.shape))
        return digest(weight)

    monkeypatch.setattr(identity, "_digest", counted)
    known = Identity(model)
    words = known.now().words
    assert len(read_tensors) > 20
    read_tensors.clear()
    assert known.now().words == words
    assert not read_tensors
    with torch.no_grad():
        part_of(model, "lora_A").weight[0, 0] += 1
    changed = known.now().words
    assert read_tensors == [(4, 32)]
    assert changed != words
    assert changed == Identity(model).now().words
    assert Identity(model, "named").now().words != words


def test_a_change_that_samples_miss(pool: CXLPool) -> None:
    """The docs name this limit: through .data, in bytes that no sample has."""
    model = base(vocab_size=4096)
    weight = model.model.embed_tokens.weight
    known = Identity(model)
    words, version = known.now().words, weight._version
    weight.data[1000, 3] += 1
    assert weight._version == version
    assert known.now().words == words
    with torch.no_grad():
        weight[1000, 3] += 1
    assert known.now().words != words


def test_rows_of_their_own(pool: CXLPool) -> None:
    """load(), cache() and store(): keys name the model as it was when they were made."""
    model = adapted("x")
    model.add_adapter("y", lora())
    requests, text = CXLRequests(pool, model), IDS[0].tolist()
    of_x = requests.keys(text)
    model.set_adapter("y")
    of_y = requests.keys(text)
    requests.load("one", None, 0)
    with torch.no_grad():
        for part in (IDS[:, :17], IDS[:, 17:]):
            model(part, past_key_values=requests.cache(["one"]))
    assert requests.store("one", of_x) == 0
    assert requests.store("one", of_y[:2]) == 2
    model.set_adapter("x")
    assert requests.store("one", of_y) == 0, "the model has changed since"
    requests.release("one")
    with requests.match(of_y) as found:
        requests.load("two", found.handle, found.tokens, of_y)
    with pytest.raises(BadArgumentError, match="made otherwise"):
        model(IDS[:, 16:], past_key_values=requests.cache(["two"]))
    requests.release("two")
