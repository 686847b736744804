"""A headless Chromium for tests of pages; tests skip where there is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def why_not() -> str | None:
    """What is missing to drive a browser."""
    if not any(map(shutil.which, BROWSERS)):
        return f"no browser: expected one of {', '.join(BROWSERS)} (Debian: apt install chromium)"
    if not shutil.which("chromedriver"):
        return "no chromedriver (Debian: apt install chromium-driver)"
    try:
        import selenium  # noqa: F401
    except ModuleNotFoundError:
        return "no selenium (pip install selenium)"
    return None


@contextmanager
def browser(*, width: int = 1280, height: int = 800) -> Iterator[Any]:
    """A driver whose log of requests and console messages is kept from the start."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
    for argument in (
        "--headless=new",
        "--no-sandbox",  # containers run as root
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--no-first-run",
        f"--window-size={width},{height}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.set_page_load_timeout(120)
        driver.set_script_timeout(120)
        yield driver
    finally:
        driver.quit()


def set_viewport(driver: Any, *, width: int, height: int, dark: bool = False) -> None:
    """Size of the page and the system's colour scheme; waits until the page has taken them on."""
    from selenium.webdriver.support.ui import WebDriverWait

    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    taken = (
        "return innerWidth === arguments[0] && innerHeight === arguments[1] && "
        "matchMedia('(prefers-color-scheme: dark)').matches === arguments[2]"
    )
    WebDriverWait(driver, 60, poll_frequency=0.05).until(
        lambda one: one.execute_script(taken, width, height, dark)
    )


def requested(driver: Any) -> list[str]:
    """Addresses that pages asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]


def console(driver: Any) -> list[str]:
    """Console messages and errors of pages since the last call."""
    return [entry["message"] for entry in driver.get_log("browser")]
