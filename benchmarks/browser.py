"""A headless Chromium of the system, with a profile of its own that is thrown away."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator

from playwright.sync_api import Page, sync_playwright

_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def find_chromium() -> str | None:
    """Path of the program; None when it is not installed (Debian: package `chromium`)."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextlib.contextmanager
def open_page(program: str, *, width: int = 1200, height: int = 800) -> Iterator[Page]:
    """An empty page while the context lasts."""
    with (
        tempfile.TemporaryDirectory(prefix="dynamo-lite-browser-") as profile,
        sync_playwright() as playwright,
        playwright.chromium.launch_persistent_context(
            profile,
            executable_path=program,
            headless=True,
            args=_FLAGS,
            viewport={"width": width, "height": height},
        ) as context,
    ):
        yield context.pages[0] if context.pages else context.new_page()
