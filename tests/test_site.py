"""The documentation builds without a warning and is whole in a browser; its notebook runs."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_dlm.config.files import experiments
from tests.reports.browser import browser, console, requested, set_viewport, wait_until

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a missing page or anchor would be a warning, and so an error."""
    config = pytest.importorskip("mkdocs.config", reason="MkDocs is not installed")
    from mkdocs.commands.build import build

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.chdir(ROOT)
        build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as one:
        yield one


def test_pages_have_what_hooks_and_docstrings_add(site: Path):
    pages = {str(path.parent.relative_to(site)): path for path in site.rglob("index.html")}
    texts = {name: path.read_text() for name, path in pages.items()}
    assert "<strong>masked diffusion language models</strong>" in texts["."]  # README
    assert 'data-hardware="CPU">benchmark_tiny' in texts["reference/recipes"]
    assert 'id="lit_dlm.rl.step.rl_step"' in texts["reference/rl"]
    assert "differs between RL steps" in texts["reference/rl"]  # a comment behind a field
    assert "stack_dark.png#only-dark" in texts["results/stack"]
    term = re.compile(r'<a href="../../concepts/glossary/#records" title="a trajectory that')
    assert len(term.findall(texts["how-to/tracelock"])) == 1  # where it first stands
    unmade = re.compile(r"--8<--|@@|:(?:class|func|meth):")
    assert not [name for name, text in texts.items() if unmade.search(text)]


BOXED = (
    "[...document.querySelectorAll('article table:not([class])')]"
    ".every((one) => one.closest('.md-typeset__scrollwrap'))"
)
"""Whether the theme's script has given each table its box."""
CUT = """
const { clientWidth, scrollWidth } = document.documentElement;
const isInside = (one) => {
  const { left, right } = one.getBoundingClientRect();
  return left >= 0 && right <= clientWidth + 0.5;
};
const scrolls = (one) => ["auto", "scroll"].includes(getComputedStyle(one).overflowX);
const isInBox = ({ parentElement: box }) =>
  box !== null && (scrolls(box) ? isInside(box) : isInBox(box));
const kinds = "table, pre, img, p, li, select, h1, h2, h3, nav a";
const cut = [...document.querySelectorAll(`article :is(${kinds}), footer a`)].filter(
  (one) => one.offsetParent && !isInside(one) && !isInBox(one),
);
const tooWide = scrollWidth > clientWidth ? [`a page of ${scrollWidth} pixels`] : [];
return [...tooWide, ...cut.map((one) => one.outerHTML.slice(0, 200))];
"""
"""What lies outside of the window and of every box that scrolls."""


def test_no_page_is_wider_than_the_window_and_nothing_on_it_is_cut(site: Path, driver: Any):
    cut = {}
    requested(driver), console(driver)
    for page in site.rglob("index.html"):
        driver.get(page.as_uri())
        wait_until(driver, BOXED)
        for width in (400, 800, 1400):
            set_viewport(driver, width=width)
            cut[str(page.relative_to(site)), width] = driver.execute_script(CUT)
    assert len(cut) > 3 * 40
    assert not {place: parts for place, parts in cut.items() if parts}
    assert not [url for url in requested(driver) if not url.startswith(("file:", "data:"))]
    assert not console(driver)


def test_recipes_are_filtered_by_method_model_and_hardware(site: Path, driver: Any):
    driver.get((site / "reference" / "recipes" / "index.html").as_uri())

    def shown(**chosen: str) -> tuple[set[str], list[str]]:
        """Headings of methods, and the experiments below them."""
        for name in ("method", "model", "hardware"):
            option = f"select[name={name}] option[value='{chosen.get(name, '')}']"
            driver.find_element("css selector", option).click()
        script = "return [...document.querySelectorAll('{}')].filter((one) => one.offsetParent)"
        methods, names = (
            [one.text for one in driver.execute_script(script.format(kind))]
            for kind in ("h2[id]", "[data-hardware]")
        )
        return {one.strip("¶") for one in methods}, names

    methods, names = shown()
    assert len(names) == len(experiments())
    assert shown(method="lockstep")[0] == methods - {
        "benchmark",
        "embedded",
        "finetuning",
        "rl",
        "tracelock",
    }
    assert shown(model="DiffuCoder-7B-Instruct")[1] == ["coupled_grpo_diffucoder"]
    assert shown(hardware="several GPUs", method="rl")[1][0] == "tracerl_sdar"
    assert shown(model="Dream-v0-Instruct-7B", method="tracelock", hardware="one GPU with 48 GB")[
        1
    ] == ["tracelock_outcome_dream"]
    assert shown(model="tiny", hardware="one GPU with 24 GB")[1] == []


def test_the_notebook_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What a cell ends with is what a notebook shows."""
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples" / "first_decode.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    printed, shown = [], []
    for cell in cells:
        if cell["cell_type"] == "code":
            *lines, last = ast.parse("".join(cell["source"])).body
            if not isinstance(last, ast.Expr):
                lines.append(last)
            exec(compile(ast.Module(lines, []), "first_decode.ipynb", "exec"), names)
            if isinstance(last, ast.Expr):
                shown.append(eval(compile(ast.Expression(last.value), "last line", "eval"), names))
            printed.append(capsys.readouterr().out)
    assert printed[1].count("#### 36") == 3
    assert printed[-1] == "before: '34+7=41\\n#### 41', after: '7+34=41'\n"
    decode, table, run, plots = [one for one in shown if one is not None]
    assert all("<iframe" in one._repr_html_() for one in (decode, run))
    assert list(table.columns) == ["correct", "nfe"]
    assert table.nfe["blocks"] > table.nfe["threshold"] > 1
    assert plots._repr_html_().count("<img") == 1
