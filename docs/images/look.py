"""Make the pictures of docs/look.md: the command line as SVG, notebooks and the site as PNG.

``make site && python docs/images/look.py`` runs the commands on a store that it makes. An SVG
follows the reader's light or dark mode; what chromium draws comes as one picture of each mode.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME, TerminalTheme
from rich.text import Text

import ckptstore

HERE: Final = Path(__file__).parent
COLUMNS: Final = 100
COMMANDS: Final = {
    "help": "ckptstore --help",
    "ls": "ckptstore ls",
    "show": "ckptstore show gpt@best:val_loss",
    "log": "ckptstore log --graph",
}
_FRAME: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}">
<style>
  .{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, monospace; }}
  {styles}
  .back {{ fill: BACK; }}
</style>
<rect class="back" width="{width}" height="{height}" rx="8"/>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>
<g transform="translate(12, 8)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""
_STYLE: Final = """<style>
  :root { color-scheme: light dark }
  body { font: 14px sans-serif; margin: 16px }
  pre { opacity: .7; margin: 16px 0 4px }
  td, th { padding: 3px 9px; text-align: right }
</style>
"""


def fill(store: ckptstore.Store) -> None:
    """Make a run with metrics, a rollback and a fork."""
    torch.manual_seed(0)
    run = store.run("gpt", metrics={"val_loss": "min"})
    first, last = torch.nn.Linear(256, 256), torch.nn.Linear(256, 64)
    model = torch.nn.Sequential(first, last)
    losses = {100: 2.91, 200: 2.64, 300: 2.58, 400: 2.73}
    for step, loss in losses.items():
        torch.nn.init.normal_(first.weight)
        run.save({"model": model.state_dict(), "step": step}, step=step, metrics={"val_loss": loss})
    run.rollback("best:val_loss")
    for step, loss in {400: 2.51, 500: 2.49}.items():
        torch.nn.init.normal_(first.weight)
        run.save({"model": model.state_dict(), "step": step}, step=step, metrics={"val_loss": loss})
    run.tag(500, "release")
    tuned = store.fork("gpt@500", "gpt-chat")
    torch.nn.init.normal_(last.weight)
    tuned.save({"model": model.state_dict(), "step": 520}, step=520, metrics={"val_loss": 2.2})


def shown(command: str, folder: Path) -> str:
    """Return what a command writes to a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": "60", "TERM": "xterm-256color"}
    words = [sys.executable, "-m", *command.split()]
    with subprocess.Popen(  # noqa: S603 - this package
        words, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                written += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    assert process.returncode == 0, written  # noqa: S101
    return written.decode().replace("\r\n", "\n")


def exported(command: str, text: str, theme: TerminalTheme) -> str:
    """Return an SVG of a command and its output in the colours of a theme."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(f"$ {command}\n{text}".rstrip()))
    back = theme.background_color.hex
    return console.export_svg(
        theme=theme, code_format=_FRAME.replace("BACK", back), unique_id="look"
    )


def drawn(command: str, text: str) -> str:
    """Return an SVG that is light or dark as the reader's system is."""
    light = exported(command, text, DEFAULT_TERMINAL_THEME)
    dark = exported(command, text, SVG_EXPORT_THEME)
    colours = re.findall(r"(\.[\w-]+) \{ ?(fill: ?[^;}]+)", dark)
    rules = "\n".join(f"    {name} {{ {colour} }}" for name, colour in colours)
    switch = f"  @media (prefers-color-scheme: dark) {{\n{rules}\n  }}\n</style>"
    return light.replace("</style>", switch)


def tables(store: ckptstore.Store) -> str:
    """Return what notebooks show of a store."""
    run = store.run("gpt")
    found = [
        ("store", store),
        ('store["gpt"]', run),
        ('store["gpt@best:val_loss"]', store["gpt@best:val_loss"]),
        ('store.diff("gpt@300", "gpt@500")', store.diff("gpt@300", "gpt@500")),
    ]
    cells = (f"<pre>{code}</pre>{one._repr_html_()}" for code, one in found)
    return _STYLE + "".join(cells)


def photograph(page: Path, name: str) -> None:
    """Have chromium draw a page in light and in dark mode."""
    chromium = shutil.which("chromium")
    assert chromium, "install chromium"  # noqa: S101
    assert page.exists(), f"{page} is not there: make site"  # noqa: S101
    for mode in ("light", "dark"):
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=860,880"]
        # 0 is dark, 1 is light
        options.append(f"--blink-settings=preferredColorScheme={int(mode == 'light')}")
        options.append(f"--screenshot={HERE / f'look-{name}-{mode}.png'}")
        subprocess.run([chromium, *options, page.as_uri()], check=True, capture_output=True)  # noqa: S603


def main() -> None:
    """Write all pictures beside this file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ckptstore.open(folder / "ckpts", create=True) as store:
            fill(store)
            page = folder / "tables.html"
            page.write_text(tables(store), encoding="utf-8")
        photograph(page, "notebook")
        photograph(HERE.parents[1] / "build/site/index.html", "site")
        os.environ["CKPTSTORE_URL"] = str(folder / "ckpts")
        for short, command in COMMANDS.items():
            text = shown(command, folder)
            (HERE / f"look-{short}.svg").write_text(drawn(command, text), encoding="utf-8")


if __name__ == "__main__":
    main()
