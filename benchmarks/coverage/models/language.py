"""Language models of transformers: decoders, encoders, and encoders with decoders."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.coverage.case import BATCH, Case, Cases
from placer.sources.huggingface import WITHOUT_HUB

TOKENS: Final = 12
WORDS: Final = 99
FIRST_WORD: Final = 3
"""Words before are for padding, and for the begin and end of a text."""

SMALL: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size"), WORDS),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "hidden_dim", "d_ff", "d_inner"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "feed_forward_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers",), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "attention_head_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "rotary_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes, where a configuration has a field of this name."""

CAUSAL: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {},
    "mistral": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "qwen2": {},
    "qwen3": {},
    "phi": {},
    "phi3": {},
    "gpt2": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {},
    "gptj": {},
    "gpt_bigcode": {},
    "codegen": {},
    "opt": {"word_embed_proj_dim": 32},
    "bloom": {},
    "falcon": {},
    "mpt": {},
    "stablelm": {},
    "starcoder2": {},
    "olmo": {},
    "olmo2": {},
    "cohere": {},
    "granite": {},
    "glm": {},
    "persimmon": {},
    "biogpt": {},
    "xglm": {"attention_heads": 4, "num_layers": 2},
    "ctrl": {"dff": 64},
    "smollm3": {},
    "nemotron": {},
    "helium": {},
    "openai-gpt": {},
    "xlnet": {},
    "mamba": {},
    "mamba2": {"head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "rwkv": {},
    "recurrent_gemma": {"lru_width": 32, "num_hidden_layers": 3},
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "olmoe": {},
    "granitemoe": {},
    "gpt_oss": {},
    "phimoe": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "deepseek_v3": {
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "head_dim": 4,
    },
}
MASKED: Final[Mapping[str, Mapping[str, Any]]] = {
    "bert": {},
    "roberta": {},
    "distilbert": {},
    "albert": {},
    "electra": {},
    "deberta": {},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "mpnet": {},
    "xlm": {},
    "xlm-roberta": {},
    "squeezebert": {},
    "mobilebert": {"intra_bottleneck_size": 16, "hidden_size": 32},
    "funnel": {"block_sizes": [1, 1]},
    "fnet": {},
    "nystromformer": {"num_landmarks": 4, "segment_means_seq_len": TOKENS},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 16},
    "roformer": {},
    "big_bird": {"attention_type": "original_full"},
    "convbert": {},
    "ibert": {},
    "longformer": {"attention_window": 4},
    "modernbert": {"cls_token_id": 1, "sep_token_id": 2},
    "esm": {"mask_token_id": 3},
}
SEQUENCES: Final[Mapping[str, Mapping[str, Any]]] = {
    "t5": {"decoder_start_token_id": 0},
    "mt5": {},
    "umt5": {},
    "longt5": {"local_radius": 4, "decoder_start_token_id": 0},
    "switch_transformers": {
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "decoder_start_token_id": 0,
    },
    "bart": {},
    "mbart": {},
    "pegasus": {},
    "marian": {"decoder_start_token_id": 0},
    "blenderbot": {},
    "blenderbot-small": {},
    "m2m_100": {},
    "led": {"attention_window": 4},
    "plbart": {},
    "prophetnet": {},
}


def transformers() -> Any:
    os.environ |= WITHOUT_HUB
    return import_module("transformers")


def configuration(kind: str, **fields: Any) -> Any:
    """Return the configuration of a type of models with small sizes and without dropout."""
    maker = transformers().CONFIG_MAPPING[kind]
    known = maker().to_dict()
    sizes = {name: value for name, value in SMALL.items() if name in known}
    dropped = {
        name: 0.0 for name, value in known.items() if "drop" in name and isinstance(value, float)
    }
    return maker(**{**sizes, **dropped, **fields})


def automatic(head: str, kind: str, fields: Mapping[str, Any]) -> nn.Module:
    """Return a model by an Auto class of transformers, with random weights."""
    model: nn.Module = getattr(transformers(), head).from_config(configuration(kind, **fields))
    return model


def words() -> Tensor:
    return torch.randint(FIRST_WORD, WORDS, (BATCH, TOKENS))


def _text(training: bool) -> dict[str, Tensor]:
    tokens = words()
    return {"input_ids": tokens, "labels": tokens} if training else {"input_ids": tokens}


def _masked(training: bool) -> dict[str, Tensor]:
    return _text(training) | {"attention_mask": torch.ones(BATCH, TOKENS, dtype=torch.int64)}


def _sequences(training: bool) -> dict[str, Tensor]:
    second = "labels" if training else "decoder_input_ids"
    return {"input_ids": words(), second: words()}


def _cases(
    head: str,
    kinds: Mapping[str, Mapping[str, Any]],
    inputs: Callable[[bool], dict[str, Tensor]],
) -> dict[str, Case]:
    return {
        kind: Case(partial(automatic, head, kind, fields), inputs, loss=None)
        for kind, fields in kinds.items()
    }


CASES: Final[Cases] = {
    **_cases("AutoModelForCausalLM", CAUSAL, _text),
    **_cases("AutoModelForMaskedLM", MASKED, _masked),
    **_cases("AutoModelForSeq2SeqLM", SEQUENCES, _sequences),
}
