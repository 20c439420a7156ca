"""Headless Chromium for tests and benchmarks: found where the distribution installs it, driven through selenium.

Without a browser these tests are skipped, and say so; with TAPAS_BROWSER=required that is a failure.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1400,1000",
    "--force-device-scale-factor=1",
)  # fmt: skip
BROWSERS, DRIVERS = ("chromium", "chromium-browser", "google-chrome"), ("chromedriver",)


def found(names: tuple[str, ...]) -> str:
    return next((path for name in names if (path := shutil.which(name))), "")


def missing() -> str:
    """What there is to install before a page can be opened; "" if nothing."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    wanted = {"chromium": BROWSERS, "chromedriver": DRIVERS}
    return ", ".join(f"{name} is not installed" for name, names in wanted.items() if not found(names))


def skipped() -> str:
    """Why tests that need a browser are left out; "" where they are run, and fail if there is none."""
    return "" if os.environ.get("TAPAS_BROWSER") == "required" or not missing() else f"no browser: {missing()}"


@contextmanager
def browser() -> Iterator[Any]:
    """A browser with an empty profile of its own."""
    if missing():
        raise RuntimeError(missing())
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = found(BROWSERS)
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(found(DRIVERS)))
        try:
            yield driver
        finally:
            driver.quit()


def complaints(driver: Any) -> list[str]:
    """What the page wrote to the console since the last time."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def opened(driver: Any, page: Path) -> float:
    """Open a page; the milliseconds from navigation until all of it was drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    driver.get(page.as_uri())
    mark = "return performance.getEntriesByName('tapas-drawn')[0]?.startTime"
    return float(WebDriverWait(driver, 20).until(lambda d: d.execute_script(mark)))
