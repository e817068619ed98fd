"""A real JupyterLab with one notebook, shown in a browser."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

from storednotebooks import the_format


@contextmanager
def lab(folder, *cells):
    """Serve a notebook of these cells; yield its address, and the server's log for when it does not answer."""
    # without a kernel's name JupyterLab asks which one to take
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat = the_format()
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=kernel)
    nbformat.write(book, folder / "book.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.open_browser": False,
        "ServerApp.allow_root": True,
        "ServerApp.root_dir": folder,
        "IdentityProvider.token": "",
        "LabApp.expose_app_in_browser": True,  # as window.jupyterapp
        "LabApp.news_url": "",
        "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
    }
    words = [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())]
    homes = {f"JUPYTER_{kind}": str(folder / kind) for kind in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")}
    log = folder / "lab.log"
    with log.open("w") as out:
        server = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=os.environ | homes, cwd=folder)
    try:
        yield f"http://127.0.0.1:{port}/lab/tree/book.ipynb", log
    finally:
        server.terminate()
        server.wait(30)


def wait_until(browser, expression, log, seconds=120):
    """Wait for an expression to be true in the page."""
    deadline = time.monotonic() + seconds
    while not browser.value(expression):
        assert time.monotonic() < deadline, f"{expression} is not true after {seconds} s\n{log.read_text()[-3000:]}"
        time.sleep(0.1)
