"""Tiny networks of well-known families, with random weights: nothing is downloaded.

Each function returns a model in float64 and training mode (dropout on) and a function `loss(model)`
that gives a scalar for inputs fixed beforehand. Weights and inputs depend on `seed` only; dropout
draws from PyTorch's global generator, so seed that before each call that is to be compared.

float64 is not the whole story: the Llama family, T5 and most "eager" attentions compute norms,
softmax or rotary angles in float32 whatever the model's dtype. Compare their gradients with each
other, not with finite differences.

    model, loss = zoo.MODELS["llama"](attention="eager")
    torch.manual_seed(0)
    loss(model).backward()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.unet import UNet

Attention = Literal["sdpa", "eager"]
Loss = Callable[[nn.Module], Tensor]
Model = tuple[nn.Module, Loss]

VOCABULARY = 61
BATCH, LENGTH = 2, 7


def gpt2(attention: Attention = "sdpa", seed: int = 0) -> Model:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        use_cache=False,
        **_ENDS,
    )
    return _language_model(GPT2LMHeadModel, config, attention, seed)


def bert(attention: Attention = "sdpa", seed: int = 0) -> Model:
    """Masked language modelling; the second sequence of the batch is padded."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **_SIZES)
    model, generator = _build(BertForMaskedLM, config, attention, seed)
    inputs = {
        "input_ids": _tokens(generator),
        "token_type_ids": torch.arange(LENGTH).ge(4).long().expand(BATCH, LENGTH),
        "attention_mask": _padding_mask(),
    }
    return model, _cross_entropy(inputs, labels=_tokens(generator))


def llama(attention: Attention = "sdpa", seed: int = 0) -> Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_DECODER)
    return _language_model(LlamaForCausalLM, config, attention, seed)


def qwen3(attention: Attention = "sdpa", seed: int = 0) -> Model:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(head_dim=8, tie_word_embeddings=True, **_DECODER)
    return _language_model(Qwen3ForCausalLM, config, attention, seed)


def mixtral(attention: Attention = "sdpa", seed: int = 0) -> Model:
    """Four experts, two a token, with noise on the router's input and its balancing loss."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        num_local_experts=4,
        num_experts_per_tok=2,
        router_jitter_noise=0.01,
        output_router_logits=True,
        **_DECODER,
    )
    # Not the default `torch._grouped_mm`, which has no float64 kernel.
    config._experts_implementation = "eager"
    return _language_model(MixtralForCausalLM, config, attention, seed)


def t5(attention: Attention = "sdpa", seed: int = 0) -> Model:
    """Encoder and decoder; gated GELU as in T5 1.1, a padded source."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        relative_attention_num_buckets=8,
        feed_forward_proj="gated-gelu",
        use_cache=False,
    )
    model, generator = _build(T5ForConditionalGeneration, config, attention, seed)
    inputs = {
        "input_ids": _tokens(generator),
        "attention_mask": _padding_mask(),
        "decoder_input_ids": _tokens(generator),
    }
    return model, _cross_entropy(inputs, labels=_tokens(generator))


def vit(attention: Attention = "sdpa", seed: int = 0) -> Model:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=8, patch_size=4, **_SIZES)
    config.num_labels = 5
    model, generator = _build(ViTForImageClassification, config, attention, seed)
    images = torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (BATCH,), generator=generator)
    return model, _cross_entropy({"pixel_values": images}, labels)


def whisper(attention: Attention = "sdpa", seed: int = 0) -> Model:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=10,
        max_target_positions=16,
        dropout=0.1,
        attention_dropout=0.1,
        activation_dropout=0.1,
        use_cache=False,
        pad_token_id=0,
        decoder_start_token_id=1,
        **_ENDS,
    )
    model, generator = _build(WhisperForConditionalGeneration, config, attention, seed)
    inputs = {
        # The encoder's second convolution halves the number of frames.
        "input_features": torch.randn(BATCH, 8, 20, generator=generator, dtype=torch.float64),
        "decoder_input_ids": _tokens(generator),
    }
    return model, _cross_entropy(inputs, labels=_tokens(generator))


def unet(attention: Attention = "sdpa", seed: int = 0) -> Model:
    """One denoising step; its attention is always PyTorch's `scaled_dot_product_attention`."""
    with _seeded(seed):
        model = UNet.tiny().double().train()
    generator = torch.Generator().manual_seed(seed)
    images, noise = torch.randn(2, BATCH, 2, 8, 8, generator=generator, dtype=torch.float64)
    times = torch.tensor([3.0, 40.0], dtype=torch.float64)

    def loss(model: nn.Module) -> Tensor:
        device = next(model.parameters()).device
        guess = model((images + noise).to(device), times.to(device))
        return F.mse_loss(guess, noise.to(device))

    return model, loss


MODELS: dict[str, Callable[..., Model]] = {
    build.__name__: build for build in (gpt2, bert, llama, qwen3, mixtral, t5, vit, whisper, unet)
}

_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
# The defaults of some models lie outside so small a vocabulary.
_ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attention_dropout": 0.1,  # the only dropout in this family
    "use_cache": False,
}


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """A block with the global generator at `seed`, put back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _build(
    kind: type[nn.Module], config: Any, attention: Attention, seed: int
) -> tuple[nn.Module, torch.Generator]:
    """A model of this configuration, and the generator to draw its inputs from."""
    config._attn_implementation = attention
    with _seeded(seed):
        model = kind(config).double().train()
    return model, torch.Generator().manual_seed(seed)


def _language_model(kind: type[nn.Module], config: Any, attention: Attention, seed: int) -> Model:
    model, generator = _build(kind, config, attention, seed)
    return model, _cross_entropy({"input_ids": _tokens(generator)}, labels=_tokens(generator))


def _cross_entropy(inputs: dict[str, Tensor], labels: Tensor) -> Loss:
    """Our own loss on the model's logits: transformers' would convert them to float32."""

    def loss(model: nn.Module) -> Tensor:
        device = next(model.parameters()).device
        outputs = model(**{name: value.to(device) for name, value in inputs.items()})
        total = F.cross_entropy(outputs.logits.flatten(0, -2), labels.flatten().to(device))
        if getattr(outputs, "aux_loss", None) is not None:
            total = total + 0.01 * outputs.aux_loss
        return total

    return loss


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)


def _padding_mask() -> Tensor:
    """All of the first sequence, all but the last two positions of the second."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0
    return mask
