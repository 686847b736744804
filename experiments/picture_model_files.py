"""Makes the files beside the weights of the embedded picture model, from scikit-learn's digits.

The codebook holds black, the patches of drawn shapes, and k-means centres of the 2 x 2 patches of
training digits. The classifier that judges drawn digits is scikit-learn's MLPClassifier, fitted
to training digits. Needs ``pip install 'scikit-learn>=1.5'``; takes about half a minute.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import numpy as np
import torch
from embedded_tokenizer import build_tokenizer
from PIL import Image
from safetensors.torch import save_file

from lit_dlm.toy.pictures import (
    COLOURS,
    FOLDER,
    SHAPES,
    SIDE,
    DigitDrawings,
    PictureQuestions,
    digits,
    draw_shapes,
    split_of,
)
from lit_dlm.vision.patches import CODEBOOK, PatchTokenizer

NUM_GREY = 128


def patches_of(pictures: np.ndarray) -> np.ndarray:
    """``(N, 8, 8, 3)`` pictures as ``(16 N, 2, 2, 3)``."""
    cells = pictures.reshape(-1, SIDE // 2, 2, SIDE // 2, 2, 3)
    return cells.transpose(0, 1, 3, 2, 4, 5).reshape(-1, 2, 2, 3)


def codebook() -> np.ndarray:
    """Returns the patches of the codebook, ``(C, 2, 2, 3)`` uint8."""
    from sklearn.cluster import KMeans

    drawn = [
        draw_shapes([(0, down, across, colour, shape)])
        for colour, shape, down, across in product(COLOURS, SHAPES, (0, 1), (0, 1))
    ]
    exact = np.unique(patches_of(np.stack(drawn)).reshape(-1, 12), axis=0)
    grey = np.stack([one for one, _ in digits("train")])
    flat = patches_of(np.repeat(grey[..., None], 3, axis=3))[..., 0].reshape(-1, 4)
    means = KMeans(NUM_GREY, n_init=3, random_state=0).fit(flat.astype(float)).cluster_centers_
    centres = np.repeat(means.round().astype(np.uint8)[..., None], 3, axis=2).reshape(-1, 12)
    # Patches of digits are sorted by brightness; black is among the exact ones.
    centres = centres[np.argsort(centres.sum(1), kind="stable")]
    found = np.concatenate([exact, centres[centres.any(1)]])
    return found.reshape(-1, 2, 2, 3)


def sheet(split: str) -> Image.Image:
    """All digits of a held-out split, a row for each of 0 to 9."""
    from sklearn.datasets import load_digits

    stored = load_digits()
    grey = np.round(stored.images * 255 / 16).astype(np.uint8)
    rows: list[list[np.ndarray]] = [[] for _ in range(10)]
    for one, label in zip(grey, stored.target, strict=True):
        if split_of(one.tobytes()) == split:
            rows[label].append(one)
    tiles = np.zeros((10, SIDE, max(map(len, rows)), SIDE), np.uint8)
    for label, row in enumerate(rows):
        for place, one in enumerate(row):
            tiles[label, :, place] = one
    return Image.fromarray(tiles.reshape(10 * SIDE, -1))


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(codebook().reshape(-1, 2, 3)).save(folder / CODEBOOK, optimize=True)
    for split in ("validation", "test"):
        sheet(split).save(folder / f"digits-{split}.png", optimize=True)
    sources = [
        *(PictureQuestions(kind, "train") for kind in ("digit", "sum", "colour", "count")),
        DigitDrawings("train"),
    ]
    num_codes = PatchTokenizer(folder / CODEBOOK).num_codes
    tokenizer = build_tokenizer(sources, num_picture_tokens=num_codes)
    tokenizer.save_pretrained(str(folder))
    print(
        f"{num_codes} patches, {len(tokenizer)} tokens, the first of a picture "
        f"{tokenizer.convert_tokens_to_ids('<|p0|>')}"
    )

    from sklearn.neural_network import MLPClassifier

    inputs, labels = zip(*digits("train"), strict=True)
    model = MLPClassifier((64,), alpha=1e-2, max_iter=500, random_state=0)
    model.fit(np.stack(inputs).reshape(-1, SIDE * SIDE) / 255.0, labels)
    weights = {}
    for layer, (matrix, bias) in enumerate(zip(model.coefs_, model.intercepts_, strict=True)):
        weights[f"{2 * layer}.weight"] = torch.from_numpy(matrix.T.copy()).half()
        weights[f"{2 * layer}.bias"] = torch.from_numpy(bias).half()
    save_file(weights, folder / "classifier.safetensors")
    inputs, labels = zip(*digits("test"), strict=True)
    accuracy = model.score(np.stack(inputs).reshape(-1, SIDE * SIDE) / 255.0, labels)
    print(f"the classifier is right about {accuracy:.4f} of the test digits")


if __name__ == "__main__":
    main()
