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
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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
    cached_pictures: int = 32
    """Pictures of which the device keeps what a frozen tower makes of them: about 8 MB for each of
    five tiles in bfloat16."""


class Vision(nn.Module):
    """Pictures to ids, and ids to embeddings.

    As records hold it, a prompt has ids behind the vocabulary where its pictures belong, numbered
    in order. A batch of training has such prompts and names its pictures; a decode gets prompts
    whose pictures were given a place (:meth:`placed`).
    """

    def __init__(self, settings: VisionSettings, *, vocab_size: int) -> None:
        super().__init__()
        self.settings = settings
        self.vocab_size = vocab_size
        """Ids from here on are pictures."""
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
        """Ids of a prompt with pictures, as records hold it; only their headers are read.

        Args:
            text: what the user says; :data:`~lit_dlm.pictures.PLACE` says where pictures go.
            pictures: in the order of their places.
            render: the chat template.
            tokenize: text to ids, no special tokens added.
        """
        if len(pictures) > self.settings.max_pictures:
            raise ValueError(
                f"expected at most vision.max_pictures = {self.settings.max_pictures} pictures, "
                f"got {len(pictures)}"
            )
        num_places = render(text).count(PLACE)
        missing = len(pictures) - num_places
        if missing < 0:
            raise ValueError(
                f"expected a picture for each {PLACE} of the text, got {num_places} places "
                f"and {len(pictures)} pictures"
            )
        pieces = [tokenize(piece) for piece in render(missing * self.place + text).split(PLACE)]
        ends = list(accumulate(map(self.num_ids, pictures), initial=self.vocab_size))
        return self.joined(pieces, [list(range(*pair)) for pair in pairwise(ends)])

    def placed(self, ids: Sequence[int], pictures: Iterable[Picture]) -> list[int]:
        """Ids of a recorded prompt for decoding; its pictures stay in work until released.

        Args:
            ids: as of a record, or of :meth:`encode`.
            pictures: in order; not looked at where no id stands for them.
        """
        num_places = sum(number >= self.vocab_size for number in ids)
        if not num_places:
            return list(ids)
        rows = [row for picture in pictures for row in self.picture_ids(picture)]
        if len(rows) != num_places:
            self.release(rows)
            raise ValueError(
                f"expected pictures of {num_places} rows, as recorded, got {len(rows)}"
            )
        numbers = iter(rows)
        return [number if number < self.vocab_size else next(numbers) for number in ids]

    def found(self, digest: str) -> Picture:
        """A picture that is known.

        Args:
            digest: SHA-256 of its file.
        """
        picture = self.known[digest]
        if picture.digest != digest:
            raise ValueError(f"{picture.name}: the picture is damaged: it has another digest")
        return picture

    @abstractmethod
    def num_ids(self, picture: Picture) -> int:
        """How many ids a picture becomes; only its header is read."""

    @abstractmethod
    def picture_ids(self, picture: Picture) -> list[int]:
        """The ids that one picture becomes in a decode."""

    @abstractmethod
    def joined(self, pieces: Sequence[Sequence[int]], pictures: Sequence[list[int]]) -> list[int]:
        """The prompt: its words before, between and behind the pictures, and these.

        Args:
            pieces: ids of the words, one list more than pictures.
            pictures: their ids.
        """

    @abstractmethod
    def embedded(
        self, ids: Tensor, embed: Callable[[Tensor], Tensor], pictures: Sequence[str] | None
    ) -> Tensor:
        """Embeddings ``(B, L, D)`` of a canvas.

        Args:
            ids: ``(B, L)`` int64.
            embed: embeddings of tokens.
            pictures: digests of what the ids behind the vocabulary stand for, in order; ``None``:
                those that were given a place.
        """

    def release(self, ids: Iterable[int]) -> None:
        """Lets go of the pictures of a prompt that is done with.

        Args:
            ids: of the prompt, as it was placed.
        """


_MOST_ENCODED = 1024
"""Pictures whose tokens are kept: at most 40 MB at 1,024 tokens each."""


class TokenVision(Vision):
    """A picture is tokens in front of the words, as MMaDA has it (arXiv:2505.15809)."""

    def __init__(
        self,
        settings: VisionSettings,
        *,
        first_id: int,
        tokenizer: Magvit | PatchTokenizer,
        vocab_size: int | None = None,
        marks: Mapping[str, int] | None = None,
    ) -> None:
        """Sets the picture tokenizer.

        Args:
            settings: how it sees.
            first_id: that of the first picture token; in MMaDA the first behind its tokenizer.
            tokenizer: of the pictures.
            vocab_size: of the model; words and picture tokens by default.
            marks: ids of ``<|soi|>``, ``<|eoi|>`` and ``<|mmu|>``, the task of answering about a
                picture; those of MMaDA, whose text tokenizer does not name them, by default.
        """
        super().__init__(settings, vocab_size=vocab_size or first_id + tokenizer.num_codes)
        if settings.train != "none":
            raise ValueError("vision.train: expected none, since pictures are tokens here")
        self.tokenizer = tokenizer
        self.resolution = settings.resolution or tokenizer.resolution
        self.first_id = first_id
        self.marks = {"<|soi|>": 126084, "<|eoi|>": 126085, "<|mmu|>": 126089, **(marks or {})}
        self._tokens: dict[str, list[int]] = {}

    def num_ids(self, picture: Picture) -> int:
        """As many for every picture."""
        _ = picture.size  # it is one
        return (self.resolution // self.tokenizer.scale) ** 2

    def picture_ids(self, picture: Picture) -> list[int]:
        """Its tokens, line by line, of the picture made square with white margins."""
        if picture.digest not in self._tokens:
            if len(self._tokens) == _MOST_ENCODED:
                del self._tokens[next(iter(self._tokens))]
            codes = self.tokenizer.encode(square_pixels(picture, self.resolution)[None])
            self._tokens[picture.digest] = (codes.flatten() + self.first_id).tolist()
        return self._tokens[picture.digest]

    def embedded(
        self, ids: Tensor, embed: Callable[[Tensor], Tensor], pictures: Sequence[str] | None
    ) -> Tensor:
        """Those of words and picture tokens."""
        if pictures:
            tokens = [token for one in pictures for token in self.picture_ids(self.found(one))]
            places = (ids - self.vocab_size).clamp(0, len(tokens) - 1)
            ids = torch.where(ids >= self.vocab_size, ids.new_tensor(tokens)[places], ids)
        return embed(ids)

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
    path: str | None,
    settings: VisionSettings,
    *,
    first_id: int | None = None,
    vocab_size: int | None = None,
) -> TokenVision:
    """The picture tokens of a model, which itself is not loaded.

    Args:
        path: embedded name, folder or hub id of the model; its folder may hold the picture
            tokenizer.
        settings: how it sees, with the tokenizer's ``path`` where it lies elsewhere.
        first_id: that of the first picture token; what the model's files say by default.
        vocab_size: of the model; words and picture tokens by default.
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
    return TokenVision(
        settings, first_id=first_id, tokenizer=tokenizer, vocab_size=vocab_size, marks=marks
    )


def square_pixels(picture: Picture, resolution: int) -> Tensor:
    """A picture as dLLM-RL shows it to MMaDA: white margins make it square.

    MMaDA's own scripts cut a square out of its middle instead.

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
    picture: Picture
    num_rows: int
    tiles: Tensor | None
    """``(T, 3, S, S)`` on the host, float32, until the tower has looked at them."""
    version: int | None = None
    """Of the projector that made its rows in the table."""


class TowerVision(Vision):
    """LLaDA-V: a picture is rows of SigLIP behind a projector (arXiv:2505.16933).

    What a frozen tower makes of a picture is kept for all responses, states and steps, as long as
    there is room (``cached_pictures``); rows are made anew when the projector has changed. A batch
    of training has rows of its own, made in each forward.
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
        super().__init__(settings, vocab_size=vocab_size)
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
        self.scheme = AnyRes(
            tile=sizes.image_size,
            per_side=sizes.image_size // sizes.patch_size,
            max_tiles=sizes.max_tiles,
            most_across=sizes.most_across,
        )
        self.register_buffer("_table", torch.empty(0, width), persistent=False)
        self._seen: dict[str, _Seen] = {}
        self._held: Counter[str] = Counter()
        self._features: OrderedDict[str, Tensor] = OrderedDict()
        self.requires_grad_(settings.train == "all")
        self.tower.post_layernorm.requires_grad_(False)  # not run
        if settings.train == "projector":
            self.projector.requires_grad_(True)
            self.newline.requires_grad_(True)

    def picture_ids(self, picture: Picture) -> list[int]:
        """Ids of its rows in the table, where it stays until it is released as often."""
        seen = self._seen.get(picture.digest)
        if seen is None:
            num_rows = self.num_ids(picture)
            tiles = self.scheme.tiles(picture.decoded())
            seen = _Seen(self._place(num_rows), picture, num_rows, tiles)
            self._seen[picture.digest] = seen
        self._held[picture.digest] += 1
        start = self.vocab_size + seen.first
        return list(range(start, start + seen.num_rows))

    def num_ids(self, picture: Picture) -> int:
        """Its rows."""
        return self.scheme.num_rows(picture.size)

    def joined(self, pieces: Sequence[Sequence[int]], pictures: Sequence[list[int]]) -> list[int]:
        """Words and pictures in turn."""
        ids = list(pieces[0])
        for picture, piece in zip(pictures, pieces[1:], strict=True):
            ids += [*picture, *piece]
        return ids

    def release(self, ids: Iterable[int]) -> None:
        """Lets go of the pictures among some ids; their rows make room when it is needed."""
        starts = {self.vocab_size + seen.first: digest for digest, seen in self._seen.items()}
        for digest in filter(None, map(starts.get, ids)):
            self._held[digest] = max(self._held[digest] - 1, 0)

    def embedded(
        self, ids: Tensor, embed: Callable[[Tensor], Tensor], pictures: Sequence[str] | None
    ) -> Tensor:
        """The words' embeddings, with rows of pictures where ids lie behind the vocabulary."""
        words = embed(ids.clamp_max(self.vocab_size - 1))
        table = self.rows(pictures)
        if not len(table):
            return words
        rows = table.to(words.dtype)[(ids - self.vocab_size).clamp(0, len(table) - 1)]
        return torch.where((ids >= self.vocab_size)[..., None], rows, words)

    def rows(self, pictures: Sequence[str] | None = None) -> Tensor:
        """Rows of pictures, ``(R, D)``.

        Args:
            pictures: digests, whose rows are wanted one picture behind the other (and a row of
                zeros at the end), differentiable where they are trained; ``None``: the table of
                those in work, brought up to date.
        """
        if pictures is None:
            return self._updated()
        none = self.newline.new_zeros(1, len(self.newline))
        if not pictures and self.settings.train != "none":
            # Every process runs what is trained and has gradients, also without pictures.
            side = self.scheme.tile
            black = self._looked_at(torch.zeros(2, 3, side, side))
            none = none + 0.0 * self._behind(black, (side, side)).sum()
        return torch.cat([*self._made([self.found(digest) for digest in pictures]), none])

    @torch.no_grad()
    @torch.inference_mode(mode=False)
    def _updated(self) -> Tensor:
        version = sum(parameter._version for parameter in self.parameters())
        stale = [
            seen
            for digest, seen in self._seen.items()
            if self._held[digest] > 0 and seen.version != version
        ]
        tiles = {seen.picture.digest: seen.tiles for seen in stale if seen.tiles is not None}
        made = self._made([seen.picture for seen in stale], tiles)
        for seen, rows in zip(stale, made, strict=True):
            self._table[seen.first : seen.first + seen.num_rows] = rows.to(self._table.dtype)
            seen.tiles, seen.version = None, version
        return self._table

    def _made(
        self, pictures: Sequence[Picture], tiles: Mapping[str, Tensor] | None = None
    ) -> list[Tensor]:
        """Rows of each picture; the tower looks at those that are new in one forward.

        Args:
            pictures: any.
            tiles: of some of them, by digest.
        """
        tiles = tiles or {}
        features = {
            one.digest: self._features[one.digest]
            for one in pictures
            if one.digest in self._features
        }
        new = {one.digest: one for one in pictures if one.digest not in features}
        if new:
            parts = [
                tiles[digest] if digest in tiles else self.scheme.tiles(one.decoded())
                for digest, one in new.items()
            ]
            seen = self._looked_at(torch.cat(parts)).split([len(part) for part in parts])
            features |= dict(zip(new, seen, strict=True))
        if self.settings.train != "all":
            self._features |= features
            for digest in features:
                self._features.move_to_end(digest)
            while len(self._features) > self.settings.cached_pictures:
                self._features.popitem(last=False)
        return [self._behind(features[one.digest], one.size) for one in pictures]

    def _behind(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        """Rows of a picture from what the tower makes of it."""
        rows = self.projector(features.to(self.newline.dtype))
        return self.scheme.merged(rows, self.newline, size)

    def _looked_at(self, tiles: Tensor) -> Tensor:
        """What the last layer run makes of tiles, before the norm that SigLIP has behind it.

        Not in inference mode, since it may be kept until something is trained.
        """
        with (
            torch.inference_mode(mode=False),
            torch.set_grad_enabled(torch.is_grad_enabled() and self.settings.train == "all"),
        ):
            weight = self.tower.embeddings.patch_embedding.weight
            tiles = tiles.clone().to(weight.device, weight.dtype)
            return self.tower.encoder(inputs_embeds=self.tower.embeddings(tiles)).last_hidden_state

    @torch.inference_mode(mode=False)
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
