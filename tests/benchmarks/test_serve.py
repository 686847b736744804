"""What clients of a server cost: they get the texts of one batch."""

import json

import pytest


@pytest.mark.slow
def test_clients_get_the_texts_of_one_batch(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    pytest.importorskip("fastapi")
    import serve

    serve.main(["--json", "--clients", "3", "--response_length", "8", "--repeats", "1"])
    told = json.loads(capsys.readouterr().out)
    assert told["equal_percent"] == 100.0
    assert told["ratio"] > 0.0
