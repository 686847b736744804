"""The viewer in a browser: what a person would try, and what a hostile model would."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.reports.viewer import ViewedSet, write_viewer
from lit_dlm.trajectories import Trajectory
from tests.reports.browser import browser, console, requested, set_viewport, wait_until
from tests.reports.sample_sets import EOS, MASK, WordTokenizer, record, sample, sample_set
from tests.trajectories.samples import from_history, random_history

pytestmark = pytest.mark.slow  # starts a browser

HOSTILE = [
    "</script><img src=x onerror=window.hacked=1>",
    "<svg onload=window.hacked=2>",
    "\u202egnp.exe",
]
TOKENIZER = WordTokenizer([*HOSTILE, *[f"w{number} " for number in range(40)]])
WORDS = TOKENIZER.words
NUM_SAMPLES = 1_000
STORY = "story/test/0@remasking"
PAIR = ("evil/test/0@scored", "evil/test/0@plain")


def remasked_record() -> Trajectory:
    """Twelve places in nine steps, with re-masking, edits and given tokens."""
    history = random_history(
        np.random.default_rng(4), num_generated=12, num_steps=9, remask=0.15, given=0.2, fill=0.9
    )
    history = np.where(history == 9, MASK, 3 + history % 40)  # that module's mask is 9
    return from_history(history, uid=STORY, prompt_ids=[5, 6], mask_id=MASK, vocab_size=60)


def pair() -> Iterator[Trajectory]:
    """Two decodes of one prompt; the first has confidences and proposals."""
    meta = {"regions": [["r", 0, 2], ["a", 2, 4]], "advantage": [1.0, -1.0, 0.0, None]}
    one = record([3, 10, 11, EOS], [0, 1, 2, 1], uid=PAIR[0], prompt=[3, 4], meta=meta)
    one.signals["commit_prob"] = np.array([0.25, 0.5, 1.0, np.nan], dtype=np.float16)
    # Masked places: 0 1 2 3 before step 0, then 1 2 3, then 2.
    one.signals["step_prob"] = np.array([0.2] * 4 + [0.5] * 3 + [1.0], dtype=np.float16)
    one.signals["step_proposal"] = np.array([3, 12, 13, EOS, 10, 14, EOS, 11], dtype=np.int32)
    yield one
    yield record([3, 4, 5], [2, 1, 0], uid=PAIR[1], prompt=[3, 4])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    samples = [sample(one, correct=True) for one in (*pair(), remasked_record())]
    rng = np.random.default_rng(0)
    for number in range(NUM_SAMPLES):
        tokens, order = rng.integers(6, 43, 256), rng.permutation(256)
        uid = f"many/test/{number // 2:03d}@{'ab'[number % 2]}"
        one = record(tokens, order, uid=uid, vocab_size=60)
        samples.append(sample(one, correct=number % 4 > 0, task="many"))
    shown = sample_set(samples, label="hostile <b>set</b>", num_available=5_000)
    path = tmp_path_factory.mktemp("viewer") / "page.html"
    pieces = TokenPieces(TOKENIZER)
    write_viewer(path, [ViewedSet(samples=shown, pieces=pieces)], title="<i>title</i>")
    return path.as_uri()


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as found:
        yield found


class View:
    """The page, and what a person does with it."""

    def __init__(self, driver: Any, page: str) -> None:
        self.driver, self.page = driver, page

    def open(self, address: str = "") -> None:
        self.driver.get("about:blank")
        self.driver.get(self.page + address)

    def js(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def wait(self, condition: str) -> None:
        wait_until(self.driver, condition)

    def all(self, css: str) -> list[Any]:
        return self.driver.find_elements("css selector", css)

    def texts(self, css: str) -> list[str]:
        return [one.text for one in self.all(css)]

    def text(self, css: str) -> str:
        """Its words, however they are laid out."""
        (found,) = self.texts(css)
        return " ".join(found.split())

    def click(self, css: str) -> None:
        self.all(css)[0].click()

    def cells(self, panel: int = 0) -> list[str | None]:
        """Texts of the tokens; none where a mask is."""
        script = (
            "return [...document.querySelectorAll('.panel')[arguments[0]]"
            ".querySelectorAll('.cell')]"
            ".map(cell => cell.classList.contains('mask') ? null : cell.textContent)"
        )
        return self.js(script, panel)

    def marked(self, name: str) -> list[int]:
        """Places of the tokens with a mark."""
        return [int(one.get_attribute("data-position")) for one in self.all(f".panel .cell.{name}")]

    def slide(self, step: int) -> None:
        self.set("slider", str(step), "input")

    def set(self, name: str, wanted: str, event: str = "change") -> None:
        self.js(
            "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
            "s.dispatchEvent(new Event(arguments[2], {bubbles: true}))",
            *(name, wanted, event),
        )

    def value(self, name: str) -> str:
        return self.js("return document.getElementById(arguments[0]).value", name)

    def press(self, key: str) -> None:
        """At once: nothing that the page has put off happens before."""
        self.js(
            "document.body.dispatchEvent("
            "new KeyboardEvent('keydown', {key: arguments[0], bubbles: true}))",
            key,
        )


@pytest.fixture
def view(driver: Any, page: str) -> Iterator[View]:
    """Whatever a test did, nothing may have gone wrong or left the page."""
    set_viewport(driver)
    driver.get("about:blank")
    requested(driver), console(driver)
    found = View(driver, page)
    yield found
    assert console(driver) == []
    assert {address.partition("#")[0] for address in requested(driver)} <= {page, "about:blank"}
    assert found.js("return window.hacked") is None


def test_slider_shows_every_canvas_of_the_record(view: View):
    """Masks, overwritten tokens and given ones at every step are those of ``all_states``."""
    view.open(f"#uid={STORY}")
    one = remasked_record()
    assert one.superseded is not None
    for step, state in enumerate(one.all_states()):
        view.slide(step)
        expected = [None if token == MASK else WORDS[token] for token in state]
        assert view.cells() == expected, f"step {step}"
        assert view.marked("new") == ([] if step == 0 else one.committed_at(step - 1).tolist())
    assert view.marked("given") == np.flatnonzero(one.given).tolist()


def test_two_decodes_stand_side_by_side_and_share_the_slider(view: View):
    view.open(f"#uid={PAIR[0]}&step=0")
    view.press("m")
    assert view.texts(".panel h2") == ["scored", "plain"]
    left, right = view.all(".panel")
    assert right.rect["x"] > left.rect["x"] + left.rect["width"]
    view.slide(1)
    assert [text is None for text in view.cells(0)] == [False, True, True, True]
    assert [text is None for text in view.cells(1)] == [True, True, False]
    view.slide(3)
    # Place 0 holds the same token in both; the others differ (a hidden special token has no mark).
    assert view.marked("differs") == [1, 2, 1, 2]
    view.set("other", "")
    assert len(view.all(".panel")) == 1


def test_hostile_tokens_are_shown_and_not_run(view: View):
    view.open(f"#uid={PAIR[1]}")
    assert view.cells() == HOSTILE
    assert HOSTILE[0] in view.text("#prompt")
    assert view.all("main img, .layout svg[onload], h1 i") == []
    assert view.text("#title") == "<i>title</i>"
    # Even a handler that got in would not run: the policy forbids it.
    view.js("document.getElementById('prompt').setAttribute('onclick', 'hacked=3')")
    view.click("#prompt")
    assert view.js("return window.hacked") is None
    assert "Content Security Policy" in wait_until(view.driver, console)[0]


def test_details_tell_what_was_recorded(view: View):
    view.open(f"#uid={PAIR[0]}&colour=confidence")
    view.js("document.querySelectorAll('.panel .cell')[1].focus()")
    for expected in (
        f'"{WORDS[10]}"', "token id 10", "position 1 (canvas 3)", "region r",
        "written in step 2 of 3", "confidence 0.500", "advantage -1",
        f'1: "{WORDS[12]}" 0.20', f'2: "{WORDS[10]}" 0.50', f'2: wrote "{WORDS[10]}"',
    ):  # fmt: skip
        assert expected in view.text("#details")
    # The arrow keys walk along the tokens that have the focus.
    view.driver.switch_to.active_element.send_keys("\ue014")
    assert "position 2 (canvas 4)" in view.text("#details")
    view.slide(1)
    assert "confidence" not in view.text("#details"), "it is a mask now"


def test_colours_regions_specials_and_proposals(view: View):
    view.open(f"#uid={PAIR[0]}")
    disabled = [one.get_attribute("value") for one in view.all("#colour option:disabled")]
    assert set(disabled) == {
        "entropy", "margin", "log_prob", "policy_score", "value", "token_rewards",
    }  # fmt: skip
    view.set("colour", "advantage")
    ground = "return [...document.querySelectorAll('.panel .cell')].map(c => c.style.background)"
    # The highest is orange, the lowest blue.
    assert view.js(ground)[:2] == ["rgb(166, 79, 10)", "rgb(33, 85, 155)"]
    assert view.texts(".panel .region") == ["r", "a"]
    assert view.marked("edge") == [0, 2]
    view.click("#borders")
    assert view.all(".panel .region, .panel .edge") == []
    assert view.marked("blank") == [3]
    view.click("#special")
    assert view.cells()[3] == "<end>"
    view.click("#ghosts")
    view.slide(0)
    ghosts = "return [...document.querySelectorAll('.panel .ghost')].map(cell => cell.textContent)"
    assert view.js(ghosts) == [WORDS[3], WORDS[12], WORDS[13]]
    view.click("#stable")
    view.slide(3)
    assert view.cells()[:3] == [WORDS[3], WORDS[10], WORDS[11]]


def test_of_a_thousand_samples_only_the_cards_in_sight_exist(view: View):
    total = NUM_SAMPLES + 3

    def wait_for_count(shown: str) -> None:
        view.wait(f"document.getElementById('count').textContent === '{shown} samples'")

    view.open("#uid=many/test/000@a&step=128")
    wait_for_count(f"{total:,}")
    assert "1,003 of 5,000 samples" in view.text("#source")
    view.press("g")
    view.wait("document.body.classList.contains('grid')")
    assert 4 < len(view.all(".card")) < 80
    view.js("const l = document.getElementById('list'); l.scrollTop = l.scrollHeight")
    view.wait(f"document.querySelector('.card[data-number=\"{total - 1}\"]') !== null")
    assert len(view.all(".card")) < 80
    view.set("grade", "wrong")
    wait_for_count(f"250 of {total:,}")
    grades = view.js("return [...document.querySelectorAll('.grade')].map(g => g.ariaLabel)")
    assert set(grades) == {"wrong"}
    view.set("method", "b")
    wait_for_count(f"0 of {total:,}")
    view.set("method", "")
    view.set("grade", "")
    view.all("#search")[0].send_keys("many/test/123")
    wait_for_count(f"2 of {total:,}")
    view.click(".card .pick")
    assert view.texts(".panel h2") == ["a"]
    assert len(view.cells()) == 256
    for step in (0, 100, 256):
        view.slide(step)
        assert view.cells().count(None) == 256 - step


def test_address_opens_a_sample_and_follows_what_is_done(view: View):
    view.open(f"#uid={PAIR[1]}&with={PAIR[0]}&step=2&colour=none&theme=dark")
    assert (view.value("slider"), view.value("colour")) == ("2", "")
    assert len(view.all(".panel")) == 2
    view.press("ArrowRight")
    view.wait("location.hash.includes('step=') === false")  # it is the last one
    address = view.js("return location.hash")
    for part in ("uid=evil%2Ftest%2F0%40plain", "with=evil", "theme=dark", "colour=none"):
        assert part in address
    view.js("location.hash = 'uid=nobody'")
    view.wait("document.querySelectorAll('.panel').length === 1")
    assert view.texts(".panel h2") == ["scored"], "the first sample"


def test_dark_mode_follows_the_system_and_the_button(view: View):
    view.open()
    ground = "return getComputedStyle(document.body).backgroundColor"
    assert view.js(ground) == "rgb(245, 245, 243)"
    set_viewport(view.driver, dark=True)
    assert view.js(ground) == "rgb(18, 19, 22)"
    view.wait("document.getElementById('theme').textContent === 'Light'")
    view.click("#theme")
    assert view.js(ground) == "rgb(245, 245, 243)"
    set_viewport(view.driver, width=420, height=860)
    assert view.js("return document.documentElement.scrollWidth") <= 420


def test_text_has_contrast_in_both_modes_and_fields_have_names(view: View):
    """WCAG asks for 4.5 : 1. Colours of cells take black or white, whichever has more."""
    view.open("#uid=many/test/000@a")
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
        set_viewport(view.driver, dark=dark)
        assert view.js(contrast) == []
    unnamed = (
        "return [...document.querySelectorAll('input, select, button')].filter(n => "
        "!(n.getAttribute('aria-label') || (n.labels && n.labels.length) || n.textContent.trim()))"
        ".map(n => n.id)"
    )
    assert view.js(unnamed) == []
