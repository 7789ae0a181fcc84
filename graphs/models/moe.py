"""Mixture-of-experts decoder shaped like Mixtral (Jiang et al., arXiv 2401.04088, section 2).

Every expert computes every token, and the weights of the router, zero for all but the chosen
experts, do the routing: no shape depends on data, so the model can be exported and placed. It takes
``experts / chosen`` times the FLOPs of a sparse evaluation and gives the same numbers.

Modules go by the names of the published weights: ``layers.0.self_attn.q_proj``,
``layers.0.block_sparse_moe.experts.0.w1``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphs.models.rnnlm import next_token_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Sizes of the decoder, by default those of Mixtral-8x7B.

    ``stacked`` keeps the experts of a layer in one weight [experts, ...], computed by batched
    matrix products; otherwise each is a module of its own, and they can be placed one by one.
    """

    vocabulary: int = 32_000
    hidden: int = 4096
    intermediate: int = 14_336
    layers: int = 32
    heads: int = 32
    key_value_heads: int = 8
    experts: int = 8
    chosen: int = 2
    rotary_base: float = 1e6
    norm_epsilon: float = 1e-5
    stacked: bool = False


class Rotary(nn.Module):
    """Angles of the rotary position embedding (Su et al., arXiv 2104.09864)."""

    def __init__(self, features: int, base: float) -> None:
        super().__init__()
        self.features = features
        self.base = base

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, (T, features) each, for hidden states (B, T, hidden)."""
        even = torch.arange(0, self.features, 2, device=x.device, dtype=torch.float32)
        position = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        angle = torch.outer(position, self.base ** (-even / self.features)).repeat(1, 2)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class SelfAttention(nn.Module):
    """Causal attention; groups of heads share a key and a value."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.head_features = config.hidden // config.heads
        shared = config.key_value_heads * self.head_features
        self.q_proj = nn.Linear(config.hidden, config.hidden, bias=False)
        self.k_proj = nn.Linear(config.hidden, shared, bias=False)
        self.v_proj = nn.Linear(config.hidden, shared, bias=False)
        self.o_proj = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Map (B, T, hidden), with angles (T, head features), to (B, T, hidden)."""
        query = _rotated(self._heads(self.q_proj(x)), cosine, sine)
        key = _rotated(self._heads(self.k_proj(x)), cosine, sine)
        value = self._heads(self.v_proj(x))
        group = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(group, 1) for part in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_features).transpose(1, 2)


class Expert(nn.Module):
    """A gated feed-forward network: ``w2(silu(w1(x)) * w3(x))``."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.w2 = nn.Linear(config.intermediate, config.hidden, bias=False)
        self.w3 = nn.Linear(config.hidden, config.intermediate, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, hidden) to (N, hidden)."""
        output: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return output


class SeparateExperts(nn.ModuleList):
    """The experts of a layer, one module each."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(Expert(config) for _ in range(config.experts))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Add up the experts' outputs (N, hidden) for x (N, hidden) by weights (N, experts)."""
        parts = [
            expert(x) * weight.unsqueeze(1)
            for expert, weight in zip(self, weights.unbind(1), strict=True)
        ]
        return torch.stack(parts).sum(0)


class StackedExperts(nn.Module):
    """The experts of a layer in one weight per matrix, expert by expert, as in `Expert`."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        experts, hidden, intermediate = config.experts, config.hidden, config.intermediate
        self.w1 = nn.Parameter(torch.empty(experts, intermediate, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, intermediate))
        self.w3 = nn.Parameter(torch.empty(experts, intermediate, hidden))
        for weight in self.parameters():
            bound = weight.shape[2] ** -0.5  # as nn.Linear does
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Add up the experts' outputs (N, hidden) for x (N, hidden) by weights (N, experts)."""
        gate, up = (torch.matmul(x, weight.transpose(1, 2)) for weight in (self.w1, self.w3))
        outputs = torch.bmm(F.silu(gate) * up, self.w2.transpose(1, 2))
        return (outputs * weights.t().unsqueeze(2)).sum(0)


class SparseMoe(nn.Module):
    """The router and the experts of a layer."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.chosen = config.chosen
        self.gate = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = StackedExperts(config) if config.stacked else SeparateExperts(config)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, hidden) to (B, T, hidden)."""
        tokens = x.flatten(0, 1)
        output: Tensor = self.experts(tokens, self.route(tokens))
        return output.view_as(x)

    def route(self, tokens: Tensor) -> Tensor:
        """Return weights (N, experts) for tokens (N, hidden): softmax over the chosen experts."""
        scores: Tensor = self.gate(tokens)
        best, experts = scores.topk(self.chosen, 1)
        nothing = torch.zeros_like(scores)
        return nothing.scatter(1, experts, best.softmax(1))


class DecoderLayer(nn.Module):
    """Attention, then experts, each with a norm before it and a residual connection."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden, config.norm_epsilon)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, config.norm_epsilon)
        self.block_sparse_moe = SparseMoe(config)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Map (B, T, hidden), with angles (T, head features), to (B, T, hidden)."""
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        mixed: Tensor = x + self.block_sparse_moe(self.post_attention_layernorm(x))
        return mixed


class Moe(nn.Module):
    """The decoder: 46,702,792,704 parameters at the published sizes."""

    def __init__(self, config: MoeConfig | None = None) -> None:
        super().__init__()
        config = config or MoeConfig()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.rotary = Rotary(config.hidden // config.heads, config.rotary_base)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, config.norm_epsilon)
        self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, T) to logits (B, T, vocabulary) of the next token."""
        x = self.embed_tokens(tokens)
        cosine, sine = self.rotary(x)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def stack_experts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the state of a model with separate experts to that with stacked experts."""
    stacked: dict[str, Tensor] = {}
    experts: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, tensor in state.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(w[123])\.weight", name):
            experts[f"{match[1]}.{match[3]}"][int(match[2])] = tensor
        else:
            stacked[name] = tensor
    for name, parts in experts.items():
        stacked[name] = torch.stack([parts[number] for number in sorted(parts)])
    return stacked


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair of features (i, i + F / 2) of heads (B, heads, T, F) by its angle."""
    first, second = x.chunk(2, 3)
    return x * cosine + torch.cat([-second, first], 3) * sine


def build(*, stacked: bool = False) -> tuple[Moe, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """Return a small model, (tokens, next tokens) of two texts of 64 tokens, and the loss."""
    torch.manual_seed(0)
    config = MoeConfig(
        vocabulary=4000,
        hidden=256,
        intermediate=512,
        layers=4,
        heads=8,
        key_value_heads=2,
        stacked=stacked,
    )
    model = Moe(config).train()
    text = torch.randint(config.vocabulary, (2, 64 + 1))
    return model, (text[:, :-1].contiguous(), text[:, 1:].contiguous()), next_token_loss


def build_stacked() -> tuple[Moe, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """Return the same with the experts of a layer in one weight."""
    return build(stacked=True)
