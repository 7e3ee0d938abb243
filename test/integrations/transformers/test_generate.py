"""HiCacheCache under the real transformers: the tokens of `generate` are those of DynamicCache."""

import gc
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
)

from torch_hicache.integrations.transformers import HiCacheCache

torch.set_num_threads(1)  # for models this small more would only wait for each other

VOCABULARY = 97
# Of a model's forward, and of generate: renamed on the way from 5.19 to 5.24.
GENERATE_TAKES = (
    "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
)
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def llama(layers: int = 5, **options: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=layers, **options))


def qwen2() -> PreTrainedModel:
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    return Qwen2ForCausalLM(Qwen2Config(**shape, num_hidden_layers=4))


def gemma3() -> PreTrainedModel:
    """Two layers in three have a sliding window, and stay on the device."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 3
    config = Gemma3TextConfig(
        **SHAPE,
        num_hidden_layers=9,
        layer_types=kinds,
        sliding_window=8,
        query_pre_attn_scalar=16,
        tie_word_embeddings=False,  # else it repeats its prompt's last token for ever
    )
    return Gemma3ForCausalLM(config)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama, an even number of layers": lambda: llama(6),
    "llama, one layer": lambda: llama(1),
    "llama, multi-head": lambda: llama(5, attn_implementation="eager"),
    "llama, bfloat16": lambda: llama(4).to(torch.bfloat16),
    "qwen2": qwen2,
    "gemma3": gemma3,
}
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.3, "top_k": 40},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 4},
    "sampled beams": {"do_sample": True, "num_beams": 3},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 4},
    "chunked prefill": {"do_sample": False, "prefill_chunk_size": 5},
}


def made(make: Callable[[], PreTrainedModel], device: str = "cpu") -> PreTrainedModel:
    """Random weights; spread far enough that the tokens are not all alike."""
    torch.manual_seed(3)
    model = make().to(device).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.25 if "embed" in name else 0.15)
    return model


def prompt(batch: int, tokens: int, device: str = "cpu") -> dict[str, Tensor]:
    """Left-padded: sequence i has i padding tokens. The second half repeats the first."""
    torch.manual_seed(5)
    half = torch.randint(2, VOCABULARY, (batch, -(-tokens // 2)))
    ids = torch.cat([half, half], 1)[:, :tokens]
    mask = torch.ones_like(ids)
    for i in range(batch):
        ids[i, :i], mask[i, :i] = 0, 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def generate(
    model: PreTrainedModel, inputs: dict[str, Tensor], cache: object, **options: Any
) -> tuple[Tensor, Tensor]:
    """Tokens, and the scores of each step."""
    torch.manual_seed(11)
    options = {"max_new_tokens": 12, **options, GENERATE_TAKES: cache}
    output = model.generate(**inputs, output_scores=True, return_dict_in_generate=True, **options)
    return output.sequences, torch.stack(output.scores)


def assert_same(
    model: PreTrainedModel, inputs: dict[str, Tensor], cache: HiCacheCache, **options: Any
) -> Tensor:
    wanted, wanted_scores = generate(model, inputs, DynamicCache(config=model.config), **options)
    got, got_scores = generate(model, inputs, cache, **options)
    assert torch.equal(got, wanted)
    torch.testing.assert_close(got_scores, wanted_scores)
    assert len(wanted[:, inputs["input_ids"].shape[1] :].unique()) > 3  # else it proves little
    return got


@pytest.mark.parametrize(
    ("model", "search"),
    [
        (model, search)
        for model in MODELS
        for search in SEARCHES
        if model in ("llama", "gemma3") or search in ("greedy", "beams")
    ],
)
def test_tokens(model: str, search: str, device: str) -> None:
    options = SEARCHES[search]
    batch = 1 if "prompt_lookup_num_tokens" in options else 3
    decoder = made(MODELS[model], device)
    cache = HiCacheCache(decoder.config, max_tokens=1000, device=device)
    assert_same(decoder, prompt(batch, 17, device), cache, **options)
    assert cache.get_seq_length(-1) == cache.get_seq_length() >= 17 + 11


def test_assisted_generation(device: str) -> None:
    """Candidates of a small model; those that the large one refuses are cropped."""
    decoder, assistant = made(llama, device), made(lambda: llama(2), device)
    inputs = prompt(1, 9, device)
    cache = HiCacheCache(decoder.config, max_tokens=200)
    assert_same(decoder, inputs, cache, assistant_model=assistant, do_sample=False)


def test_turns_with_evictions(device: str) -> None:
    """A conversation is evicted after each turn and restored by the next."""
    decoder = made(llama, device)
    caches = DynamicCache(config=decoder.config), HiCacheCache(decoder.config, max_tokens=400)
    inputs = prompt(2, 9, device)
    for turn in range(4):
        tokens = [generate(decoder, inputs, cache, do_sample=False)[0] for cache in caches]
        assert torch.equal(*tokens)
        assert caches[1].device_bytes > 0
        caches[1].evict()
        assert caches[1].device_bytes == 0
        more = torch.full_like(tokens[0][:, :2], 7 + turn)
        ids = torch.cat([tokens[0], more], 1)
        mask = torch.ones_like(ids)
        mask[1, 0] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}


def test_another_prompt_after_reset(device: str) -> None:
    decoder = made(llama, device)
    cache = HiCacheCache(decoder.config, max_tokens=300)
    for batch, tokens in ((3, 17), (1, 40), (2, 5)):
        assert_same(decoder, prompt(batch, tokens, device), cache, do_sample=False)
        cache.reset()
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("make", [llama, gemma3], ids=["llama", "gemma3"])
def test_methods_of_the_cache(make: Callable[[], PreTrainedModel], device: str) -> None:
    """Logits after each method that changes the sequences, those of DynamicCache."""
    decoder = made(make, device)
    caches = DynamicCache(config=decoder.config), HiCacheCache(decoder.config, max_tokens=400)

    for cache in caches:
        cache.activate_past_recording()  # without it no crop of layers with a sliding window

    def step(ids: Tensor) -> None:
        with torch.no_grad():
            expected, logits = (
                decoder(ids.to(device), **{GENERATE_TAKES: cache}).logits for cache in caches
            )
        torch.testing.assert_close(logits, expected)

    changes: list[tuple[str, Any]] = [
        ("crop", -2),
        ("batch_repeat_interleave", 2),
        ("reorder_cache", torch.tensor([3, 0, 0, 2], device=device)),
        ("batch_select_indices", torch.tensor([2, 0], device=device)),
        ("crop", 0),
        ("batch_select_indices", torch.tensor([True, False], device=device)),
    ]
    step(torch.randint(2, VOCABULARY, (2, 6)))
    batch = 2
    for method, argument in changes:
        for cache in caches:
            getattr(cache, method)(argument)
        batch = {"batch_repeat_interleave": 4, "batch_select_indices": 2}.get(method, batch)
        if isinstance(argument, Tensor) and argument.dtype == torch.bool:
            batch = 1
        step(torch.randint(2, VOCABULARY, (batch, 1)))
        assert caches[0].get_seq_length() == caches[1].get_seq_length()


def test_early_initialization() -> None:
    decoder = made(llama)
    cache = HiCacheCache(decoder.config, max_tokens=400)
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    assert cache.is_initialized
    assert cache.host_bytes == 5 * 400 * 2 * 16 * 2 * 4
    assert cache.device_bytes == 0
    assert_same(decoder, prompt(2, 9), cache, do_sample=False)


def test_only_full_attention_is_in_the_pool() -> None:
    decoder = made(gemma3)
    cache = HiCacheCache(decoder.config, max_tokens=100)
    generate(decoder, prompt(1, 9), cache, do_sample=False)
    assert cache.host_bytes == 3 * 100 * 2 * 16 * 2 * 4
    assert cache.is_sliding == DynamicCache(config=decoder.config).is_sliding


def test_a_full_pool_is_told_and_harms_nothing() -> None:
    decoder = made(llama)
    cache = HiCacheCache(decoder.config, max_tokens=30)
    inputs = prompt(2, 15)
    inputs["attention_mask"].fill_(1)
    with pytest.raises(MemoryError, match=r"2 of 16 tokens need 32, got 30"):
        generate(decoder, inputs, cache, do_sample=False)
    assert cache.get_seq_length() == 15
    cache.crop(-8)
    with torch.no_grad():
        ids = inputs["input_ids"][:, 7:]
        got, wanted = (
            decoder(part, attention_mask=inputs["attention_mask"], **{GENERATE_TAKES: c}).logits[:, -1]
            for c, part in ((cache, ids), (DynamicCache(config=decoder.config), inputs["input_ids"]))
        )
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (T5Config(num_layers=2), r"serves decoders, got a model with an encoder"),
        (
            Gemma3TextConfig(num_hidden_layers=2, layer_types=["sliding_attention"] * 2),
            r"must have full attention, .* got DynamicSlidingWindowLayer",
        ),
    ],
    ids=["an encoder", "sliding windows only"],
)
def test_models_that_are_refused(config: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"\[HiCacheCache\].*" + text):
        HiCacheCache(config, max_tokens=100)


def test_layers_that_share_kv_are_refused() -> None:
    """Their K and V would be overwritten in the window before the last layer has read them."""
    config = Gemma3nTextConfig(num_hidden_layers=10, num_kv_shared_layers=2)
    with pytest.raises(ValueError, match=r"\[HiCacheCache\].* got (.*DummyLayer|8 of 10)"):
        HiCacheCache(config, max_tokens=100)


def test_bad_input() -> None:
    config = llama(2).config
    with pytest.raises(ValueError, match=r"\[HiCacheCache\] max_tokens must be an integer of 1 or more"):
        HiCacheCache(config, max_tokens=0)
    cache = HiCacheCache(config, max_tokens=100)
    with pytest.raises(ValueError, match=r"tokens_to_remove must be 0 or negative, got 3"):
        cache.crop(3)
    with pytest.raises(RuntimeError, match=r"crop must be called on the cache"):
        cache.layers[0].crop(-1)
    with pytest.raises(RuntimeError, match=r"offload must be called on the cache"):
        cache.layers[0].offload()
    with pytest.raises(ValueError, match=r"can't carry a gradient"):
        made(lambda: llama(2))(prompt(1, 5)["input_ids"], **{GENERATE_TAKES: cache})
    cache = HiCacheCache(config, max_tokens=100, device="meta")
    with pytest.raises(ValueError, match=r"must be on meta, got cpu"):
        generate(made(lambda: llama(2)), prompt(1, 5), cache)


def test_every_method_of_a_layer_is_ours() -> None:
    """A method that transformers adds to its layers would work on tensors that ours have not."""
    from torch_hicache.integrations.transformers import HiCacheLayer

    inherited = {
        name
        for name, value in inspect.getmembers(HiCacheLayer, inspect.isfunction)
        if not name.startswith("_") and name not in vars(HiCacheLayer)
    }
    assert inherited <= {"get_max_cache_shape"}  # of 5.19, which calls get_max_length


@pytest.mark.backend("cuda")
def test_tokens_of_a_long_prompt_on_cuda() -> None:
    """Loads that take a while beside the compute stream."""
    decoder = made(lambda: llama(8), "cuda")
    cache = HiCacheCache(decoder.config, max_tokens=8 * 500)
    assert_same(decoder, prompt(8, 400, "cuda"), cache, do_sample=False, max_new_tokens=64)
    del cache
    gc.collect()
