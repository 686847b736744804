import pytest
from jsonargparse import ArgumentParser

from lit_dlm.configuration import explain, nearest


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
