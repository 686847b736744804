"""A headless Chromium for tests of pages; tests skip where there is none."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    *("headless=new", "disable-gpu", "disable-dev-shm-usage", "disable-background-networking"),
    *("no-first-run", "window-size=1280,800"),
    "no-sandbox",  # containers run as root
)


@contextmanager
def browser() -> Iterator[Any]:
    """A driver whose log of requests and console messages is kept from the start."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium")
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not (binary and shutil.which("chromedriver")):
        pytest.skip("no browser or driver (Debian: apt install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for option in OPTIONS:
        options.add_argument(f"--{option}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        driver.set_page_load_timeout(120)
        driver.set_script_timeout(120)
        yield driver
    finally:
        driver.quit()


def wait_until(driver: Any, condition: Any) -> Any:
    """What a function of the driver, or an expression in the page, gives once it holds."""
    from selenium.webdriver.support.ui import WebDriverWait

    if isinstance(condition, str):
        script = f"return {condition}"
        return wait_until(driver, lambda one: one.execute_script(script))
    return WebDriverWait(driver, 60, poll_frequency=0.05).until(condition)


def set_viewport(driver: Any, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
    """Size of the page and the system's colour scheme; waits until the page has taken them on."""
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    taken = f"matchMedia('(prefers-color-scheme: dark)').matches === {str(dark).lower()}"
    wait_until(driver, f"innerWidth === {width} && innerHeight === {height} && {taken}")


def requested(driver: Any) -> list[str]:
    """Addresses that pages asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
    return [one["request"]["url"] for one in sent]


def console(driver: Any) -> list[str]:
    """Console messages and errors of pages since the last call."""
    return [entry["message"] for entry in driver.get_log("browser")]
