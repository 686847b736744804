import json
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import OptimizerCallable

import lit_dlm.finetuning.sft
import lit_dlm.rl.module  # noqa: F401
from lit_dlm.config.files import compose
from lit_dlm.config.parser import Parser, explain
from lit_dlm.datamodules.supervised_sources import SupervisedSource
from lit_dlm.decoding import CommitPolicy


class Picks: ...


class Selects:
    def select(self, state): ...


class Unfinished(CommitPolicy): ...


@pytest.mark.parametrize("form", ["{}", '{{"class_path": "{}"}}'])
@pytest.mark.parametrize("kind", [CommitPolicy, CommitPolicy | None])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Picks", "Picks has no method 'select', which CommitPolicy asks for"),
        ("Unfinished", "Unfinished has no method 'select', which CommitPolicy asks for"),
        (
            "Selects",
            "Selects.select takes (self, state) but CommitPolicy asks for "
            "(self, state, candidates, proposal, quota)",
        ),
    ],
)
def test_what_a_class_lacks_is_named(name: str, told: str, kind: Any, form: str):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--policy", type=kind)
    with pytest.raises(Exception) as caught:  # noqa: PT011  (argparse's own error type)
        parser.parse_args([f"--policy={form.format(f'{__name__}.{name}')}"])
    assert explain(str(caught.value)) == f"policy: {told}"


RECORDED = (
    "[{class_path: RecordedDecodes, "
    "init_args: {shards: a, only_correct: true, tasks: [sums], methods: [x]}}]"
)


def parsed(parser: Parser, folder: Path, document: str, *flags: str) -> Namespace:
    """What comes of a file and more flags."""
    parser.add_argument("--config", action="config")
    (folder / "first.yaml").write_text(document)
    return parser.parse_composed(compose([f"--config={folder / 'first.yaml'}", *flags]))


@pytest.mark.parametrize(("again", "key"), [("TABOMFile", "path"), ("RecordedDecodes", "shards")])
def test_a_list_given_again_replaces_the_one_of_the_file(tmp_path: Path, again: str, key: str):
    """Filter and methods were of the former; TABOMFile takes wrong rows by default."""
    parser = Parser()
    parser.add_argument("--sources", type=list[SupervisedSource])
    flag = f"--sources=[{{class_path: {again}, init_args: {{{key}: b}}}}]"
    (source,) = parsed(parser, tmp_path, f"sources: {RECORDED}", flag).sources
    settings = source.init_args.as_dict()
    assert (settings[key], settings["methods"]) == ("b", None)
    assert settings["only_correct"] is (again == "RecordedDecodes")


def test_another_class_keeps_the_settings_that_both_have(tmp_path: Path):
    first = "optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.5, weight_decay: 0.25}}"
    for flag, rate, decay in (
        ("{class_path: torch.optim.SGD, init_args: {lr: 0.1}}", 0.1, 0.25),
        ("torch.optim.SGD", 0.5, 0.25),
    ):
        parser = Parser()
        parser.add_argument("--optimizer", type=OptimizerCallable)
        settings = parsed(parser, tmp_path, first, f"--optimizer={flag}").optimizer.init_args
        assert (settings.lr, settings.weight_decay) == (rate, decay)
        assert "betas" not in settings


def backbone_of(folder: Path, *flags: str) -> Namespace:
    """That of a model with an adapter of rank 3, and more flags."""
    parser = Parser()
    parser.add_subclass_arguments(LightningModule, "model")
    lora = "{rank: 3, targets: all}"
    backbone = f"{{class_path: HFBackbone, init_args: {{path: tiny, lora: {lora}}}}}"
    first = f"{{class_path: TABOMModule, init_args: {{backbone: {backbone}, tokenizer: tiny}}}}"
    model = parsed(parser, folder, f"model: {first}", *flags).model
    return model.init_args.backbone.init_args


def test_a_flag_inside_a_class_may_be_null_or_hold_it(tmp_path: Path) -> None:
    """jsonargparse hands values of nested classes on as the text of Python objects."""
    assert backbone_of(tmp_path, "--model.backbone.init_args.lora", "null").lora is None
    assert backbone_of(tmp_path, "--model.backbone.adapter=null").adapter is None
    flag = "--model.backbone.init_args.from_ar={shift: 1, block_size: null}"
    from_ar = backbone_of(tmp_path, flag).from_ar
    assert (from_ar.shift, from_ar.block_size) == (1, None)


def test_another_class_keeps_settings_within_settings(tmp_path: Path) -> None:
    kept = backbone_of(tmp_path, "--model=SFTModule").lora
    assert (kept.rank, kept.targets) == (3, "all")


@pytest.mark.parametrize("tasks", [None, ["it's", 'a "b" ü', "None"]])
def test_a_flag_of_a_list_inside_a_class_keeps_its_value(tasks: list[str] | None) -> None:
    parser = Parser()
    parser.add_subclass_arguments(LightningDataModule, "data")
    data = f"--data={{class_path: SupervisedDataModule, init_args: {{sources: {RECORDED}}}}}"
    flag = f"--data.sources.init_args.tasks={json.dumps(tasks)}"
    parser.add_argument("--config", action="config")
    (source,) = parser.parse_composed(compose([data, flag])).data.init_args.sources
    assert source.init_args.tasks == tasks
    assert source.init_args.methods == ["x"]
