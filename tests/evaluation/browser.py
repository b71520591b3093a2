"""Pages in a real browser, headless."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--virtual-time-budget=2000",
)  # fmt: skip


def check_page(page: str, place: Path, width: int, dark: bool) -> None:
    """No message on the console, and nothing wider than the window, which an iframe of that width stands for.

    Args:
        place: an empty folder. width: in CSS pixels. dark: whether the browser asks for dark pages.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert browser is not None, "this test needs Chromium: install it, or leave the mark 'browser' out"
    frame = place / "frame.html"
    document = json.dumps(page).replace("</", "<\\/")
    frame.write_text(
        f"""<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><iframe style="width: {width}px; height: 900px">
        </iframe><pre></pre><script>
        const frame = document.querySelector("iframe");
        frame.onload = () => {{
            const root = frame.contentDocument.documentElement;
            document.querySelector("pre").textContent = `wide ${{root.scrollWidth}} of ${{root.clientWidth}}, ` +
                `ink ${{frame.contentWindow.getComputedStyle(frame.contentDocument.body).color}}`;
        }};
        frame.srcdoc = {document};
        </script>""",
        encoding="utf-8",
    )
    flags = [*_FLAGS, f"--user-data-dir={place / 'profile'}", "--window-size=1500,1000"]
    if dark:
        flags.append("--blink-settings=preferredColorScheme=0")
    done = subprocess.run([browser, *flags, "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r"wide (\d+) of (\d+), ink rgb\((\d+),", done.stdout)
    assert found is not None, done.stdout[-500:]
    needed, given, red = map(int, found.groups())
    assert needed <= given <= width
    assert (red > 128) == dark, "ink is light on dark paper, and dark on light"
