"""Runs a command in a terminal of its own and draws what it showed: ``docs/pictures/demo.svg``.

``python -m docs.generate.terminal`` plays the demo for a minute or two and writes the picture, on a
machine that should do nothing else meanwhile. The fullest frame and the report are shown.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

TARGET = Path("docs/pictures/demo.svg")
WIDTH, HEIGHT = 110, 50
CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\r\n|\n|\r)|([^\x1b\r\n]+)")
FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">
{matrix}</g></g></svg>
"""
"""Like Rich's own, but without fonts from the network."""


class Screen:
    """As much of a terminal as a live display needs: lines, cursor up, and erasing a line."""

    def __init__(self) -> None:
        self.lines = [""]
        self._row = 0
        self.frame: list[str] = []
        """The fullest screen before something was erased for good."""

    def feed(self, text: str) -> None:
        for found in CONTROL.finditer(text):
            argument, command, end, words = found.groups()
            if words or command == "m":
                self.lines[self._row] += found[0]
            elif end:
                self._row += "\n" in end
                while len(self.lines) <= self._row:
                    self.lines.append("")
            elif command == "A":
                self._row = max(0, self._row - int(argument or 1))
            elif command == "K":
                self._keep()
                self.lines[self._row] = ""

    def _keep(self) -> None:
        shown = [line for line in self.lines if line.strip()]
        if _ink(shown) >= _ink(self.frame):
            self.frame = shown


def _ink(lines: list[str]) -> int:
    """How much is on the screen."""
    return sum(len(line.split()) for line in lines)


def record(command: list[str]) -> str:
    """All that ``command`` writes to a terminal of its own."""
    child, terminal = pty.fork()
    if child == 0:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(WIDTH), "PATH": path}
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    output = bytearray()
    while True:
        try:
            output += os.read(terminal, 1 << 16) or b""
        except OSError:  # the command has ended
            break
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        raise SystemExit(f"{' '.join(command)} failed")
    return output.decode()


def picture(recorded: str, title: str) -> str:
    """The last full frame and the end of what was recorded."""
    screen = Screen()
    screen.feed(recorded)
    end = [line for line in screen.lines if line.strip()]
    shown = [line for line in screen.frame if line not in end]
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        for line in (*end[:1], *shown, "", *end[1:]):
            console.print(Text.from_ansi(line), soft_wrap=True)
        return console.export_svg(title=title, code_format=FORMAT, unique_id="demo")


def main() -> None:
    command = sys.argv[1:] or ["tmd", "demo"]
    TARGET.write_text(picture(record(command), " ".join(command)))


if __name__ == "__main__":
    main()
