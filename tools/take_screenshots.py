"""Take the screenshots of README.md in headless Chromium, light and dark: a loss curve, the report, the server's page.

python tools/take_screenshots.py quickstart/checkpoints quickstart/metrics.jsonl

Needs Chromium, and pip install bokeh fastapi uvicorn playwright pillow.
"""

from __future__ import annotations

import dataclasses
import io
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from megatron.cli import Parser, run_command
from megatron.errors import InputError
from megatron.reports.page import report_page
from megatron.reports.record import read_record

SCHEMES = ("light", "dark")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
PROMPT = "def test_"
QUALITY = 82  # of WebP


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("checkpoints", metavar="DIR", type=Path, help="--save folder of a run")
    parser.add_argument("metrics", metavar="FILE", type=Path, help="its --metrics-path")
    parser.add_argument("--output", metavar="DIR", type=Path, default=ROOT / "docs" / "figures")
    args = parser.parse_args(argv)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise InputError("screenshots need Chromium: apt-get install chromium")
    with sync_playwright() as p, tempfile.TemporaryDirectory() as folder:
        run = dataclasses.replace(read_record(args.metrics), name="quickstart")
        report = Path(folder) / "report.html"
        report.write_text(report_page([run]), encoding="utf-8")
        browser = p.chromium.launch(executable_path=chromium, args=list(FLAGS))
        with serving(args.checkpoints) as url:
            for scheme in SCHEMES:

                def save(name: str, picture: bytes, scheme: str = scheme) -> None:
                    file = args.output / f"{name}-{scheme}.webp"
                    Image.open(io.BytesIO(picture)).save(file, quality=QUALITY, method=6)
                    print(f"wrote {file}: {file.stat().st_size / 1000:.0f} kB")

                page = browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 1000})
                page.goto(report.as_uri())
                page.wait_for_timeout(2000)  # the plots are drawn
                save("report", page.screenshot())
                save("loss", page.locator("main section").first.screenshot())
                page.close()
                page = browser.new_page(color_scheme=scheme, viewport={"width": 1100, "height": 790})
                take_text(page, url)
                save("server", page.screenshot())
                page.close()
        browser.close()


def take_text(page: Page, url: str) -> None:
    """Generate a text on the server's page, and point at one of its tokens."""
    page.goto(url)
    page.locator("#prompt").fill(PROMPT)
    page.locator("#max_tokens").fill("80")
    page.locator("#seed").fill("7")
    page.locator("#generate").click()
    expect(page.locator("#status")).to_contain_text("tokens", timeout=120_000)
    page.locator(".token").nth(4).hover()


@contextmanager
def serving(checkpoints: Path) -> Iterator[str]:
    """Run the server; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, ROOT / "tools" / "serve.py", "--load", checkpoints, "--port", port]
    command += ["--served-model-name", "quickstart", "--device", "cpu"]
    process = subprocess.Popen([*map(str, command)])
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{url}/health", process)
        yield url
    finally:
        process.terminate()
        process.wait()


def wait_for(url: str, process: subprocess.Popen) -> None:
    """Wait until the server responds.

    Raises:
        InputError: it ended.
    """
    while process.poll() is None:
        try:
            urllib.request.urlopen(url).close()
            return
        except OSError:
            time.sleep(0.2)
    raise InputError("the server did not start; see its message")


if __name__ == "__main__":
    run_command(main)
