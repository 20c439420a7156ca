"""The page in a real browser: what a reader does with it, and what a checker of accessibility says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tapas.plan.plan import load_plan
from tapas.report.html import View, write_page
from tests.cli.test_cli import MODEL, run
from tests.report import browser

AXE = Path(__file__).parent / "axe" / "axe.min.js"
pytestmark = pytest.mark.skipif(bool(browser.skipped()), reason=browser.skipped())


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan with its alternatives, and two plans compared."""
    folder = tmp_path_factory.mktemp("pages")
    one, two = folder / "one.json", folder / "two.json"
    done = run("plan", *MODEL, "--mesh", "2x4", "--pin", "*=megatron", "-o", one, "--report", folder / "page.html")
    assert done.exit_code == 0, done.output
    assert run("plan", *MODEL, "--mesh", "2x4", "--no-baselines", "-o", two).exit_code == 0
    write_page(folder / "two.html", [View(load_plan(p), letter=x, name=p.name) for p, x in ((one, "a"), (two, "b"))])
    return folder


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser.browser() as made:
        yield made


@pytest.fixture
def page(driver: Any, pages: Path) -> Iterator[Any]:
    browser.opened(driver, pages / "page.html")
    yield driver
    assert browser.complaints(driver) == []


def all_of(driver: Any, selector: str) -> list[Any]:
    return driver.find_elements("css selector", selector)


def one_of(driver: Any, selector: str) -> Any:
    return driver.find_element("css selector", selector)


def press(driver: Any, element: Any, key: str) -> None:
    """Send a key to an element that has the focus, as a keyboard does."""
    driver.execute_script("arguments[0].focus()", element)
    driver.switch_to.active_element.send_keys(key)


def serious(driver: Any) -> list[str]:
    driver.execute_script(AXE.read_text())
    found = driver.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
    grave = [v for v in found["violations"] if v["impact"] in ("serious", "critical")]
    return [f"{v['id']}: {v['help']}: {[n['html'][:160] for n in v['nodes']][:3]}" for v in grave]


def test_a_block_opens_and_closes_by_keyboard(page: Any) -> None:
    closed = one_of(page, '.node.block[aria-expanded="false"]')
    place, before = closed.get_attribute("data-place"), len(all_of(page, ".node.operator"))
    press(page, closed, "\ue007")  # Enter
    assert one_of(page, f'[data-place="{place}"]').get_attribute("aria-expanded") == "true"
    assert len(all_of(page, ".node.operator")) > before
    press(page, one_of(page, f'[data-place="{place}"]'), "\ue007")
    assert len(all_of(page, ".node.operator")) == before


def test_an_operator_shows_how_it_is_split_and_what_else_it_could_do(page: Any) -> None:
    query = one_of(page, '.node.operator[data-text^="self_attn.q_proj"]')
    assert "output features" in query.get_attribute("textContent")
    assert "0.00 µs" not in one_of(page, ".canvas").get_attribute("textContent"), "what is nothing is not drawn"
    press(page, query, "\ue007")
    text = one_of(page, ".details").text
    assert "self_attn.q_proj" in text and "factors: d0 d1 k, n k -> d0 d1 n" in text
    assert "output features" in text and "8 × 64 × 256" in text and "a device: " in text
    assert "What else it could do" in text
    press(page, query, "\ue015")  # arrow down: the next one
    assert page.switch_to.active_element.get_attribute("data-place") != query.get_attribute("data-place")


def test_the_filter_leaves_what_is_looked_for(page: Any) -> None:
    field = one_of(page, ".filter")
    field.send_keys("q_proj")
    left = all_of(page, ".node.operator:not(.dim)")
    assert [e.get_attribute("data-text").split()[0] for e in left] == ["self_attn.q_proj"]
    assert " of " in one_of(page, ".found").text
    assert {row.text.split("\n")[0].split()[0] for row in all_of(page, ".weights tbody tr:not([hidden])")} == {
        "model.layers.*.self_attn.q_proj.weight"
    }
    field.send_keys("\ue007")
    assert "self_attn.q_proj" in one_of(page, ".details").text
    field.clear()
    field.send_keys("x")
    field.send_keys("\ue003")
    assert not all_of(page, ".node.operator.dim")
    one_of(page, ".legend button").click()
    assert all_of(page, ".node.operator.dim") and one_of(page, '.legend [aria-pressed="true"]')


def test_a_weight_is_shown_with_who_holds_what(page: Any) -> None:
    from selenium.webdriver.support.ui import Select

    select = Select(one_of(page, "select.weight"))
    names = [option.text for option in select.options]
    select.select_by_index(next(i for i, name in enumerate(names) if "down_proj" in name))
    assert len(all_of(page, ".devices button")) == 8
    assert "Device 0 (x = 0, y = 0) holds all 256 of dim 0, 0 to 127 of dim 1: 25.0%" in one_of(page, ".slice").text
    press(page, one_of(page, '.devices [aria-checked="true"]'), "\ue014")  # arrow right
    assert "Device 1 (x = 0, y = 1) holds all 256 of dim 0, 128 to 255 of dim 1" in one_of(page, ".slice").text


@pytest.mark.parametrize(("name", "looks"), [("page.html", 2), ("two.html", 1)])
def test_light_and_dark_and_no_serious_finding(driver: Any, pages: Path, name: str, looks: int) -> None:
    """The same styles for both pages: one theme is enough for the second."""
    browser.opened(driver, pages / name)
    themes = []
    for _ in range(looks):
        themes.append(driver.execute_script("return getComputedStyle(document.body).backgroundColor"))
        if all_of(driver, "[data-show=b]"):
            one_of(driver, "[data-show=b]").click()
        driver.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
        visible = "[data-plan]:not([hidden]) "
        press(driver, one_of(driver, f"{visible}.node.operator"), "\ue007")
        assert serious(driver) == []
        one_of(driver, "#theme").click()
    assert len(set(themes)) == looks
    assert browser.complaints(driver) == []


def test_a_reader_who_wants_it_dark_gets_it_dark(driver: Any, pages: Path) -> None:
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    driver.execute_script("localStorage.clear()")
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        browser.opened(driver, pages / "page.html")
        assert driver.execute_script("return document.documentElement.dataset.theme") == "dark"
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_step_is_zoomed_and_says_what_runs_when(page: Any) -> None:
    from selenium.webdriver import ActionChains, Keys

    canvas, drawn = one_of(page, ".streams canvas"), "return document.querySelector('.streams canvas').toDataURL()"
    whole = page.execute_script(drawn)
    press(page, canvas, "+")
    near = page.execute_script(drawn)
    assert near != whole
    press(page, canvas, Keys.HOME)
    assert page.execute_script(drawn) == whole
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    height = canvas.size["height"]
    ActionChains(page).move_to_element_with_offset(canvas, 0, -height // 2 + 22).perform()  # on the row of blocks
    assert "ward: " in one_of(page, ".under-pointer").text  # of a forward or backward pass


def test_two_plans_are_compared(driver: Any, pages: Path) -> None:
    browser.opened(driver, pages / "two.html")
    assert "Plan B (two.json) is" in one_of(driver, ".comparison").text
    assert "Work split otherwise" in one_of(driver, ".comparison").text
    one_of(driver, "[data-show=b]").click()
    assert one_of(driver, "#plan-b").is_displayed() and not one_of(driver, "#plan-a").is_displayed()
    assert all_of(driver, "#plan-b .node.operator")
    assert browser.complaints(driver) == []


def test_nothing_is_asked_of_the_network(page: Any) -> None:
    loaded = page.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []
