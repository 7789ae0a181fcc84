"""Tiny transformer models, as targets and as steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from graphs.extract import Workload
from placer.sources import huggingface

COMMON = "batch=2&sequence=8&vocab_size=31"
LLAMA = "hidden_size=16&intermediate_size=24&num_hidden_layers=2&num_attention_heads=2"
TARGETS = {
    "bert": f"hf:bert?{COMMON}&hidden_size=16&num_hidden_layers=2&num_attention_heads=2"
    "&intermediate_size=24",
    "distilbert": f"hf:distilbert?{COMMON}&dim=16&n_layers=2&n_heads=2&hidden_dim=24",
    "gpt2": f"hf:gpt2?{COMMON}&n_embd=16&n_layer=2&n_head=2",
    "t5": f"hf:t5?{COMMON}&d_model=16&d_kv=8&d_ff=24&num_layers=2&num_heads=2",
    "llama": f"hf:llama?{COMMON}&{LLAMA}&num_key_value_heads=1",
    "mixtral": f"hf:mixtral?{COMMON}&{LLAMA}&num_key_value_heads=1&num_local_experts=4",
}
MIXTURES = {
    "qwen2_moe": f"hf:qwen2_moe?{COMMON}&{LLAMA}&num_key_value_heads=2&moe_intermediate_size=8"
    "&shared_expert_intermediate_size=16&num_experts=4&num_experts_per_tok=2",
    "deepseek_v3": f"hf:deepseek_v3?{COMMON}&{LLAMA}&num_key_value_heads=2&moe_intermediate_size=8"
    "&n_routed_experts=4&n_group=2&topk_group=1&num_experts_per_tok=2&q_lora_rank=8"
    "&kv_lora_rank=8&qk_rope_head_dim=4&qk_nope_head_dim=4&v_head_dim=8&first_k_dense_replace=1",
    "mixtral": TARGETS["mixtral"],
}
OTHERS = {
    "vit": "hf:vit?batch=2&image_size=8&patch_size=4&hidden_size=16&num_hidden_layers=1"
    "&num_attention_heads=2&intermediate_size=24&num_labels=3",
    "resnet": "hf:resnet?batch=2&image_size=16&embedding_size=4&hidden_sizes=[8,8]&depths=[1,1]"
    "&layer_type=basic&num_labels=3",
    "whisper": f"hf:whisper?{COMMON}&d_model=16&num_mel_bins=4&max_source_positions=6"
    "&max_target_positions=8&encoder_layers=1&decoder_layers=1&encoder_attention_heads=2"
    "&decoder_attention_heads=2&encoder_ffn_dim=24&decoder_ffn_dim=24&pad_token_id=0"
    "&decoder_start_token_id=1",
}
WITHOUT_DROPOUT = {
    "bert": "&hidden_dropout_prob=0.0&attention_probs_dropout_prob=0.0",
    "distilbert": "&dropout=0.0&attention_dropout=0.0",
    "gpt2": "&resid_pdrop=0.0&embd_pdrop=0.0&attn_pdrop=0.0",
    "t5": "&dropout_rate=0.0",
}


def load(target: str, *, training: bool = True) -> Workload:
    return huggingface.load(huggingface.Request.parse(target), training=training)


def without_dropout(name: str, *, training: bool = True) -> Workload:
    return load(TARGETS[name] + WITHOUT_DROPOUT.get(name, ""), training=training)


STEPS: dict[str, Callable[[], Workload]] = {
    name: partial(load, target) for name, target in TARGETS.items()
}
