"""The pictures of docs/report.md, from a report: python -m tests.report.pictures plan.html docs."""

import sys
from io import BytesIO
from pathlib import Path
from typing import Any

from tests.report.browser import browser, opened

CHOOSE = """
document.querySelector('.node.operator[data-text^="self_attn.q_proj"]').dispatchEvent(new MouseEvent("click"));
document.querySelector(".details").scrollTop = 240;
document.querySelector(".toolbar").scrollIntoView();
window.scrollBy(0, -60);
"""


def save(driver: Any, path: Path) -> None:
    """With 128 colours: flat ones look the same, in a third of the bytes."""
    from PIL import Image

    picture = Image.open(BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    picture.quantize(128).save(path, optimize=True)


def main(page: Path, folder: Path) -> None:
    with browser() as driver:
        opened(driver, page.resolve())
        save(driver, folder / "report_light.png")
        driver.execute_script(CHOOSE)
        driver.find_element("id", "theme").click()
        save(driver, folder / "report_dark.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
