"""The pages in a real browser: nothing overflows, text can be read, a tap shows the drafts."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

from eval.report.schema import read_report, write_report
from scripts.compare import main as compare
from tests.helpers.report_rows import report_with_readings
from tests.test_frozen import PLACE, RUNS

ROOT = Path(__file__).resolve().parents[3]
WIDTHS = (1300, 390)

# A window is never narrower than 500 pixels; a frame is as narrow as a phone.
FRAME = """<!doctype html><body style="margin: 0"><script>
addEventListener("message", event => document.body.dataset.found = event.data);
</script><iframe src="measured.html" style="border: 0; width: {width}px; height: 900px"></iframe>
"""
# All that is folded is opened; each round takes the focus once, as a tap gives it.
MEASURE = """
function rgba(text) {
  const n = text.match(/[\\d.]+/g).map(Number);
  return n.length < 4 ? [...n, 1] : n;
}
function background(element) {
  for (let one = element; one; one = one.parentElement) {
    const colour = rgba(getComputedStyle(one).backgroundColor);
    if (colour[3] === 1) return colour;
  }
  return [255, 255, 255, 1];
}
function light(colour) {
  const [r, g, b] = colour.slice(0, 3).map(x => x / 255)
    .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function contrast(element) {
  const style = getComputedStyle(element), svg = element instanceof SVGElement;
  const [a, b] = [light(rgba(svg ? style.fill : style.color)), light(background(element))];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}
function outside(element) {
  const box = element.getBoundingClientRect();
  return box.width > 0 && (box.left < -0.5 || box.right > innerWidth + 0.5);
}
addEventListener("load", () => {
  document.querySelectorAll("details").forEach(one => one.open = true);
  const all = [...document.querySelectorAll("main *")];
  const free = all.filter(one => !one.closest(".wide") || one.matches(".wide"));
  const texts = all.filter(one => [...one.childNodes].some(
    node => node.nodeType === 3 && node.textContent.trim()) && one.checkVisibility());
  const faint = texts.filter(one => contrast(one) < 4.5)
    .map(one => `${one.tagName}.${one.className} ${contrast(one).toFixed(2)} ${one.textContent}`);
  const found = {
    width: innerWidth, scroll: document.scrollingElement.scrollWidth,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    outside: free.filter(outside).map(one => one.outerHTML.slice(0, 200)),
    faint: faint, rounds: 0, unseen: [], texts: texts.length,
    folded: document.querySelectorAll("details").length,
  };
  for (const round of document.querySelectorAll(".round")) {
    const drafts = round.querySelector(".drafts");
    const before = getComputedStyle(drafts).display;
    round.focus();
    const seen = getComputedStyle(drafts).display === "block" && before === "none";
    const fits = document.scrollingElement.scrollWidth <= innerWidth && !outside(drafts);
    found.rounds += 1;
    if (!seen || !fits) found.unseen.push(round.textContent);
    round.blur();
  }
  parent.postMessage(JSON.stringify(found), "*");
});
"""


@pytest.fixture(scope="session")
def chromium():
    """Without a browser, tests are skipped aloud; where CI is set, they fail."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    if os.environ.get("CI"):
        pytest.fail("no Chromium: bash scripts/chromium.sh")
    warnings.warn("NO PAGE WAS LOOKED AT: bash scripts/chromium.sh installs Chromium", stacklevel=1)
    return pytest.skip("no page was looked at: there is no Chromium")


@pytest.fixture
def look(chromium, tmp_path):
    """look(page, width, dark) -> what MEASURE finds in it."""

    def measure(page, width, dark):
        text, frame = page.read_text(encoding="utf-8"), tmp_path / "frame.html"
        text = text.replace("</body>", f"<script>{MEASURE}</script></body>")
        (tmp_path / "measured.html").write_text(text, encoding="utf-8")
        frame.write_text(FRAME.format(width=width))
        command = [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--window-size={max(width, 500)},900", "--virtual-time-budget=2000", "--dump-dom",
            frame.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        found = re.search(r'data-found="([^"]*)"', done.stdout)
        assert found, done.stderr[-2000:]
        return json.loads(html.unescape(found[1]))

    return measure


def check(found, width, dark):
    assert (found["width"], found["dark"]) == (width, dark)
    assert found["scroll"] <= width
    assert found["outside"] == []
    assert found["unseen"] == []
    assert found["faint"] == []
    assert found["texts"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_report_fits_and_can_be_read(look, tmp_path, width, dark):
    write_report(report_with_readings(), tmp_path)
    found = look(tmp_path / "report.html", width, dark)
    check(found, width, dark)
    assert found["rounds"] >= 8
    assert found["folded"] > 8


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_stored_report_still_makes_a_page(look, tmp_path, name):
    write_report(read_report(ROOT / PLACE / name / "report.json"), tmp_path)
    check(look(tmp_path / "report.html", 390, False), 390, False)


@pytest.mark.slow
def test_a_leaderboard_has_the_same_style(look, tmp_path):
    write_report(report_with_readings(), tmp_path / "run")
    compare([str(tmp_path / "run" / "report.json"), f"script.out={tmp_path / 'board'}"])
    for width, dark in ((1300, True), (390, False)):
        check(look(tmp_path / "board" / "leaderboard.html", width, dark), width, dark)
    pages = [tmp_path / "run" / "report.html", tmp_path / "board" / "leaderboard.html"]
    styles = {page.read_text().split("<style>")[1].split("</style>")[0] for page in pages}
    assert len(styles) == 1
