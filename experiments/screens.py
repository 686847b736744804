"""Takes pictures of a run's report and viewer: wide and on a phone, light and dark.

``screens.py runs/quickstart docs/how-to/view/screens`` shows what ``lit-dlm report``
wrote to a folder. Needs Chromium and its driver, and selenium (``make install``).
"""

from __future__ import annotations

import argparse
import base64
import io
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver

WIDTHS = {1400: 1000, 390: 1100}
"""Height of the picture by width of the window, in CSS pixels."""


def picture(driver: Any, address: str, width: int, theme: str) -> Image.Image:
    """Returns a picture of the top of a page in a window of ``width`` CSS pixels."""
    size = {"width": width, "height": WIDTHS[width]}
    metrics = {**size, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get("about:blank")  # changing the fragment alone would not reload the page
    driver.get(address)
    overflow = driver.execute_script(
        "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    if overflow > 0:
        raise ValueError(f"{address}: is {overflow} pixels wider than a window of {width}")
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    return Image.open(io.BytesIO(base64.b64decode(shot["data"])))


def main() -> None:
    """Writes ``{page}_{width}_{theme}.png`` files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder with report.html and traces.html")
    parser.add_argument("out", type=Path, help="receives the pictures")
    parser.add_argument("--fragment", default="", help="what traces.html is opened at, behind #")
    options = parser.parse_args()
    chrome = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        chrome.add_argument(argument)
    chrome.binary_location = shutil.which("chromium") or ""
    options.out.mkdir(parents=True, exist_ok=True)
    driver = webdriver.Chrome(
        options=chrome, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )
    try:
        for page, fragment in (("report", ""), ("traces", options.fragment)):
            address = (options.run / f"{page}.html").resolve().as_uri()
            for width in WIDTHS:
                for theme in ("light", "dark"):
                    colours = f"{fragment}&theme={theme}" if page == "traces" else ""
                    shown = picture(driver, f"{address}#{colours}", width, theme)
                    few = shown.convert("RGB").quantize(256, Image.Quantize.MEDIANCUT)
                    few.save(options.out / f"{page}_{width}_{theme}.png", optimize=True)
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
