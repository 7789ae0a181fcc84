"""Models of transformers for sound, images with text, time series and decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.coverage.case import BATCH, CLASSES, Case, Cases, classes
from benchmarks.coverage.models.images import PATCHES
from benchmarks.coverage.models.language import (
    TOKENS,
    WORDS,
    automatic,
    configuration,
    transformers,
    words,
)

SOUNDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "wav2vec2": {},
    "hubert": {},
    "wavlm": {},
    "unispeech": {},
    "data2vec-audio": {"conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2},
    "sew": {"squeeze_factor": 1},
}
CONVOLUTIONS: Final[Mapping[str, Any]] = {
    "conv_dim": [16, 16, 16],
    "conv_stride": [4, 4, 4],
    "conv_kernel": [8, 8, 8],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": WORDS,
    "apply_spec_augment": False,
}
SAMPLES: Final = 1200
FRAMES: Final = 24
MELS: Final = 16
PAST, FUTURE = 11, 4


def _recognizer(kind: str, fields: Mapping[str, Any]) -> Case:
    return Case(
        partial(automatic, "AutoModelForCTC", kind, {**CONVOLUTIONS, **fields}), _sound, loss=None
    )


def _sound(training: bool) -> dict[str, Tensor]:
    found = {"input_values": torch.randn(BATCH, SAMPLES)}
    return found | {"labels": torch.randint(3, WORDS, (BATCH, 3))} if training else found


def _spectrum(frames: int, training: bool) -> dict[str, Tensor]:
    found = {"input_features": torch.randn(BATCH, MELS, frames)}
    return found | {"labels" if training else "decoder_input_ids": words()}


def _frames(training: bool) -> dict[str, Tensor]:
    found = {"input_features": torch.randn(BATCH, FRAMES, MELS)}
    return found | {"labels" if training else "decoder_input_ids": words()}


def _contrastive(kind: str) -> nn.Module:
    layers = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text: dict[str, Any] = {
        **layers,
        "vocab_size": WORDS,
        "max_position_embeddings": TOKENS,
        "eos_token_id": 2,
    }
    text |= {"pad_token_id": 0, "bos_token_id": 1}
    if kind == "chinese_clip":
        text |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers().CONFIG_MAPPING[kind]
    sizes = {} if kind == "siglip" else {"projection_dim": 16}
    made = config(text_config=text, vision_config={**layers, **PATCHES}, **sizes)
    model: nn.Module = transformers().AutoModel.from_config(made)
    return model


def _pairs(training: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "input_ids": words(),
        "pixel_values": torch.randn(BATCH, 3, 32, 32),
        "attention_mask": torch.ones(BATCH, TOKENS, dtype=torch.int64),
    }
    return found | {"return_loss": True} if training else found


def _question(training: bool) -> dict[str, Tensor]:
    return {
        "input_ids": words(),
        "attention_mask": torch.ones(BATCH, TOKENS, dtype=torch.int64),
        "token_type_ids": torch.zeros(BATCH, TOKENS, dtype=torch.int64),
        "visual_embeds": torch.randn(BATCH, 5, 24),
    }


def _patches(training: bool) -> dict[str, Tensor]:
    found = {"past_values": torch.randn(BATCH, 32, 2)}
    return found | {"future_values": torch.randn(BATCH, FUTURE, 2)} if training else found


def _forecaster(kind: str) -> nn.Module:
    config = configuration(
        kind,
        prediction_length=FUTURE,
        context_length=PAST - 3,
        lags_sequence=[1, 2, 3],
        num_time_features=1,
        **({"label_length": 2, "moving_average": 3} if kind == "autoformer" else {}),
    )
    names = {
        "time_series_transformer": "TimeSeriesTransformerForPrediction",
        "informer": "InformerForPrediction",
        "autoformer": "AutoformerForPrediction",
    }
    model: nn.Module = getattr(transformers(), names[kind])(config)
    return model


def _series(training: bool) -> dict[str, Tensor]:
    return {
        "past_values": torch.randn(BATCH, PAST),
        "past_time_features": torch.randn(BATCH, PAST, 1),
        "past_observed_mask": torch.ones(BATCH, PAST),
        "future_values": torch.randn(BATCH, FUTURE),
        "future_time_features": torch.randn(BATCH, FUTURE, 1),
    }


def _decisions(training: bool) -> dict[str, Tensor]:
    return {
        "states": torch.randn(BATCH, 5, 4),
        "actions": torch.randn(BATCH, 5, 3),
        "rewards": torch.randn(BATCH, 5, 1),
        "returns_to_go": torch.randn(BATCH, 5, 1),
        "timesteps": torch.arange(5).expand(BATCH, 5).contiguous(),
        "attention_mask": torch.ones(BATCH, 5, dtype=torch.int64),
    }


def _made(name: str, kind: str, **fields: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: nn.Module = getattr(transformers(), name)(configuration(kind, **fields))
        return model

    return make


CASES: Final[Cases] = {
    **{kind: _recognizer(kind, fields) for kind, fields in SOUNDS.items()},
    **{
        kind: Case(partial(_contrastive, kind), _pairs, loss=None)
        for kind in ("clip", "siglip", "chinese_clip")
    },
    **{
        kind: Case(partial(_forecaster, kind), _series, loss=None)
        for kind in ("time_series_transformer", "informer", "autoformer")
    },
    "whisper": Case(
        partial(
            automatic,
            "AutoModelForSpeechSeq2Seq",
            "whisper",
            {
                "num_mel_bins": MELS,
                "max_source_positions": FRAMES,
                "max_target_positions": TOKENS,
                "decoder_start_token_id": 1,
            },
        ),
        partial(_spectrum, 2 * FRAMES),
        loss=None,
    ),
    "speech_to_text": Case(
        partial(
            automatic,
            "AutoModelForSpeechSeq2Seq",
            "speech_to_text",
            {
                "input_feat_per_channel": MELS,
                "conv_channels": 32,
                "max_source_positions": 2 * FRAMES,
                "max_target_positions": 2 * TOKENS,
            },
        ),
        _frames,
        loss=None,
    ),
    "audio-spectrogram-transformer": Case(
        partial(
            automatic,
            "AutoModelForAudioClassification",
            "audio-spectrogram-transformer",
            {
                "num_mel_bins": MELS,
                "max_length": FRAMES,
                "patch_size": 4,
                "frequency_stride": 4,
                "time_stride": 4,
                "num_labels": CLASSES,
            },
        ),
        lambda training: {
            "input_values": torch.randn(BATCH, FRAMES, MELS),
            **({"labels": classes()} if training else {}),
        },
        loss=None,
    ),
    "visual_bert": Case(
        _made("VisualBertModel", "visual_bert", visual_embedding_dim=24), _question
    ),
    "patchtst": Case(
        _made(
            "PatchTSTForPrediction",
            "patchtst",
            num_input_channels=2,
            context_length=32,
            patch_length=4,
            patch_stride=4,
            prediction_length=FUTURE,
        ),
        _patches,
        loss=None,
    ),
    "patchtsmixer": Case(
        _made(
            "PatchTSMixerForPrediction",
            "patchtsmixer",
            num_input_channels=2,
            context_length=32,
            patch_length=4,
            patch_stride=4,
            prediction_length=FUTURE,
        ),
        _patches,
        loss=None,
    ),
    "decision_transformer": Case(
        _made("DecisionTransformerModel", "decision_transformer", state_dim=4, act_dim=3, n_head=1),
        _decisions,
    ),
}
