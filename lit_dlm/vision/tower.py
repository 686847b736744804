"""Pictures as rows of a vision tower, as LLaDA-V has them (arXiv:2505.16933).

Each row has an id beyond the vocabulary and is kept in a table, from which the forward reads the
embedding of such an id. A picture's rows stay there until all prompts with it are released.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import SiglipVisionConfig, SiglipVisionModel

from lit_dlm.vision.anyres import AnyRes
from lit_dlm.vision.base import Vision, VisionSettings
from lit_dlm.vision.pictures import IMAGE_MARK, Picture

_RELEASED_NAMES = {
    "tower.": "model.vision_tower.vision_tower.vision_model.",
    "projector.": "model.mm_projector.",
    "newline": "model.image_newline",
}
"""Maps parts of :class:`TowerVision` to their names in LLaDA-V's files."""
_SUPPORTED = {
    "mm_projector_type": r"mlp2x_gelu",
    "mm_patch_merge_type": r"spatial_unpad|None",
    "mm_vision_tower": r".*siglip.*",
    "image_aspect_ratio": r"anyres_max_\d+|None",
}
"""Supported values of options in LLaDA-V's ``config.json``, as patterns."""
_SIGLIP2 = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}
"""SigLIP2 so400m with patches of 14, the release's tower."""
_CACHED_PICTURES = 32
"""Most pictures for which the device keeps the output of a frozen tower: about 8 MB for a picture
of five tiles in bfloat16."""


@dataclass
class _Entry:
    """A picture in the table."""

    first: int
    """Its first row in the table."""
    picture: Picture
    num_rows: int
    tiles: Tensor | None
    """``(T, 3, S, S)`` on the host, float32, until the tower has looked at them."""
    version: int | None = None
    """Version of the weights that made its rows in the table."""


class TowerVision(Vision):
    """Shows a picture as rows of SigLIP, mapped by a projector.

    The output of a frozen tower for a picture is kept for all responses, states and steps, as long
    as there is room; rows are made again when weights have changed. A training batch has rows of
    its own, made in each forward.
    """

    _table: Tensor
    forward_methods = ("rows",)
    before_text = f"{IMAGE_MARK}\n"

    def __init__(self, settings: VisionSettings, config: Mapping[str, Any]) -> None:
        """Builds the tower of LLaDA-V's ``config.json`` with random weights.

        A ``vision_config`` in it, which the release does not have, gives the tower other sizes.
        """
        super().__init__(settings, vocab_size=config["vocab_size"])
        for option, pattern in _SUPPORTED.items():
            if not re.fullmatch(pattern, str(config.get(option))):
                raise ValueError(
                    f"config.json: option {option}={config.get(option)!r} is not supported for "
                    f"pictures, expected {pattern}"
                )
        width = config["hidden_size"]
        sizes = _SIGLIP2 | (config.get("vision_config") or {})
        # Without the pooling head and without the last of 27 layers: LLaVA reads the one before.
        self.tower = SiglipVisionModel(SiglipVisionConfig(**sizes, vision_use_head=False))
        self.projector = nn.Sequential(
            nn.Linear(sizes["hidden_size"], width), nn.GELU(), nn.Linear(width, width)
        )
        self.newline = nn.Parameter(torch.randn(width) * width**-0.5)
        # A text such as "(1x1),...,(6x6)", or sizes in pixels, one for each pair of sides.
        grids = config.get("image_grid_pinpoints") or "(1x1),...,(6x6)"
        sides = {side for pair in grids for side in pair} if isinstance(grids, list) else ()
        self.scheme = AnyRes(
            tile=sizes["image_size"],
            per_side=sizes["image_size"] // sizes["patch_size"],
            max_tiles=int((config.get("image_aspect_ratio") or "anyres_max_4").rpartition("_")[2]),
            most_across=len(sides) or int(re.findall(r"\d+", grids)[-1]),
        )
        self.register_buffer("_table", torch.empty(0, width), persistent=False)
        self._entries: dict[str, _Entry] = {}
        self._held: Counter[str] = Counter()
        self._features: OrderedDict[str, Tensor] = OrderedDict()
        self.requires_grad_(settings.train == "all")
        self.tower.post_layernorm.requires_grad_(False)  # not run
        if settings.train == "projector":
            self.projector.requires_grad_(True)
            self.newline.requires_grad_(True)

    def picture_ids(self, picture: Picture) -> list[int]:
        """Returns ids of the picture's rows, which stay until released as often as requested."""
        entry = self._entries.get(picture.digest)
        if entry is None:
            num_rows = self.num_ids(picture)
            tiles = self.scheme.tiles(picture.decoded())
            entry = _Entry(self._free_room(num_rows), picture, num_rows, tiles)
            self._entries[picture.digest] = entry
        self._held[picture.digest] += 1
        start = self.vocab_size + entry.first
        return list(range(start, start + entry.num_rows))

    def num_ids(self, picture: Picture) -> int:
        return self.scheme.num_rows(picture.size)

    def join(self, pieces: Sequence[Sequence[int]], pictures: Sequence[list[int]]) -> list[int]:
        ids = list(pieces[0])
        for picture, piece in zip(pictures, pieces[1:], strict=True):
            ids += [*picture, *piece]
        return ids

    def stored_weights(self) -> dict[str, nn.Parameter]:
        weights = {}
        for name, parameter in self.named_parameters():
            ours, theirs = next(p for p in _RELEASED_NAMES.items() if name.startswith(p[0]))
            weights[theirs + name.removeprefix(ours)] = parameter
        return weights

    def release(self, ids: Iterable[int]) -> None:
        # A prompt contains all rows of a picture, so finding the first row is enough.
        starts = {self.vocab_size + entry.first: digest for digest, entry in self._entries.items()}
        for digest in filter(None, map(starts.get, ids)):
            self._held[digest] = max(self._held[digest] - 1, 0)

    def embed(
        self, ids: Tensor, embed_words: Callable[[Tensor], Tensor], pictures: Sequence[str] | None
    ) -> Tensor:
        # Ids beyond the vocabulary have no row in the table of words; what is read there instead is
        # replaced below. Both ways run for the whole canvas: nothing waits for the host.
        words = embed_words(ids.clamp_max(self.vocab_size - 1))
        table = self.rows(pictures)
        if not len(table):
            return words
        rows = table.to(words.dtype)[(ids - self.vocab_size).clamp(0, len(table) - 1)]
        return torch.where((ids >= self.vocab_size)[..., None], rows, words)

    def rows(self, pictures: Sequence[str] | None = None) -> Tensor:
        """Returns rows ``(R, D)`` of pictures by digest, then a row of zeros.

        They are differentiable if they are trained. ``None``: the updated table of those in use.
        """
        if pictures is None:
            return self._updated_table()
        none = self.newline.new_zeros(1, len(self.newline))
        if not pictures and self.settings.train != "none":
            # Every process must run the trained weights and have gradients, even without pictures.
            side = self.scheme.tile
            black = self._look_at(torch.zeros(2, 3, side, side))
            none = none + 0.0 * self._projected(black, (side, side)).sum()
        known = [self.known_picture(digest) for digest in pictures]
        return torch.cat([*self._rows_of(known), none])

    @torch.no_grad()
    @torch.inference_mode(mode=False)
    def _updated_table(self) -> Tensor:
        # Torch counts changes in place: an optimiser's step makes all rows stale.
        version = sum(parameter._version for parameter in self.parameters())
        # Those of released pictures wait: most never come back, and their room may be taken.
        stale = [
            entry
            for digest, entry in self._entries.items()
            if self._held[digest] > 0 and entry.version != version
        ]
        tiles = {entry.picture.digest: entry.tiles for entry in stale if entry.tiles is not None}
        made = self._rows_of([entry.picture for entry in stale], tiles)
        for entry, rows in zip(stale, made, strict=True):
            self._table[entry.first : entry.first + entry.num_rows] = rows.to(self._table.dtype)
            entry.tiles, entry.version = None, version
        return self._table

    def _rows_of(
        self, pictures: Sequence[Picture], tiles: Mapping[str, Tensor] | None = None
    ) -> list[Tensor]:
        """Returns each picture's rows, new ones by one forward; ``tiles`` are some of theirs."""
        tiles = tiles or {}
        kept = self._features
        features = {one.digest: kept[one.digest] for one in pictures if one.digest in kept}
        new = {one.digest: one for one in pictures if one.digest not in features}
        if new:
            parts = [
                tiles[digest] if digest in tiles else self.scheme.tiles(one.decoded())
                for digest, one in new.items()
            ]
            seen = self._look_at(torch.cat(parts)).split([len(part) for part in parts])
            features |= dict(zip(new, seen, strict=True))
        # What the tower makes of a picture changes only with the tower; the projector runs anew.
        if self.settings.train != "all":
            kept |= features
            for digest in features:
                kept.move_to_end(digest)
            while len(kept) > _CACHED_PICTURES:
                kept.popitem(last=False)
        return [self._projected(features[one.digest], one.size) for one in pictures]

    def _projected(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns the rows of a picture from the tower's output."""
        rows = self.projector(features.to(self.newline.dtype))
        return self.scheme.merged(rows, self.newline, size)

    def _look_at(self, tiles: Tensor) -> Tensor:
        """Returns the last layer's output for tiles, without SigLIP's final norm."""
        with (
            # Kept outputs may be used with gradients later, which inference tensors do not allow.
            torch.inference_mode(mode=False),
            torch.set_grad_enabled(torch.is_grad_enabled() and self.settings.train == "all"),
        ):
            weight = self.tower.embeddings.patch_embedding.weight
            tiles = tiles.clone().to(weight.device, weight.dtype)
            return self.tower.encoder(inputs_embeds=self.tower.embeddings(tiles)).last_hidden_state

    @torch.inference_mode(mode=False)
    def _free_room(self, num_rows: int) -> int:
        """Returns where a picture fits: free rows, those of released pictures, or new rows."""
        # First fit from the left. Rows of a picture stay together, as its ids are in order.
        at = 0
        for digest, entry in sorted(self._entries.items(), key=lambda item: item[1].first):
            if self._held[digest] <= 0:
                continue
            if entry.first - at >= num_rows:
                break
            at = entry.first + entry.num_rows
        end = at + num_rows
        # Released pictures keep their rows until these are needed: the next prompt may show them.
        for digest, entry in list(self._entries.items()):
            if entry.first < end and at < entry.first + entry.num_rows:
                del self._entries[digest], self._held[digest]
        if end > len(self._table):
            # Doubled, so that the table is rarely copied while prompts come in.
            grown = self._table.new_zeros(max(end, 2 * len(self._table)), self._table.shape[1])
            grown[: len(self._table)] = self._table
            self._table = grown
        return at
