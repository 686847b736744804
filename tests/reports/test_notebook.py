"""What a notebook shows of decodes and of run folders."""

import html
import re
from dataclasses import asdict
from pathlib import Path

import pytest

import lit_dlm
from lit_dlm.reports.results import ResultFolder
from tests.reports.browser import browser, console, requested, wait_until
from tests.reports.sample_sets import record, remasked, write_run

UIDS = [f"t/test/{number}@m" for number in range(4)]


def page_in(shown: object) -> str:
    """The page inside of the frame that a notebook shows."""
    frame = re.fullmatch(r'<iframe .*srcdoc="([^"]*)"></iframe>', shown._repr_html_(), re.DOTALL)
    return html.unescape(frame[1])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path, [record([8, 9], [1, 0], uid=uid) for uid in UIDS])


def test_a_run_is_a_table_records_and_pages(run: Path) -> None:
    found = lit_dlm.load_run(run)
    rows = ResultFolder(run / "results").rows("t", "m")
    assert found.results.to_dict("records") == [asdict(row) for row in rows]
    assert found.results.groupby("method").correct.mean().to_dict() == {"m": 0.5}
    assert [one.uid for one in found.records()] == UIDS
    assert [one.uid for one in found.records(names=["t/test/2"])] == ["t/test/2@m"]
    assert UIDS[0] in page_in(found.show())
    assert UIDS[1] not in page_in(found.show(limit=1))


def test_plots_are_of_accuracies_and_of_training(run: Path) -> None:
    begin = '<img src="data:image/png;base64,'
    assert lit_dlm.load_run(run).plots()._repr_html_().count(begin) == 1
    logs = run / "logs" / "version_0"
    logs.mkdir(parents=True)
    (logs / "metrics.csv").write_text("epoch,step,train/loss\n0,1,2.0\n0,2,1.0\n")
    assert lit_dlm.load_run(str(run)).plots()._repr_html_().count(begin) == 2


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: expected a run folder"):
        lit_dlm.load_run(tmp_path / "nowhere")
    done = lit_dlm.generate("tiny", ["Hi"], response_length=8)
    with pytest.raises(ValueError, match="trajectories=True"):
        done.show()
    assert lit_dlm.load_run(tmp_path).results.empty


@pytest.mark.slow  # starts a browser
def test_the_canvas_is_drawn_step_by_step_below_the_cell(tmp_path: Path) -> None:
    """In a frame of a page, as a notebook is; nothing is requested and nothing fails."""
    done = lit_dlm.generate(
        "tiny", ["Tom has 34 pens, finds 7. How many pens?"], response_length=32, trajectories=True
    )
    shown = {"generate": done.show(), "record": remasked().show(), "text": remasked().show("tiny")}
    for name, one in shown.items():
        (tmp_path / f"{name}.html").write_text(f"<p>Out[1]:</p>{one._repr_html_()}")
    cells = "[...document.querySelectorAll('.panel .cell')].filter(one => !one.matches('.mask'))"
    with browser() as driver:

        def texts() -> str:
            return driver.execute_script(f"return {cells}.map(one => one.textContent).join('')")

        for name in shown:
            driver.get((tmp_path / f"{name}.html").as_uri())
            driver.switch_to.frame(driver.find_element("css selector", "iframe"))
            wait_until(driver, f"{cells}.length > 0")
            if name == "generate":
                assert "34+7=41" in texts()
                assert "ConfidencePolicy" in driver.find_element("css selector", ".panel").text
            driver.find_element("id", "first").click()
            wait_until(driver, f"{cells}.length === {0 if name == 'generate' else 1}")
            driver.find_element("id", "forward").click()
            wait_until(driver, f"{cells}.length > 0")
            wait_until(driver, "new Promise(done => setTimeout(() => done(true), 400))")
            assert len(requested(driver)) == 1
        assert not console(driver)
