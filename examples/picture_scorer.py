"""A scorer of your own for drawn pictures: how well a picture fits its prompt, according to CLIP.

In the folder of this file, use these ``tasks`` in a ``PromptDataModule`` or ``RolloutDataModule``::

    tasks:
    - class_path: DrawingPrompts
      init_args:
        path: prompts.jsonl
        scorer:
          class_path: picture_scorer.CLIPScorer
          init_args: {path: openai/clip-vit-base-patch32}

The tables of ``lit-dlm predict`` then show the mean score. In ``lit-dlm fit`` the reward ``Graded``
with ``credit: fraction`` pays it.
"""

from __future__ import annotations

from functools import cached_property

import torch
from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

from lit_dlm.backbones.location import locate
from lit_dlm.tasks import PromptExample
from lit_dlm.vision.pictures import Picture


class CLIPScorer:
    """CLIPScore (arXiv:2104.08718, eq. 1): ``2.5 max(cos, 0)`` of picture and prompt, at most 1.

    Args:
        path: folder or hub id of a CLIP model in safetensors, loaded for the first picture.
        device: device of the CLIP model.
    """

    def __init__(self, path: str, device: str = "cpu") -> None:
        self.path = path
        self.device = device

    @cached_property
    def _parts(self) -> tuple[CLIPModel, CLIPImageProcessorPil, AutoTokenizer]:
        folder = locate(self.path)
        options = {"local_files_only": True}
        return (
            CLIPModel.from_pretrained(folder, use_safetensors=True, **options).to(self.device),
            CLIPImageProcessorPil.from_pretrained(folder, **options),
            AutoTokenizer.from_pretrained(folder, **options),
        )

    @torch.no_grad()
    def score(self, picture: Picture, example: PromptExample) -> float:
        """Returns the score of one picture."""
        model, processor, tokenizer = self._parts
        pixels = processor(picture.decoded(), return_tensors="pt")
        words = tokenizer(example.text, return_tensors="pt", truncation=True)
        found = model(**pixels.to(self.device), **words.to(self.device))
        cosine = float((found.image_embeds @ found.text_embeds.T).squeeze())
        return min(2.5 * max(cosine, 0.0), 1.0)
