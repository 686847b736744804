"""A small LLaDA-V and its pictures, for tests of what sees."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lit_dlm.backbones.resolution import resolve
from lit_dlm.vision.pictures import Picture
from tests.backbones.folders import write
from tests.twins import tower_shapes
from tests.vision.waves import waves

VOCAB, MASK = 120, 119
CONFIG: dict[str, Any] = {
    "model_type": "llava_llada",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "mask_token_id": MASK,
    "eos_token_id": 1,
    "mm_vision_tower": "google/siglip2-so400m-patch14-384",
    "mm_projector_type": "mlp2x_gelu",
    "mm_patch_merge_type": "spatial_unpad",
    "image_aspect_ratio": "anyres_max_4",
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 54,
        "patch_size": 2,
    },
}
SMALL = {**CONFIG["vision_config"], "image_size": 6}
"""A tower with nine rows a tile."""


def picture(width: int, height: int) -> Picture:
    """A PNG of coloured waves."""
    y, x = np.mgrid[:height, :width]
    planes = [(x * 7 + y * 3) % 256, (x * y) % 256, (x * x + 3 * y) % 256]
    file = io.BytesIO()
    Image.fromarray(np.stack(planes, -1).astype(np.uint8)).save(file, "PNG")
    return Picture(file.getvalue())


def write_seeing(folder: Path, **changes: Any) -> Path:
    """Writes a model whose weights are waves.

    Args:
        folder: created.
        changes: of the configuration, and of the tower's as ``vision_config``.
    """
    config = {**CONFIG, **changes}
    shapes = resolve(config).parameter_shapes() | tower_shapes(config)
    return write(folder, config, {name: waves(name, shape) for name, shape in shapes.items()})
