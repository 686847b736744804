"""A small LLaDA-V and its pictures, for tests of what sees."""

import io
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lit_dlm.backbones.resolution import resolve
from lit_dlm.vision.pictures import Picture
from tests.backbones.folders import write
from tests.twins import file_shapes, tower_shapes

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
SMALL = {**CONFIG["vision_config"], "image_size": 6}  # nine rows a tile


def waves(name: str, shape: Sequence[int]) -> Tensor:
    """A parameter's values without a random generator: about 1 for norms, small for others."""
    count = torch.Size(shape).numel()
    start = zlib.crc32(name.encode()) % 10_000
    values = torch.sin(start + 12.9898 * torch.arange(count, dtype=torch.float64) ** 1.1)
    if "norm" in name and name.endswith("weight"):
        values = 1.0 + 0.2 * values
    elif len(shape) > 1:
        values = values * 1.5 / torch.Size(shape[1:]).numel() ** 0.5
    else:
        values = 0.1 * values
    return values.float().reshape(tuple(shape))


def png(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(width: int, height: int) -> Picture:
    """A PNG of coloured waves."""
    y, x = np.mgrid[:height, :width]
    planes = [(x * 7 + y * 3) % 256, (x * y) % 256, (x * x + 3 * y) % 256]
    return Picture(png(Image.fromarray(np.stack(planes, -1).astype(np.uint8))))


def write_seeing(folder: Path, **changes: Any) -> Path:
    """Writes a model whose weights are waves, with changes of its configuration."""
    config = {**CONFIG, **changes}
    shapes = file_shapes(resolve(config)) | tower_shapes(config)
    return write(folder, config, {name: waves(name, shape) for name, shape in shapes.items()})
