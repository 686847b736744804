"""The thread that decodes: what it tells while rows are written, and what a failure leaves."""

import threading
from typing import Any

import pytest

import lit_dlm.decoding as d
from lit_dlm.backbones import load_backbone, load_tokenizer
from lit_dlm.decoding import BlockWindow, Decoder
from lit_dlm.decoding.api import DecodePrompt
from lit_dlm.serve.engine import Ended, Engine, Row, Settings, UnavailableError
from tests.serve.servers import until

PROMPTS = [[5 + (7 * row + i) % 80 for i in range(3 + row % 3)] for row in range(6)]


@pytest.fixture(scope="module")
def tiny() -> dict[str, Any]:
    return {"backbone": load_backbone("tiny"), "tokenizer": load_tokenizer("tiny")}


def rows_of(told: list[list], settings: Settings, **options: Any) -> list[Row]:
    return [
        Row(prompt=DecodePrompt("0", ids, 7), settings=settings, tell=heard.append, **options)
        for ids, heard in zip(PROMPTS, told, strict=True)
    ]


def run(engine: Engine, rows: list[Row], told: list[list]) -> None:
    """Puts rows into a running engine, and waits for the ends of all."""
    thread = threading.Thread(target=engine.run)
    thread.start()
    engine.put(rows)
    until(
        lambda: [heard[-1:] for heard in told],
        lambda ends: all(end and not isinstance(end[0], str) for end in ends),
    )
    engine.close()
    thread.join()


DECODERS = {
    "threshold": ({"policy": d.ThresholdPolicy(0.9), "quota": d.NoQuota()}, True),
    "blocks": ({"policy": d.ConfidencePolicy(), "window": BlockWindow(4)}, True),
    "takes back": (
        {"policy": d.WINOPolicy(0.5), "quota": d.NoQuota(), "window": BlockWindow(4)},
        True,
    ),
    "takes back anywhere": ({"policy": d.WINOPolicy(0.5), "quota": d.NoQuota()}, False),
}


@pytest.mark.parametrize("name", DECODERS)
def test_text_that_was_told_begins_the_text_of_the_end(name: str, tiny):
    """Where any cell may be taken back until the end, nothing is told before."""
    parts, is_told = DECODERS[name]
    engine = Engine(**tiny, decoder=Decoder(**parts), num_slots=4, max_waiting=2)
    told: list[list] = [[] for _ in PROMPTS]
    run(engine, rows_of(told, Settings(16), is_streamed=True), told)
    for *texts, end in told:
        assert isinstance(end, Ended)
        whole = end.rows.responses.texts[end.place]
        assert all(whole.startswith(text) for text in texts)
        assert texts == sorted(texts, key=len)
    assert any(len(heard) > 2 for heard in told) == is_told


def test_a_decode_that_fails_ends_its_rows_and_not_the_engine(tiny, monkeypatch, caplog):
    engine = Engine(
        **tiny, decoder=Decoder(policy=d.ConfidencePolicy()), num_slots=6, max_waiting=0
    )
    denoise, failing = tiny["backbone"].denoise, [True]

    def denoised(*values: Any, **options: Any) -> Any:
        if failing.pop() if failing else False:
            raise RuntimeError("out of memory")
        return denoise(*values, **options)

    monkeypatch.setattr(tiny["backbone"], "denoise", denoised)
    told: list[list] = [[] for _ in PROMPTS]
    thread = threading.Thread(target=engine.run)
    thread.start()
    engine.put(rows_of(told, Settings(4)))
    until(lambda: told, lambda found: all(found))
    assert all(isinstance(one, UnavailableError) for (one,) in told)
    assert "a decode has failed: out of memory" in caplog.text
    again: list[list] = [[] for _ in PROMPTS]
    engine.put(rows_of(again, Settings(4)))
    until(lambda: again, lambda found: all(found))
    engine.close()
    thread.join()
    assert all(isinstance(one, Ended) for (one,) in again)
    with pytest.raises(UnavailableError, match="the server ends"):
        engine.put(rows_of(told, Settings(4)))


def test_settings_take_turns_in_the_order_of_requests(tiny):
    """The third row waits for the first two, and the fourth, which is like these, for the third."""
    engine = Engine(
        **tiny, decoder=Decoder(policy=d.ConfidencePolicy()), num_slots=2, max_waiting=4
    )
    order: list[int] = []
    rows = [
        Row(
            prompt=DecodePrompt("0", ids, 7),
            settings=Settings(8, 0.5 if number == 2 else None),
            tell=lambda _, number=number: order.append(number),
        )
        for number, ids in enumerate(PROMPTS)
    ]
    engine.put(rows)
    rows[4].is_gone = True
    thread = threading.Thread(target=engine.run)
    thread.start()
    until(lambda: order, lambda found: len(found) == 5)
    engine.close()
    thread.join()
    assert sorted(order[:2]) == [0, 1]
    assert order[2] == 2
    assert sorted(order[3:]) == [3, 5]
    assert not engine.running
