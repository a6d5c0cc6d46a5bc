"""The text of the small sweep: the prose of Debian's package ``anarchism``, fetched, never shipped.

``An Anarchist FAQ``, GPL-2, about 11 MB of English in HTML. ``apt-get download`` fetches the
package and ``dpkg-deb`` unpacks it; neither installs anything nor needs root.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path

PACKAGE = "anarchism"
_SKIPPED = {"script", "style", "title"}
_BREAKS = {"p", "br", "li", "h1", "h2", "h3", "h4", "div", "blockquote", "tr", "hr"}


class _Prose(HTMLParser):
    """The text of a page, a line for each block."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.skipping = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.skipping += tag in _SKIPPED
        self.parts += ["\n"] * (tag in _BREAKS)

    def handle_endtag(self, tag: str) -> None:
        self.skipping -= tag in _SKIPPED
        self.parts += ["\n"] * (tag in _BREAKS)

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.parts.append(data.replace("\n", " "))


def prose(page: str) -> str:
    """Return the text of an HTML page: no tags, single spaces, no empty lines."""
    parser = _Prose()
    parser.feed(page)
    parser.close()
    lines = (re.sub(r"\s+", " ", line).strip() for line in "".join(parser.parts).split("\n"))
    return "\n".join(line for line in lines if line)


def fetch(out: Path) -> None:
    """Write the prose of the package to a file, pages in the order of their names."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, check=True)
        (package,) = folder.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", package, folder / "x"], check=True)
        pages = sorted((folder / "x").rglob("*.html"), key=lambda path: path.name)
        text = "\n\n".join(prose(page.read_text("utf-8", "replace")) for page in pages)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(text.encode("utf-8"))
