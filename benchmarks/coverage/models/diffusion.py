"""Models of diffusers: networks that remove noise, and autoencoders of images."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.coverage.case import BATCH, Case, Cases

SIZE: Final = 16


def _made(name: str, **fields: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: nn.Module = getattr(import_module("diffusers"), name)(**fields)
        return model

    return make


def _times() -> Tensor:
    return torch.randint(1000, (BATCH,))


def _noisy(channels: int, **others: tuple[int, ...]) -> Callable[[bool], dict[str, Tensor]]:
    """Return a function that makes noisy images, their times, and further tensors by name."""
    return lambda training: {
        "sample": torch.randn(BATCH, channels, SIZE, SIZE),
        "timestep": _times(),
        **{name: torch.randn(BATCH, *shape) for name, shape in others.items()},
    }


def _flux(training: bool) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(BATCH, 16, 4),
        "encoder_hidden_states": torch.randn(BATCH, 6, 32),
        "pooled_projections": torch.randn(BATCH, 32),
        "timestep": torch.rand(BATCH),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(6, 3),
    }


def _sd3(training: bool) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(BATCH, 4, SIZE, SIZE),
        "encoder_hidden_states": torch.randn(BATCH, 6, 32),
        "pooled_projections": torch.randn(BATCH, 64),
        "timestep": _times(),
    }


def _dit(training: bool) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(BATCH, 4, SIZE, SIZE),
        "timestep": _times(),
        "class_labels": torch.randint(8, (BATCH,)),
    }


def _text_to_image(training: bool) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(BATCH, 4, SIZE, SIZE),
        "encoder_hidden_states": torch.randn(BATCH, 6, 32),
    }


CONDITIONED: Final[dict[str, Any]] = {
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}
AUTOENCODER: Final[dict[str, Any]] = {
    "block_out_channels": (32, 64),
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
}
CASES: Final[Cases] = {
    "unet 2d": Case(
        _made(
            "UNet2DModel",
            sample_size=SIZE,
            in_channels=3,
            out_channels=3,
            layers_per_block=1,
            block_out_channels=(32, 64),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        _noisy(3),
    ),
    "unet 2d, conditioned": Case(
        _made(
            "UNet2DConditionModel",
            sample_size=SIZE,
            layers_per_block=1,
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            **CONDITIONED,
        ),
        _noisy(4, encoder_hidden_states=(6, 32)),
    ),
    "unet 3d": Case(
        _made(
            "UNet3DConditionModel",
            sample_size=SIZE,
            layers_per_block=1,
            norm_num_groups=32,
            block_out_channels=(32, 64),
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
            cross_attention_dim=32,
            attention_head_dim=8,
        ),
        lambda training: {
            "sample": torch.randn(BATCH, 4, 2, SIZE, SIZE),
            "timestep": _times(),
            "encoder_hidden_states": torch.randn(BATCH, 6, 32),
        },
    ),
    "controlnet": Case(
        _made(
            "ControlNetModel",
            layers_per_block=1,
            conditioning_embedding_out_channels=(8, 16),
            **CONDITIONED,
        ),
        lambda training: {
            **_noisy(4, encoder_hidden_states=(6, 32))(training),
            "controlnet_cond": torch.randn(BATCH, 3, 2 * SIZE, 2 * SIZE),
        },
    ),
    "autoencoder": Case(
        _made("AutoencoderKL", latent_channels=4, **AUTOENCODER),
        lambda training: {"sample": torch.randn(BATCH, 3, 32, 32)},
    ),
    "quantized autoencoder": Case(
        _made("VQModel", num_vq_embeddings=16, latent_channels=4, **AUTOENCODER),
        lambda training: {"sample": torch.randn(BATCH, 3, 32, 32)},
    ),
    "tiny autoencoder": Case(
        _made(
            "AutoencoderTiny",
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        ),
        lambda training: {"sample": torch.rand(BATCH, 3, 32, 32)},
    ),
    "dit": Case(
        _made(
            "DiTTransformer2DModel",
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=8,
            num_layers=1,
            sample_size=SIZE,
            num_embeds_ada_norm=8,
            norm_num_groups=4,
        ),
        _dit,
    ),
    "transformer 2d": Case(
        _made(
            "Transformer2DModel",
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            num_layers=1,
            norm_num_groups=4,
            cross_attention_dim=32,
        ),
        _text_to_image,
    ),
    "pixart": Case(
        _made(
            "PixArtTransformer2DModel",
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=8,
            num_layers=1,
            sample_size=SIZE,
            cross_attention_dim=32,
            caption_channels=32,
            use_additional_conditions=False,
        ),
        lambda training: {**_text_to_image(training), "timestep": _times()},
    ),
    "stable diffusion 3": Case(
        _made(
            "SD3Transformer2DModel",
            sample_size=SIZE,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            caption_projection_dim=32,
            joint_attention_dim=32,
            pooled_projection_dim=64,
            pos_embed_max_size=16,
        ),
        _sd3,
    ),
    "flux": Case(
        _made(
            "FluxTransformer2DModel",
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=[4, 4, 8],
        ),
        _flux,
    ),
    "prior": Case(
        _made(
            "PriorTransformer",
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=1,
            embedding_dim=16,
            num_embeddings=7,
            additional_embeddings=4,
        ),
        lambda training: {
            "hidden_states": torch.randn(BATCH, 16),
            "timestep": _times(),
            "proj_embedding": torch.randn(BATCH, 16),
            "encoder_hidden_states": torch.randn(BATCH, 7, 16),
        },
    ),
    "adapter": Case(
        _made("T2IAdapter", in_channels=3, channels=[8, 16], num_res_blocks=1, downscale_factor=2),
        lambda training: (torch.randn(BATCH, 3, 32, 32),),
    ),
}
