"""The server's page, in headless Chromium.

Needs Chromium and `pip install playwright`. Screenshots go to the folder that the environment variable ARTEFACTS names.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hf_models import save_hf
from serving import HTTP, load, load_slow, serving, wait_until

from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.train import train_bpe

playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")

pytestmark = pytest.mark.slow

WORDS = "the a cat dog bird sat ran flew on under over mat hat tree quickly slowly and then but so café naïve".split()
IDS, LENGTH = 320, 256
FLAGS = """
    --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync
""".split()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerConfig:
    """BPE tokenizer trained on text, in which a character may take several tokens."""
    folder, rng = tmp_path_factory.mktemp("tokenizer"), random.Random(0)
    files = train_bpe([" ".join(rng.choices(WORDS, k=50)) for _ in range(20)], IDS)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_text(files[name], encoding="utf-8")
    return TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(tmp_path_factory.mktemp("hf") / "model", "gpt2", vocab_size=IDS, n_positions=LENGTH)


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("ARTEFACTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def open_page(browser: playwright.Browser, url: str, **settings: object) -> tuple[playwright.Page, list[str]]:
    """Open the page; return it and the list of its console messages and errors, which should stay empty."""
    page = browser.new_page(**settings)
    console: list[str] = []
    page.on("console", lambda message: console.append(message.text))
    page.on("pageerror", lambda error: console.append(str(error)))
    page.goto(url)
    playwright.expect(page.locator("#model")).to_have_text("tiny")
    return page, console


def set_slider(page: playwright.Page, name: str, value: float) -> None:
    page.locator(f"#{name}").fill(str(value))


def status(page: playwright.Page, pattern: str) -> None:
    playwright.expect(page.locator("#status")).to_have_text(re.compile(pattern), timeout=30_000)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_type_and_generate(
    browser, folder: Path, tokenizer, screenshots: Path, scheme: str, width: int
) -> None:
    with serving(*load(folder, tokenizer)) as (url, _):
        page, console = open_page(browser, url, color_scheme=scheme, viewport={"width": width, "height": 800})
        page.locator("#prompt").fill("the cat sat on")
        set_slider(page, "max_tokens", 60)
        set_slider(page, "temperature", 0)
        page.get_by_role("button", name="Generate").click()
        status(page, r"^(Length reached|The text has ended): \d+ tokens")
        body = {"prompt": "the cat sat on", "max_tokens": 60, "temperature": 0, "top_p": 0.95, "echo": True}
        expected = HTTP.post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"]
        assert page.locator("#text").text_content() == expected

        # With the mouse, then with the keyboard: Tab focuses the text, arrow keys move along it.
        page.locator(".token").nth(3).hover()
        assert page.locator("#about tr").count() in (5, 6)
        assert page.locator("#about tr.own").count() == 1
        page.locator("#generate").focus()
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.evaluate("[...document.querySelectorAll('.token')].indexOf(document.activeElement)") == 2
        assert page.locator(".token.shown").count() == 1
        page.screenshot(path=screenshots / f"page-{scheme}-{width}.png", full_page=True)

        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "scrolls sideways"
        small = """[...document.querySelectorAll("button, input:not([hidden]), textarea")]
            .filter((e) => e.offsetParent && e.getBoundingClientRect().height < 44).map((e) => e.id)"""
        assert page.evaluate(small) == []
        assert console == []
        page.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
def test_chat_with_two_models(
    browser, folder: Path, tokenizer, screenshots: Path, tmp_path: Path, scheme: str, width: int
) -> None:
    """Both models answer side by side, with the same seed, and each keeps its own conversation."""
    second = save_hf(tmp_path / "second", "gpt2", vocab_size=IDS, n_positions=LENGTH, n_head=2)
    with serving(*load(folder, tokenizer), other=load(second, tokenizer)) as (url, _):
        page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
        console: list[str] = []
        page.on("console", lambda message: console.append(message.text))
        page.goto(url)
        playwright.expect(page.locator("#model")).to_have_text("tiny and other")
        page.locator("#seed").fill("5")
        set_slider(page, "max_tokens", 12)
        page.get_by_role("button", name="Chat").click()
        page.get_by_role("button", name="Who are you?").click()
        assert page.locator("#prompt").input_value() == "Who are you?"
        messages: dict[str, list[dict]] = {"tiny": [], "other": []}
        for text in ("Who are you?", "the cat"):
            page.locator("#prompt").fill(text)
            page.get_by_role("button", name="Send").click()
            status(page, "^Seed 5.")
            for number, (model, said) in enumerate(messages.items()):
                said.append({"role": "user", "content": text})
                body = {"messages": said, "model": model, "max_tokens": 12, "seed": 5}
                body |= {"temperature": 0.8, "top_p": 0.95}
                answer = HTTP.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
                said.append({"role": "assistant", "content": answer["content"]})
                shown = page.locator("#panels > div").nth(number).locator(".message")
                assert shown.all_text_contents() == [message["content"] for message in said]
        assert messages["tiny"] != messages["other"]
        page.screenshot(path=screenshots / f"chat-{scheme}-{width}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "scrolls sideways"
        page.get_by_role("button", name="New conversation").click()
        assert page.locator(".message").count() == 0
        assert console == []
        page.close()


def test_stop(browser, folder: Path, tokenizer, screenshots: Path) -> None:
    """The button and Esc stop a text. Its row is free at once, and the text so far stays on the page."""
    with serving(*load_slow(folder, tokenizer), max_batch_size=1) as (url, engine):
        page, console = open_page(browser, url)
        page.locator("#prompt").fill("the dog")
        set_slider(page, "max_tokens", 250)
        set_slider(page, "temperature", 0)
        for number in range(2):
            page.locator("#prompt").focus()
            page.keyboard.press("Control+Enter")
            page.locator(".token").nth(5).wait_for()
            page.screenshot(path=screenshots / "page-generating.png")
            if number:
                page.keyboard.press("Escape")
            else:
                page.get_by_role("button", name="Stop").click()
            status(page, r"^Stopped: \d+ tokens")
            wait_until(lambda: engine.in_flight == engine.running == 0)
            assert page.locator(".token").count() > 5
        assert console == []
        page.close()


def test_error_messages(browser, folder: Path, tokenizer, screenshots: Path) -> None:
    with serving(*load(folder, tokenizer), key="open sesame") as (url, _):
        page = browser.new_page()
        page.goto(url)
        error = page.locator("#error")
        playwright.expect(error).to_have_text("This server asks for an API key.")
        page.locator("#key").fill("wrong")
        page.keyboard.press("Enter")
        playwright.expect(error).to_have_text("The server does not know this API key.")
        page.locator("#key").fill("open sesame")
        page.locator("#prompt").fill("the " * 400)
        page.get_by_role("button", name="Generate").click()
        playwright.expect(error).to_have_text(
            re.compile(r"^the prompt has \d+ tokens and leaves no room in the context of 256")
        )
        page.screenshot(path=screenshots / "page-error.png")
        page.locator("#prompt").fill("the cat")
        page.get_by_role("button", name="Generate").click()
        status(page, r"tokens")
        assert error.is_hidden()
    page.get_by_role("button", name="Generate").click()
    playwright.expect(error).to_have_text("The server cannot be reached.")
    page.close()
