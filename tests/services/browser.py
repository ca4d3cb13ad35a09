"""Headless Chromium, driven by Selenium: `python -m services.browser PAGE.html PICTURE.png` takes a picture."""

from __future__ import annotations

import base64
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

PROGRAMS = ("chromium", "chromedriver")
# As root, in a sandbox without a network: Chromium would look for updates and for its maker's servers.
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync".split()
FLAGS += ["--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars"]


@contextmanager
def chromium() -> Iterator[Chrome]:
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    browser, driver = (shutil.which(name) for name in PROGRAMS)
    assert browser and driver, f"{' and '.join(PROGRAMS)} are not installed"
    options = ChromeOptions()
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in FLAGS:
        options.add_argument(flag)
    window = Chrome(options, ChromeService(driver))
    try:
        yield window
    finally:
        window.quit()


def show(
    browser: Chrome,
    page: Path | str,
    *,
    width: int,
    scheme: str = "light",
    unfolds: bool = True,
) -> None:
    """Open a file or an address as a screen of `width` pixels shows it, `scheme` light or dark, and unfold it."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(page if isinstance(page, str) else page.resolve().as_uri())
    if unfolds:
        browser.execute_script(
            "document.querySelectorAll('details').forEach(each => { each.open = true })"
        )


def take_picture(browser: Chrome, path: Path, *, height: int) -> None:
    """Write the first `height` pixels of the page that is open."""
    width = browser.execute_script("return window.innerWidth")
    area = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    shot = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"clip": area, "captureBeyondViewport": True}
    )
    path.write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    with chromium() as window:
        show(window, Path(sys.argv[1]), width=1200, unfolds=False)
        take_picture(window, Path(sys.argv[2]), height=980)
