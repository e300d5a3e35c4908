"""The transformers adapter on models that read images: their text lies in the pool, as any other.

The vision part has no cache. It is named "cxlkv" with the rest of the model all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cxlkv.adapters.transformers import CXLCache, CXLRequests
from cxlkv.errors import BadArgumentError, UnsupportedError

from ..support.small_models import VOCABULARY_SIZE, Generates, pool_for

IMAGE = 60  # the id that stands for a part of an image
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
TEXT: dict[str, object] = {
    **SMALL,
    "vocab_size": VOCABULARY_SIZE,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION: dict[str, object] = {**SMALL, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4}


def make(name: str, **config: object) -> PreTrainedModel:
    torch.manual_seed(7)
    made = getattr(transformers, f"{name}Config").from_dict(config)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(made)
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    return model


def inputs(parts: int, rows: int = 2, **more: Tensor) -> dict[str, Tensor]:
    """Rows of some text, an image of so many parts and more text; the first row is padded."""
    random = torch.Generator().manual_seed(3)
    text = torch.randint(1, IMAGE, (rows, 9), generator=random)
    image = torch.full((rows, parts), IMAGE)
    ids = torch.cat((text[:, :4], image, text[:, 4:]), dim=1)
    ids[0, :2] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), **more}


def pixels(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def llava() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """CLIP: no mask at all."""
    vision = {**VISION, "model_type": "clip_vision_model"}
    text = {**TEXT, "model_type": "llama"}
    model = make("Llava", vision_config=vision, text_config=text, image_token_index=IMAGE)
    return model, inputs(16, pixel_values=pixels(2, 3, 16, 16))


def idefics3() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A mask in both directions, which hides a part of the second image."""
    text = {**TEXT, "model_type": "llama"}
    model = make(
        "Idefics3", vision_config=VISION, text_config=text, image_token_id=IMAGE, scale_factor=2
    )
    seen = torch.ones(2, 1, 16, 16, dtype=torch.bool)
    seen[1, :, 8:] = False
    return model, inputs(4, pixel_values=pixels(2, 1, 3, 16, 16), pixel_attention_mask=seen)


def qwen2_vl() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Images packed one behind the other; positions in three directions."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4}
    model = make(
        "Qwen2VL",
        vision_config={**vision, "spatial_merge_size": 2, "temporal_patch_size": 2},
        text_config={**TEXT, "rope_parameters": rope},
        image_token_id=IMAGE,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    )
    given = inputs(
        4, pixel_values=pixels(32, 96), image_grid_thw=torch.tensor([[1, 4, 4], [1, 4, 4]])
    )
    return model, {**given, "mm_token_type_ids": (given["input_ids"] == IMAGE).int()}


def tokens_of(model: PreTrainedModel, given: dict[str, Tensor], cache: object) -> Tensor:
    settings: dict[str, object] = {**given, "past_key_values": cache}
    ids = cast(Tensor, settings.pop("input_ids"))
    return cast(Generates, model).generate(ids, max_new_tokens=12, do_sample=False, **settings)


@pytest.mark.parametrize("of_parts", [False, True], ids=["whole", "text_config"])
@pytest.mark.parametrize("make_model", [llava, idefics3, qwen2_vl])
def test_tokens_of_a_model_with_images_equal_those_of_dynamic_cache(
    make_model: Callable[[], tuple[PreTrainedModel, dict[str, Tensor]]], of_parts: bool
) -> None:
    model, given = make_model()
    wanted = tokens_of(model, given, DynamicCache())
    other = tokens_of(model, {**given, "pixel_values": -given["pixel_values"]}, DynamicCache())
    assert not torch.equal(wanted, other), "the test's image changes nothing"
    model.set_attn_implementation({"text_config": "cxlkv"} if of_parts else "cxlkv")
    with pool_for(model) as pool:
        cache = CXLCache(pool, model)
        torch.testing.assert_close(tokens_of(model, given, cache), wanted, rtol=0, atol=0)
        cache.release()


def test_the_text_part_still_needs_a_cache() -> None:
    model, given = llava()
    model.set_attn_implementation("cxlkv")
    with pytest.raises(BadArgumentError, match="CXLCache, and LlamaAttention was called without"):
        model(**given)


def test_a_text_part_that_sees_images_in_both_directions_is_refused() -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model = make(
        "Gemma3",
        vision_config={**VISION, "model_type": "siglip_vision_model"},
        text_config={
            **TEXT,
            "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        },
        image_token_index=IMAGE,
        mm_tokens_per_image=4,
    )
    given = inputs(4, pixel_values=pixels(2, 3, 16, 16))
    given["token_type_ids"] = (given["input_ids"] == IMAGE).long()
    model.set_attn_implementation("cxlkv")
    with pool_for(model) as pool:
        with pytest.raises(UnsupportedError, match="bidirectional parts"):
            model(**given, past_key_values=CXLCache(pool, model))
        assert pool.stats()["pages_free"] == pool.stats()["pages_total"]


def test_a_text_model_in_both_directions_is_refused() -> None:
    """Its mask is none where nothing is padded, as a causal one's."""
    config = transformers.GemmaConfig.from_dict({**TEXT, "use_bidirectional_attention": True})
    model = transformers.GemmaForCausalLM(config)
    model.train(False)
    model.set_attn_implementation("cxlkv")
    with pool_for(model) as pool, pytest.raises(UnsupportedError, match="in both directions"):
        model(torch.ones(1, 5, dtype=torch.long), past_key_values=CXLCache(pool, model))


def test_requests_refuse_prompts_that_their_ids_do_not_tell_apart() -> None:
    model, _ = llava()
    with pool_for(model) as pool, pytest.raises(UnsupportedError, match="the same for every image"):
        CXLRequests(pool, model)
