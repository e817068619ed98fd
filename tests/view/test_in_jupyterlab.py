"""The widget in a real JupyterLab, where the notebook has keys of its own."""

from __future__ import annotations

import importlib.util

import pytest
from browser import NEEDS_CHROMIUM, Browser
from lab import lab, wait_until

pytestmark = [
    pytest.mark.campaign,  # `test_in_browser.py` has what the page does for it: keys are its own, and the slider's
    NEEDS_CHROMIUM,
    pytest.mark.skipif(importlib.util.find_spec("jupyterlab") is None, reason="pip install jupyterlab"),
]

CELLS = (
    """
import torch
import splitkit as sk

layers = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(6)]
gm = sk.capture(torch.nn.Sequential(*layers), torch.ones(4, 16))
widget = sk.split(gm, sk.policies.Stages(3)).view(live=True)
widget
""",
    "after = 1",
)
SLIDER = "document.querySelector('input[aria-label=stages]')"
ALL_CELLS = "[...document.querySelectorAll('.jp-Notebook-cell')]"
ACTIVE_CELL = f"{ALL_CELLS}.findIndex(c => c.classList.contains('jp-mod-active'))"


def count_is(count):
    note = "document.querySelector('p[role=status]')"
    return f"{SLIDER}.value === '{count}' && {note}.textContent === ''"


def test_arrow_keys_move_the_slider_and_not_the_selected_cell(tmp_path):
    with lab(tmp_path, *CELLS) as (address, log), Browser() as browser:
        open_lab(browser, address, log)
        browser.value("jupyterapp.commands.execute('notebook:run-all-cells').then(() => 1)")
        wait_until(browser, f"!!{SLIDER}", log)
        browser.value("jupyterapp.commands.execute('notebook:enter-command-mode').then(() => 1)")
        x, y = browser.value(
            f"(() => {{ const s = {SLIDER}; s.scrollIntoView({{block: 'center'}}); const b = s.getBoundingClientRect();"
            "return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        browser.click(x, y)
        wait_until(browser, f"{SLIDER}.matches(':focus')", log)
        wait_until(browser, "document.querySelector('p[role=status]').textContent === ''", log)
        cell, count = browser.value(ACTIVE_CELL), int(browser.value(f"{SLIDER}.value"))
        for _ in range(2):  # the second press needs the focus on the slider of the picture that the first one made
            count -= 1
            browser.key("ArrowLeft")
            wait_until(browser, count_is(count), log)
            wait_until(browser, f"{SLIDER}.matches(':focus')", log)
        for key in ("ArrowDown", "ArrowUp"):
            browser.key(key)
            count += 1 if key == "ArrowUp" else -1
            wait_until(browser, count_is(count), log)
        assert browser.value(ACTIVE_CELL) == cell
        assert browser.value(f"{ALL_CELLS}.length") == len(CELLS)


def open_lab(browser, address, log):
    """Load the notebook once the server answers, and wait for its kernel."""
    browser("Page.navigate", url=address)
    for _ in range(300):
        if browser.value("location.protocol") == "http:":
            break
        browser.value("new Promise(done => setTimeout(done, 200))")
        browser("Page.navigate", url=address)
    ready = "window.jupyterapp && jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
    wait_until(browser, ready, log)
