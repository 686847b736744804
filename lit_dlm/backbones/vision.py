"""Pictures in prompts: as rows of a vision tower (LLaDA-V) or as tokens (MMaDA).

Both turn the pictures of a prompt into ids among those of its words, so that canvases, caches,
padding, windows and batches know nothing of pictures. Those of a tower lie beyond the vocabulary:
each stands for one row of a table, which the forward reads where an id has no embedding. A table
row is there as long as something that was encoded is not released.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import SiglipVisionConfig, SiglipVisionModel

from lit_dlm.backbones.anyres import AnyRes
from lit_dlm.backbones.location import locate
from lit_dlm.backbones.magvit import Magvit
from lit_dlm.backbones.patches import CODEBOOK, PatchTokenizer
from lit_dlm.backbones.resolution import read_added_tokens, resolve
from lit_dlm.pictures import PLACE, Picture, PictureFolder


@dataclass(frozen=True, kw_only=True)
class VisionSettings:
    """How a backbone sees."""

    train: Literal["none", "projector", "all"] = "none"
    """What of the tower is trained: nothing, the projector that maps it to the decoder, or both."""
    path: str | None = None
    """Weights of the picture tokenizer where the model's own folder has none (MMaDA:
    ``showlab/magvitv2``)."""
    resolution: int | None = None
    """Pixels on each side of a picture that becomes tokens; by default 512 with MAGVIT-v2."""
    max_pictures: int = 16
    """Most pictures in a prompt."""


class Vision(nn.Module):
    """Pictures to ids, and ids to embeddings."""

    def __init__(self, settings: VisionSettings) -> None:
        super().__init__()
        self.settings = settings
        self.folders: list[PictureFolder] = []
        """Where pictures of records are looked for."""
        self.known: dict[str, Picture] = {}
        """Pictures of samples that are trained on, by digest."""

    place = ""
    """What goes before the text for each picture that has no place in it."""

    def encode(
        self,
        text: str,
        pictures: Sequence[Picture],
        *,
        render: Callable[[str], str],
        tokenize: Callable[[str], list[int]],
    ) -> list[int]:
        """Ids of a prompt with pictures, which stay in work until they are released.

        Args:
            text: what the user says; :data:`~lit_dlm.pictures.PLACE` says where pictures go.
            pictures: in the order of their places.
            render: the chat template.
            tokenize: text to ids, no special tokens added.

        Raises:
            ValueError: there are too many pictures, or more places than pictures; or one cannot be
                read.
        """
        if len(pictures) > self.settings.max_pictures:
            raise ValueError(
                f"expected at most vision.max_pictures = {self.settings.max_pictures} pictures, "
                f"got {len(pictures)}"
            )
        missing = len(pictures) - text.count(PLACE)
        if missing < 0:
            raise ValueError(
                f"expected a picture for each {PLACE} of the text, got {text.count(PLACE)} places "
                f"and {len(pictures)} pictures"
            )
        pieces = [tokenize(piece) for piece in render(missing * self.place + text).split(PLACE)]
        return self.joined(pieces, [self.picture_ids(picture) for picture in pictures])

    @abstractmethod
    def picture_ids(self, picture: Picture) -> list[int]:
        """The ids that one picture becomes."""

    @abstractmethod
    def joined(self, pieces: Sequence[Sequence[int]], pictures: Sequence[list[int]]) -> list[int]:
        """The prompt: its words before, between and behind the pictures, and these.

        Args:
            pieces: ids of the words, one list more than pictures.
            pictures: their ids.
        """

    def embedded(self, ids: Tensor, words: Tensor) -> Tensor:
        """Embeddings of a canvas.

        Args:
            ids: ``(B, L)`` int64.
            words: ``(B, L, D)`` embeddings of the ids below the vocabulary; others are arbitrary.
        """
        del ids
        return words

    def recorded(self, ids: Sequence[int], digests: Sequence[str]) -> list[int]:
        """Ids of a recorded prompt, whose pictures then stay in work until they are released.

        Args:
            ids: of the record, rows of pictures numbered as
                :func:`~lit_dlm.trajectories.capture.as_recorded` does.
            digests: its pictures in order, looked for in :attr:`folders`.

        Raises:
            ValueError: a picture is not there, or they are not those of the record.
        """
        del digests
        return list(ids)

    def found(self, digest: str) -> Picture:
        """A picture that is known or lies in one of :attr:`folders`.

        Args:
            digest: SHA-256 of its file.

        Raises:
            ValueError: it is not there.
        """
        if digest in self.known:
            return self.known[digest]
        for folder in self.folders:
            if digest in folder:
                return folder.get(digest)
        places = ", ".join(str(one.folder) for one in self.folders) or "no folder"
        raise ValueError(f"picture {digest[:12]}: expected it in {places}")

    def release(self, ids: Iterable[int]) -> None:
        """Lets go of the pictures of a prompt that is done with.

        Args:
            ids: of the prompt, as it was encoded.
        """


class TokenVision(Vision):
    """A picture is tokens in front of the words, as MMaDA has it (arXiv:2505.15809)."""

    def __init__(
        self,
        settings: VisionSettings,
        *,
        first_id: int,
        tokenizer: Magvit | PatchTokenizer,
        marks: Mapping[str, int] | None = None,
    ) -> None:
        """Sets the picture tokenizer.

        Args:
            settings: how it sees.
            first_id: that of the first picture token; 126,464 in MMaDA's release.
            tokenizer: of the pictures.
            marks: ids of ``<|soi|>``, ``<|eoi|>`` and ``<|mmu|>``, the task of answering about a
                picture; those of MMaDA, whose text tokenizer does not name them, by default.

        Raises:
            ValueError: something is to be trained.
        """
        super().__init__(settings)
        if settings.train != "none":
            raise ValueError("vision.train: expected none, since pictures are tokens here")
        self.tokenizer = tokenizer
        self.resolution = settings.resolution or tokenizer.resolution
        self.first_id = first_id
        self.marks = {"<|soi|>": 126084, "<|eoi|>": 126085, "<|mmu|>": 126089, **(marks or {})}

    def picture_ids(self, picture: Picture) -> list[int]:
        """Its tokens, line by line, of the picture made square with white margins."""
        codes = self.tokenizer.encode(square_pixels(picture, self.resolution)[None])
        return (codes.flatten() + self.first_id).tolist()

    def joined(self, pieces: Sequence[Sequence[int]], pictures: Sequence[list[int]]) -> list[int]:
        """Task, pictures between their marks, words."""
        ids = [self.marks["<|mmu|>"]]
        for picture in pictures:
            ids += [self.marks["<|soi|>"], *picture, self.marks["<|eoi|>"]]
        return ids + [number for piece in pieces for number in piece]

    def pictures(self, ids: Tensor) -> list[Image.Image]:
        """The pictures that tokens mean.

        Args:
            ids: ``(B, N)`` int64, square pictures line by line; anything else than a picture token
                is drawn grey, so that unfinished ones can be looked at.
        """
        side = math.isqrt(ids.shape[1])
        codes = (ids - self.first_id).view(-1, side, side)
        is_drawn = (codes >= 0) & (codes < self.tokenizer.num_codes)
        pixels = self.tokenizer.decode(codes.where(is_drawn, 0))
        scale = pixels.shape[-1] // side
        shown = is_drawn[:, None].repeat_interleave(scale, 2).repeat_interleave(scale, 3)
        return [picture_of(one) for one in pixels.cpu().where(shown.cpu(), 0.0)]


def token_vision(
    path: str | None, settings: VisionSettings, *, first_id: int | None = None
) -> TokenVision:
    """The picture tokens of a model, which itself is not loaded.

    Args:
        path: embedded name, folder or hub id of the model; its folder may hold the picture
            tokenizer.
        settings: how it sees, with the tokenizer's ``path`` where it lies elsewhere.
        first_id: that of the first picture token; what the model's files say by default.

    Raises:
        ValueError: there is no tokenizer of pictures, or pictures are no tokens of the model.
    """
    folder = None if path is None else locate(path, weights=False)
    if first_id is None:
        first_id = None if folder is None else resolve(folder).spec.text_vocab_size
    if first_id is None:
        raise ValueError(f"{path}: expected a model whose pictures are tokens")
    found = folder if settings.path is None else locate(settings.path)
    tokenizer: Magvit | PatchTokenizer
    if found is not None and (found / CODEBOOK).is_file():
        tokenizer = PatchTokenizer(found / CODEBOOK)
    elif settings.path is not None:
        tokenizer = Magvit(settings.path)
    else:
        raise ValueError("vision.path: expected the picture tokenizer, such as showlab/magvitv2")
    marks = {} if folder is None else read_added_tokens(folder)
    return TokenVision(settings, first_id=first_id, tokenizer=tokenizer, marks=marks)


def square_pixels(picture: Picture, resolution: int) -> Tensor:
    """A picture as the release of MMaDA sees it: white margins make it square.

    Args:
        picture: any.
        resolution: pixels on each side.

    Returns:
        ``(3, resolution, resolution)`` float32 in [-1, 1].
    """
    image = picture.decoded()
    side = max(image.size)
    square = Image.new("RGB", (side, side), "white")
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    pixels = np.array(square.resize((resolution, resolution), Image.Resampling.BICUBIC))
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 127.5 - 1.0


def picture_of(pixels: Tensor) -> Image.Image:
    """The picture that a tokenizer's decoder drew.

    Args:
        pixels: ``(3, height, width)`` floats about in [-1, 1].
    """
    values = ((pixels.float().clamp(-1.0, 1.0) + 1.0) * 127.5).round()
    return Image.fromarray(values.byte().permute(1, 2, 0).cpu().numpy())


@dataclass(frozen=True, kw_only=True)
class TowerSizes:
    """Sizes of LLaDA-V's tower; the defaults are the release's (SigLIP2 so400m, patch 14)."""

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 26
    """Layers of SigLIP that are run: all but the last one."""
    num_attention_heads: int = 16
    image_size: int = 384
    patch_size: int = 14
    max_tiles: int = 4
    most_across: int = 6
    """Tiles across and down at most."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TowerSizes:
        """The sizes that a ``config.json`` means.

        Args:
            config: its contents. Twins give other sizes as ``vision_config``.

        Raises:
            ValueError: the tower, its projector or its scheme of tiles is another one.
        """
        known = {
            "mm_projector_type": ("mlp2x_gelu",),
            "mm_patch_merge_type": ("spatial_unpad", None),
            "mm_vision_tower": None,
        }
        for name, values in known.items():
            value = config.get(name)
            fits = "siglip" in str(value) if values is None else value in values
            if not fits:
                raise ValueError(
                    f"config.json: option {name}={value!r} is not supported for pictures, expected "
                    + ("a SigLIP tower" if values is None else repr(values[0]))
                )
        scheme = config.get("image_aspect_ratio") or "anyres_max_4"
        match = re.fullmatch(r"anyres_max_(\d+)", scheme)
        if match is None:
            raise ValueError(
                f"config.json: option image_aspect_ratio={scheme!r} is not supported, expected "
                "anyres_max_N"
            )
        grids = config.get("image_grid_pinpoints") or "(1x1),...,(6x6)"
        sides = {side for pair in grids for side in pair} if isinstance(grids, list) else set()
        most = len(sides) if sides else int(re.findall(r"\d+", grids)[-1])
        return cls(max_tiles=int(match[1]), most_across=most, **(config.get("vision_config") or {}))


@dataclass
class _Seen:
    """A picture of the table."""

    first: int
    """Its first row in the table."""
    size: tuple[int, int]
    tiles: Tensor
    """``(T, 3, S, S)`` on the host, float32."""
    num_rows: int
    features: Tensor | None = None
    """``(T, per_side**2, width)`` of the tower, unless that is trained."""
    version: int | None = None
    """Of the projector that made its rows in the table."""


class TowerVision(Vision):
    """LLaDA-V: a picture is rows of SigLIP behind a projector (arXiv:2505.16933).

    What the tower makes of a picture is kept while a prompt with it is in work, for all responses
    and steps; the rows are made anew when the projector has changed.
    """

    _table: Tensor
    forward_methods = ("rows",)
    place = f"{PLACE}\n"

    def __init__(
        self, settings: VisionSettings, sizes: TowerSizes, *, width: int, vocab_size: int
    ) -> None:
        """Builds the tower with random weights.

        Args:
            settings: what is trained.
            sizes: of the tower.
            width: of the decoder.
            vocab_size: rows of its embedding; ids from there on are pictures.
        """
        super().__init__(settings)
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        config = SiglipVisionConfig(
            **{name: getattr(sizes, name) for name in (*names, "image_size", "patch_size")},
            vision_use_head=False,
        )
        self.tower = SiglipVisionModel(config)
        self.projector = nn.Sequential(
            nn.Linear(sizes.hidden_size, width), nn.GELU(), nn.Linear(width, width)
        )
        self.newline = nn.Parameter(torch.randn(width) * width**-0.5)
        self.vocab_size = vocab_size
        self.scheme = AnyRes(
            tile=sizes.image_size,
            per_side=sizes.image_size // sizes.patch_size,
            max_tiles=sizes.max_tiles,
            most_across=sizes.most_across,
        )
        self.register_buffer("_table", torch.empty(0, width), persistent=False)
        self._seen: dict[str, _Seen] = {}
        self._held: Counter[str] = Counter()
        self.requires_grad_(settings.train == "all")
        self.tower.post_layernorm.requires_grad_(False)  # not run
        if settings.train == "projector":
            self.projector.requires_grad_(True)
            self.newline.requires_grad_(True)

    def picture_ids(self, picture: Picture) -> list[int]:
        """Ids of its rows in the table, where it stays until it is released as often."""
        seen = self._seen.get(picture.digest)
        if seen is None:
            num_rows = self.scheme.num_rows(picture.size)
            tiles = self.scheme.tiles(picture.decoded())
            seen = _Seen(self._place(num_rows), picture.size, tiles, num_rows)
            self._seen[picture.digest] = seen
        self._held[picture.digest] += 1
        start = self.vocab_size + seen.first
        return list(range(start, start + seen.num_rows))

    def joined(self, pieces: Sequence[Sequence[int]], pictures: Sequence[list[int]]) -> list[int]:
        """Words and pictures in turn."""
        ids = list(pieces[0])
        for picture, piece in zip(pictures, pieces[1:], strict=True):
            ids += [*picture, *piece]
        return ids

    def recorded(self, ids: Sequence[int], digests: Sequence[str]) -> list[int]:
        """The ids with those of the table in place of the record's own numbers."""
        rows = [row for digest in digests for row in self.picture_ids(self.found(digest))]
        places = [number for number in ids if number >= self.vocab_size]
        if len(rows) != len(places):
            self.release(rows)
            raise ValueError(
                f"expected pictures of {len(places)} rows, as recorded, got {len(rows)}"
            )
        numbers = iter(rows)
        return [number if number < self.vocab_size else next(numbers) for number in ids]

    def release(self, ids: Iterable[int]) -> None:
        """Lets go of the pictures among some ids; their rows make room when it is needed."""
        starts = {self.vocab_size + seen.first: digest for digest, seen in self._seen.items()}
        for digest in filter(None, map(starts.get, ids)):
            self._held[digest] = max(self._held[digest] - 1, 0)

    def embedded(self, ids: Tensor, words: Tensor) -> Tensor:
        """The words' embeddings, with rows of the table where ids lie beyond the vocabulary."""
        table = self.rows()
        if not len(table):
            return words
        rows = table.to(words.dtype)[(ids - self.vocab_size).clamp(0, len(table) - 1)]
        return torch.where((ids >= self.vocab_size)[..., None], rows, words)

    def rows(self) -> Tensor:
        """The table ``(R, D)``, with all pictures in work up to date; differentiable if trained."""
        is_trained = torch.is_grad_enabled() and self.settings.train != "none"
        held = [seen for digest, seen in self._seen.items() if self._held[digest] > 0]
        if is_trained:
            table = self._table.clone()
            for seen in held:
                table[seen.first : seen.first + seen.num_rows] = self._made(seen)
            # Every process has gradients, whether it sees pictures or not.
            return table + 0.0 * sum(p.sum() for p in self.parameters() if p.requires_grad)
        version = sum(parameter._version for parameter in self.parameters())
        for seen in held:
            if seen.version != version:
                rows = slice(seen.first, seen.first + seen.num_rows)
                with torch.no_grad():
                    self._table[rows] = self._made(seen).to(self._table.dtype)
                seen.version = version
        return self._table

    def _made(self, seen: _Seen) -> Tensor:
        features = seen.features
        if features is None:
            weight = self.newline
            keeps = self.settings.train != "all"
            with torch.set_grad_enabled(torch.is_grad_enabled() and not keeps):
                features = self._features(seen.tiles.to(weight.device, weight.dtype))
            if keeps:
                seen.features = features
        return self.scheme.merged(self.projector(features), self.newline, seen.size)

    def _features(self, tiles: Tensor) -> Tensor:
        """What the last layer run makes of tiles, before the norm that SigLIP has behind it."""
        return self.tower.encoder(inputs_embeds=self.tower.embeddings(tiles)).last_hidden_state

    def _place(self, num_rows: int) -> int:
        """Where a picture fits into the table: free room, that of released ones, or more room."""
        at = 0
        for digest, seen in sorted(self._seen.items(), key=lambda item: item[1].first):
            if self._held[digest] <= 0:
                continue
            if seen.first - at >= num_rows:
                break
            at = seen.first + seen.num_rows
        end = at + num_rows
        for digest, seen in list(self._seen.items()):
            if seen.first < end and at < seen.first + seen.num_rows:
                del self._seen[digest], self._held[digest]
        if end > len(self._table):
            grown = self._table.new_zeros(max(end, 2 * len(self._table)), self._table.shape[1])
            grown[: len(self._table)] = self._table
            self._table = grown
        return at
