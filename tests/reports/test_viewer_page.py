"""The viewer in a browser: what a person would try, and what a hostile model would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.reports.samples import Sample, SampleSet
from lit_dlm.reports.viewer import ViewedSet, write_viewer
from lit_dlm.trajectories import Trajectory
from tests.reports.browser import browser, console, requested, set_viewport
from tests.reports.sample_sets import EOS, MASK, WordTokenizer, record, sample
from tests.trajectories.samples import from_history, random_history

pytestmark = pytest.mark.slow  # starts a browser

WORDS = [
    "</script><img src=x onerror=window.hacked=1>",
    "<svg onload=window.hacked=2>",
    "\u202egnp.exe",
    *[f"w{number} " for number in range(40)],
]
NUM_SAMPLES = 1_000
STORY = "story/test/0@remasking"


def remasked_record() -> Trajectory:
    """Twelve places in nine steps, with re-masking, edits and given tokens."""
    history = random_history(
        np.random.default_rng(4), num_generated=12, num_steps=9, remask=0.15, given=0.2, fill=0.9
    )
    history = np.where(history == 9, MASK, 3 + history % 40)  # that module's mask is 9
    return from_history(history, uid=STORY, prompt_ids=[5, 6], mask_id=MASK, vocab_size=60)


def scored_record() -> Trajectory:
    """Two decodes of one prompt; this one has confidences and proposals."""
    one = record(
        [3, 10, 11, EOS], [0, 1, 2, 1], uid="evil/test/0@scored", prompt=[3, 4],
        meta={"regions": [["r", 0, 2], ["a", 2, 4]], "advantage": [1.0, -1.0, 0.0, None]},
    )  # fmt: skip
    one.signals["commit_prob"] = np.array([0.25, 0.5, 1.0, np.nan], dtype=np.float16)
    # Masked places: 0 1 2 3 before step 0, then 1 2 3, then 2.
    one.signals["step_prob"] = np.array([0.2] * 4 + [0.5] * 3 + [1.0], dtype=np.float16)
    one.signals["step_proposal"] = np.array([3, 12, 13, EOS, 10, 14, EOS, 11], dtype=np.int32)
    return one


def many_samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    samples = []
    for number in range(NUM_SAMPLES):
        tokens = rng.integers(6, 43, 256)
        order = rng.permutation(256)
        method = ("a", "b")[number % 2]
        one = record(tokens, order, uid=f"many/test/{number // 2:03d}@{method}", vocab_size=60)
        samples.append(sample(one, correct=number % 4 > 0, task="many"))
    return samples


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    plain = record([3, 4, 5], [2, 1, 0], uid="evil/test/0@plain", prompt=[3, 4])
    first = [sample(one, correct=True) for one in (scored_record(), plain, remasked_record())]
    shown = SampleSet(
        label="hostile <b>set</b>", source=Path("runs/x"), shards=[],
        samples=[*first, *many_samples()], num_available=5_000, methods={},
    )  # fmt: skip
    path = tmp_path_factory.mktemp("viewer") / "page.html"
    pieces = TokenPieces(WordTokenizer(WORDS))
    write_viewer(path, [ViewedSet(samples=shown, pieces=pieces)], title="<i>title</i>")
    return path.as_uri()


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture
def view(driver: Any, page: str) -> Iterator[Any]:
    """Opens the page anew; whatever a test did, nothing may have gone wrong or left the page."""
    set_viewport(driver, width=1280, height=800)
    driver.get("about:blank")
    requested(driver), console(driver)

    def opened(address: str = "") -> Any:
        driver.get("about:blank")
        driver.get(page + address)
        return driver

    yield opened
    assert console(driver) == []
    assert {address.partition("#")[0] for address in requested(driver)} <= {page, "about:blank"}
    assert driver.execute_script("return window.hacked") is None


def cells(driver: Any, panel: int = 0) -> list[str]:
    script = (
        "return [...document.querySelectorAll('.panel')[arguments[0]].querySelectorAll('.cell')]"
        ".map(cell => cell.classList.contains('mask') ? null : cell.textContent)"
    )
    return driver.execute_script(script, panel)


def marked(driver: Any, name: str) -> list[int]:
    script = (
        "return [...document.querySelectorAll('.panel .cell.' + arguments[0])]"
        ".map(cell => Number(cell.dataset.position))"
    )
    return driver.execute_script(script, name)


def slide(driver: Any, step: int) -> None:
    driver.execute_script(
        "const s = document.getElementById('slider'); s.value = arguments[0];"
        "s.dispatchEvent(new Event('input'))",
        step,
    )


def press(driver: Any, *keys: str) -> None:
    """Presses keys at once: nothing that the page has put off happens between them."""
    driver.execute_script(
        "for (const key of arguments) document.body.dispatchEvent("
        "new KeyboardEvent('keydown', {key, bubbles: true}))",
        *keys,
    )


def value(driver: Any, name: str) -> str:
    return driver.execute_script("return document.getElementById(arguments[0]).value", name)


def choose(driver: Any, name: str, wanted: str) -> None:
    driver.execute_script(
        "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
        "s.dispatchEvent(new Event('change', {bubbles: true}))",
        name,
        wanted,
    )


def wait_for(driver: Any, script: str, seconds: float = 60) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(driver, seconds, poll_frequency=0.05).until(
        lambda one: one.execute_script(f"return {script}")
    )


def test_slider_shows_every_canvas_of_the_record(view: Any) -> None:
    """Masks, overwritten tokens and given ones at every step are those of ``all_states``."""
    driver = view(f"#uid={STORY}")
    one = remasked_record()
    assert one.superseded is not None
    assert one.given is not None
    words = WordTokenizer(WORDS).words
    for step, state in enumerate(one.all_states()):
        slide(driver, step)
        expected = [None if token == MASK else words[token] for token in state]
        assert cells(driver) == expected, f"step {step}"
        written = [] if step == 0 else one.committed_at(step - 1).tolist()
        assert marked(driver, "new") == written
    assert marked(driver, "given") == np.flatnonzero(one.given).tolist()


def test_two_decodes_stand_side_by_side_and_share_the_slider(view: Any) -> None:
    driver = view("#uid=evil/test/0@scored&step=0")
    press(driver, "m")
    titles = [one.text for one in driver.find_elements("css selector", ".panel h2")]
    assert titles == ["scored", "plain"]
    left, right = driver.find_elements("css selector", ".panel")
    assert right.rect["x"] > left.rect["x"] + left.rect["width"]
    slide(driver, 1)
    assert [text is None for text in cells(driver, 0)] == [False, True, True, True]
    assert [text is None for text in cells(driver, 1)] == [True, True, False]
    slide(driver, 3)
    # Place 0 holds the same token in both; the others differ (a hidden special token has no mark).
    assert marked(driver, "differs") == [1, 2, 1, 2]
    choose(driver, "other", "")
    assert len(driver.find_elements("css selector", ".panel")) == 1


def test_hostile_tokens_are_shown_and_not_run(view: Any) -> None:
    driver = view("#uid=evil/test/0@plain")
    assert cells(driver) == WORDS[:3]
    assert WORDS[0] in driver.find_element("id", "prompt").text
    assert driver.find_elements("css selector", "main img, .layout svg[onload], h1 i") == []
    assert driver.find_element("id", "title").text == "<i>title</i>"
    # Even a handler that got in would not run: the policy forbids it.
    driver.execute_script("document.getElementById('prompt').setAttribute('onclick', 'hacked=3')")
    driver.find_element("id", "prompt").click()
    assert driver.execute_script("return window.hacked") is None
    from selenium.webdriver.support.ui import WebDriverWait

    said = WebDriverWait(driver, 60, poll_frequency=0.05).until(console)
    assert "Content Security Policy" in said[0]


def test_details_tell_what_was_recorded(view: Any) -> None:
    driver = view("#uid=evil/test/0@scored&colour=confidence")
    driver.execute_script("document.querySelectorAll('.panel .cell')[1].focus()")
    text = driver.find_element("id", "details").text
    words = WordTokenizer(WORDS).words
    for expected in (
        f'"{words[10]}"', "token id 10", "position 1 (canvas 3)", "region r",
        "written in step 2 of 3", "confidence 0.500", "advantage -1",
        f'1: "{words[12]}" 0.20', f'2: "{words[10]}" 0.50', f'2: wrote "{words[10]}"',
    ):  # fmt: skip
        assert expected in " ".join(text.split()), text
    # The arrow keys walk along the tokens that have the focus.
    from selenium.webdriver.common.keys import Keys

    driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert "position 2 (canvas 4)" in " ".join(driver.find_element("id", "details").text.split())
    slide(driver, 1)
    assert "confidence" not in driver.find_element("id", "details").text, "it is a mask now"


def test_colours_regions_specials_and_proposals(view: Any) -> None:
    driver = view("#uid=evil/test/0@scored")
    disabled = "return [...document.querySelectorAll('#colour option:disabled')].map(o => o.value)"
    assert set(driver.execute_script(disabled)) == {
        "entropy", "margin", "log_prob", "policy_score", "value", "token_rewards",
    }  # fmt: skip
    ground = "return document.querySelectorAll('.panel .cell')[arguments[0]].style.background"
    choose(driver, "colour", "advantage")
    assert driver.execute_script(ground, 0) == "rgb(166, 79, 10)", "the highest is orange"
    assert driver.execute_script(ground, 1) == "rgb(33, 85, 155)", "the lowest is blue"
    regions = driver.find_elements("css selector", ".panel .region")
    assert [one.text for one in regions] == ["r", "a"]
    assert marked(driver, "edge") == [0, 2]
    driver.find_element("id", "borders").click()
    assert driver.find_elements("css selector", ".panel .region, .panel .edge") == []
    assert marked(driver, "blank") == [3]
    driver.find_element("id", "special").click()
    assert cells(driver)[3] == "<end>"
    driver.find_element("id", "ghosts").click()
    slide(driver, 0)
    ghosts = "return [...document.querySelectorAll('.panel .ghost')].map(cell => cell.textContent)"
    words = WordTokenizer(WORDS).words
    assert driver.execute_script(ghosts) == [words[3], words[12], words[13]]
    driver.find_element("id", "stable").click()
    slide(driver, 3)
    assert cells(driver)[:3] == [words[3], words[10], words[11]]


def test_of_a_thousand_samples_only_the_cards_in_sight_exist(view: Any) -> None:
    driver = view("#uid=many/test/000@a&step=128")
    total = NUM_SAMPLES + 3
    wait_for(driver, f"document.getElementById('count').textContent === '{total:,} samples'")
    assert "1,003 of 5,000 samples" in driver.find_element("id", "source").text
    press(driver, "g")
    wait_for(driver, "document.body.classList.contains('grid')")
    assert 4 < len(driver.find_elements("css selector", ".card")) < 80
    driver.execute_script("const l = document.getElementById('list'); l.scrollTop = l.scrollHeight")
    last = f'.card[data-number="{total - 1}"]'
    wait_for(driver, f"document.querySelector('{last}') !== null")
    assert len(driver.find_elements("css selector", ".card")) < 80
    choose(driver, "grade", "wrong")
    wait_for(driver, f"document.getElementById('count').textContent === '250 of {total:,} samples'")
    assert set(
        driver.execute_script(
            "return [...document.querySelectorAll('.grade')].map(g => g.ariaLabel)"
        )
    ) == {"wrong"}
    choose(driver, "method", "b")
    wait_for(driver, f"document.getElementById('count').textContent === '0 of {total:,} samples'")
    choose(driver, "method", "")
    choose(driver, "grade", "")
    driver.find_element("id", "search").send_keys("many/test/123")
    wait_for(driver, f"document.getElementById('count').textContent === '2 of {total:,} samples'")
    driver.find_element("css selector", ".card .pick").click()
    assert driver.find_element("css selector", ".panel h2").text == "a"
    assert len(cells(driver)) == 256
    for step in (0, 100, 256):
        slide(driver, step)
        assert cells(driver).count(None) == 256 - step


def test_address_opens_a_sample_and_follows_what_is_done(view: Any) -> None:
    driver = view("#uid=evil/test/0@plain&with=evil/test/0@scored&step=2&colour=none&theme=dark")
    assert value(driver, "slider") == "2"
    assert len(driver.find_elements("css selector", ".panel")) == 2
    assert value(driver, "colour") == ""
    press(driver, "ArrowRight")
    wait_for(driver, "location.hash.includes('step=') === false")  # it is the last one
    address = driver.execute_script("return location.hash")
    for part in ("uid=evil%2Ftest%2F0%40plain", "with=evil", "theme=dark", "colour=none"):
        assert part in address
    driver.execute_script("location.hash = 'uid=nobody'")
    wait_for(driver, "document.querySelectorAll('.panel').length === 1")
    assert driver.find_element("css selector", ".panel h2").text == "scored", "the first sample"


def test_dark_mode_follows_the_system_and_the_button(view: Any) -> None:
    driver = view()
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = driver.execute_script(ground)
    set_viewport(driver, width=1280, height=800, dark=True)
    dark = driver.execute_script(ground)
    assert (light, dark) == ("rgb(245, 245, 243)", "rgb(18, 19, 22)")
    wait_for(driver, "document.getElementById('theme').textContent === 'Light'")
    driver.find_element("id", "theme").click()
    assert driver.execute_script(ground) == light
    set_viewport(driver, width=420, height=860)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 420


def test_text_has_contrast_in_both_modes_and_fields_have_names(view: Any) -> None:
    """WCAG asks for 4.5 : 1. Colours of cells take black or white, whichever has more."""
    driver = view("#uid=many/test/000@a")
    contrast = """
      const part = v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
      const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number);
        return .2126 * part(r) + .7152 * part(g) + .0722 * part(b); };
      const ground = n => { for (; n; n = n.parentElement) {
        const c = getComputedStyle(n).backgroundColor; if (!/, 0\\)$/.test(c)) return c; }
        return 'rgb(255,255,255)'; };
      return [...document.querySelectorAll('body *')].filter(n => n.offsetParent
          && [...n.childNodes].some(c => c.nodeType === 3 && c.textContent.trim())
          && !n.matches(':disabled, option, script, style'))
        .map(n => { const [a, b] = [light(getComputedStyle(n).color), light(ground(n))]
            .sort((x, y) => y - x);
          return [(a + .05) / (b + .05), n.className || n.tagName]; })
        .filter(([ratio]) => ratio < 4.5)"""
    for dark in (False, True):
        set_viewport(driver, width=1280, height=800, dark=dark)
        assert driver.execute_script(contrast) == []
    unnamed = (
        "return [...document.querySelectorAll('input, select, button')].filter(n => "
        "!(n.getAttribute('aria-label') || (n.labels && n.labels.length) || n.textContent.trim()))"
        ".map(n => n.id)"
    )
    assert driver.execute_script(unnamed) == []
