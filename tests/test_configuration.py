import pytest
from jsonargparse import ArgumentParser

from lit_dlm.configuration import Parser, explain, nearest


def _error(configure, arguments: list[str]) -> str:
    """The explained text of a real parser error."""
    parser = ArgumentParser(exit_on_error=False)
    configure(parser)
    with pytest.raises(Exception) as caught:  # noqa: PT011  (argparse's own error type)
        parser.parse_args(arguments)
    return explain(str(caught.value), parser)


def test_nearest_names_the_closest_or_lists_all():
    assert nearest("treshold", ["threshold", "seed"]) == "; did you mean 'threshold'?"
    assert nearest("zzz", ["b", "a"]) == "; known: a, b"
    assert nearest("zzz", []) == ""


def test_unknown_option_of_a_class_names_the_nearest():
    from lit_dlm.decoding import CommitPolicy

    text = _error(
        lambda p: p.add_argument("--policy", type=CommitPolicy),
        ['--policy={"class_path": "ThresholdPolicy", "init_args": {"treshold": 0.5}}'],
    )
    assert "ThresholdPolicy has no option 'treshold'; did you mean 'threshold'?" in text


def test_unknown_class_names_the_nearest():
    from lit_dlm.decoding import CommitPolicy

    text = _error(
        lambda p: p.add_argument("--policy", type=CommitPolicy | None), ["--policy=EntropiPolicy"]
    )
    assert "unknown class 'EntropiPolicy'; did you mean 'EntropyPolicy'?" in text


def test_unknown_flag_names_the_nearest():
    text = _error(lambda p: p.add_argument("--max_steps", type=int), ["--max_stepz=3"])
    assert text == "unknown option '--max_stepz'; did you mean '--max_steps'?"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--decoder.windw=3"],
            "decoder: Decoder has no option 'windw'; did you mean 'window'?",
        ),
        (
            ["--decoder.sampler.temperatur=3"],
            "decoder.sampler: Sampler has no option 'temperatur'; did you mean 'temperature'?",
        ),
        (
            ["--decoder.policy=ThresholdPolicy", "--decoder.policy.thresholds=3"],
            "decoder.policy: ThresholdPolicy has no option 'thresholds'; did you mean 'threshold'?",
        ),
        (
            ["--optimizer=torch.optim.AdamW", "--optimizer.lrr=3"],
            "optimizer: AdamW has no option 'lrr'; did you mean 'lr'?",
        ),
        (["--decoder.settings.max_steps=x"], "decoder.settings.max_steps: Expected"),
    ],
)
def test_an_error_inside_a_class_names_its_place_and_never_the_wrong_key(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    from lightning.pytorch.cli import OptimizerCallable

    from lit_dlm.decoding import Decoder

    parser = Parser()
    parser.add_subclass_arguments(Decoder, "decoder")
    parser.add_argument("--optimizer", type=OptimizerCallable)
    with pytest.raises(SystemExit) as exit:
        parser.parse_args(["--decoder=Decoder", *arguments])
    assert exit.value.code == 2
    assert f"lit-dlm: error: {told}" in capsys.readouterr().err
