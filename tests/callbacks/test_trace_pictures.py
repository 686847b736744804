from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from lit_dlm import DecodeModule
from lit_dlm.callbacks import TracePictures, trace_pictures
from lit_dlm.callbacks.trace_pictures import log_images
from lit_dlm.datamodules import PromptDataModule
from lit_dlm.decoding import BlockWindow, ConfidencePolicy, Decoder
from lit_dlm.decoding.caches import DualCache
from lit_dlm.tracelock.generate import TraceModule
from tests.callbacks.letters import LENGTH, ByteTokenizer, Letters, Table, both_decoders
from tests.finetuning.runs import quiet
from tests.reports.sample_sets import WordTokenizer


class Tokenizer(WordTokenizer):
    apply_chat_template = ByteTokenizer.apply_chat_template


class Learner(DecodeModule):
    """Decodes a table, and trains one number that has nothing to do with it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Table(), tokenizer="none", decoders=both_decoders(), **options)
        self.__dict__["tokenizer"] = Tokenizer([f"{number} " for number in range(400)])
        self.number = nn.Parameter(torch.zeros(1))
        self.head = nn.Dropout().eval()

    def training_step(self, batch, batch_idx):
        return (self.number - 1).square().sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD([self.number], lr=0.1)


@pytest.mark.slow
def test_predict_draws_the_first_samples_of_every_method(tmp_path: Path):
    data = PromptDataModule([Letters(3)], response_length=LENGTH, batch_size=2)
    pictures = TracePictures(str(tmp_path), kinds=["gif", "fill_order"])
    trainer = quiet(tmp_path, callbacks=[pictures])
    trainer.predict(Learner(level="tokens"), datamodule=data, return_predictions=False)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    parts = product(("confidence", "random"), (0, 1), (".gif", "-fill_order.png"))
    drawn = {f"{method}/letters_test_{number}{suffix}" for method, number, suffix in parts}
    assert files == {"traces.html", *drawn}
    assert (tmp_path / "traces.html").read_text().count('"uid":"letters/test/') == 4


def test_features_are_refused_with_a_cache(tmp_path: Path):
    decoder = Decoder(policy=ConfidencePolicy(), window=BlockWindow(2), cache=DualCache())
    features = {"level": "features", "projector_dir": str(tmp_path), "decoders": {"dual": decoder}}
    with pytest.raises(ValueError, match=r"decoders\.dual\.cache: expected NoCache"):
        TraceModule(Table(), tokenizer="none", **features)


def test_a_run_that_has_yet_to_fit_its_projector_is_drawn(tmp_path: Path):
    features = {"level": "features", "projector_dir": str(tmp_path)}
    module = TraceModule(Table(), tokenizer="none", decoders=both_decoders(), **features)
    TracePictures(str(tmp_path)).setup(Mock(), module, "predict")


class ImageLogger(CSVLogger):
    """Takes images as Lightning's W&B logger does."""

    images: list[tuple[str, int]]

    def log_image(self, key: str, images: list[str], step: int) -> None:
        with Image.open(images[0]) as image:
            assert image.format == "PNG"
        self.images.append((key, step))


@pytest.mark.slow
def test_prompts_are_drawn_and_logged_after_every_second_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Validations after steps 1, 2 and 3; the first and the third are drawn. Modes stay."""
    monkeypatch.setattr(trace_pictures, "_CELLS", LENGTH)
    prompts = {"prompts": ["a", "b"], "method": "random", "every_n_validations": 2}
    pictures = TracePictures(str(tmp_path / "pictures"), kinds=["gif", "fill_order"], **prompts)
    loggers = [ImageLogger(str(tmp_path / "logs")), CSVLogger(str(tmp_path))]
    loggers[0].images = []
    loader = DataLoader(range(3), batch_size=1)
    module = Learner()
    steps = {"max_steps": 3, "val_check_interval": 1, "num_sanity_val_steps": 2}
    trainer = quiet(tmp_path, callbacks=[pictures], logger=loggers, **steps)
    trainer.fit(module, loader, loader)
    folders = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert folders == {"step-0000001", "step-0000003"}
    assert sorted(loggers[0].images) == [
        (f"decode/random/prompt/0{number}/fill_order", step) for number in (0, 1) for step in (1, 3)
    ]
    assert (module.training, module.head.training) == (True, False)
    resumed = TracePictures(str(tmp_path / "resumed"), **prompts)  # behind the third validation
    resumed.load_state_dict(pictures.state_dict())
    quiet(tmp_path, callbacks=[resumed], max_steps=1, val_check_interval=1).fit(
        module, loader, loader
    )
    assert not resumed.folder.exists()


def test_a_writer_of_tensorboard_gets_pixels(tmp_path: Path):
    logger = SimpleNamespace(experiment=Mock(spec=["add_image"]))
    Image.new("RGB", (3, 2), (255, 0, 7)).save(tmp_path / "x.png")
    log_images(logger, {"tag": tmp_path / "x.png"}, step=4)
    (call,) = logger.experiment.add_image.call_args_list
    tag, pixels, step = call.args
    assert (tag, step, call.kwargs) == ("tag", 4, {"dataformats": "HWC"})
    assert pixels.tolist() == [[[255, 0, 7]] * 3] * 2
