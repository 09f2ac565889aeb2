"""Text on the pages of `raylt report` and in the picture of a search, as a reader sees it in a window of 1200 px."""

import asyncio

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

import raylt
from raylt.config import load
from raylt.studies.definition import define
from raylt.studies.report.html import write_report
from raylt.studies.study import Study, of_runs
from tune import search, spaces_of

browser = pytest.importorskip("browser", reason="the browser is driven with aiohttp")
pytestmark = [pytest.mark.slow]

WINDOW_PX = 1200
SMALLEST_PX = 11
DATA = {"clients": 12, "imbalance": 10}
# the height in px of each piece of text, with the scale of the drawing around it
SIZES = """(() => {
  document.querySelectorAll('details').forEach(each => each.open = true)
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  const sizes = []
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement
    const text = walker.currentNode.textContent.trim()
    if (!text || !parent.getClientRects().length) continue
    let size = parseFloat(getComputedStyle(parent).fontSize)
    if (parent.ownerSVGElement) {
      const scale = parent.getScreenCTM()
      size *= Math.sqrt(Math.abs(scale.a * scale.d - scale.b * scale.c))
    }
    sizes.push([size, text, !!parent.ownerSVGElement])
  }
  return sizes
})()"""


def run_report(folder):
    run = raylt.run(
        "fedper", data={"source": "digits", **DATA}, rounds=2, evaluation={"personal": 1}, fleet="local", out=folder
    )
    return write_report(of_runs([run.folder]), folder / "report.html")


def study_report(folder):
    arms = {
        "fedavg": "fedavg",
        "an arm with a name of many words": {"method": "fedprox"},
        "ditto": "ditto",
        "ccvr": "ccvr",
    }
    base = {"data": {"source": "digits", **DATA}, "federation": {"rounds": 2}, "evaluation": {"personal": 1}}
    cells = {"data.alpha": [0.1, 1]}
    tree = {"name": "s", "arms": arms, "base": base, "cells": cells, "seeds": 2, "claims": ["ccvr > fedavg on few"]}
    study = Study.create(define(tree), folder)
    assert study.run(parallel=1) == []
    return write_report(study, folder / "report.html")


async def sizes_on(page, url):
    async with page:
        await page.send("Page.navigate", url=url)
        await page.wait_for(f"location.href === {url!r} && document.readyState === 'complete'")
        return await page.run(SIZES)


@pytest.mark.skipif(browser.BROWSER is None, reason="no browser is installed")
@pytest.mark.parametrize("write", [run_report, study_report])
def test_text_of_a_report_is_at_least_11_px_high(tmp_path, write):
    url = write(tmp_path).as_uri()
    with browser.browser(tmp_path / "profile", (WINDOW_PX, 800)) as page:
        sizes = asyncio.run(sizes_on(page, url))
    assert {drawn for _, _, drawn in sizes} == {True, False}
    assert [(size, text) for size, text, _ in sizes if size < SMALLEST_PX] == []


def test_text_of_a_searchs_picture_is_at_least_11_px_high(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, dpi: figures.append((figure, dpi)))
    config = load(None, ["method=fedprox", "data.clients=4", "federation.rounds=1", "local.epochs=1"])
    ranges = {"local.lr": "loguniform(0.01,0.3)", "local.batch": "choice(16,32)", "local.epochs": "choice(1,2)"}
    methods = ["fedprox", "ditto", "moon"]
    spaces = spaces_of(methods, ranges, config)
    search(config, spaces, 1, scheduler="none", out=tmp_path, name="s", fleet="local", parallel=1)
    [(figure, dpi)] = figures
    scale = min(1, WINDOW_PX / (dpi * figure.get_figwidth()))
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    assert len(texts) > 20
    assert [text for text in texts if text.get_fontsize() * dpi / 72 * scale < SMALLEST_PX] == []
