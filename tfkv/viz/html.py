"""Pictures that a browser draws."""

from __future__ import annotations

import dataclasses
import html
import pathlib


@dataclasses.dataclass(frozen=True)
class Html:
    """A picture as HTML; a notebook shows it as the value of a cell.

    Args:
        text: A fragment, or a whole page.
        height: Pixels of the frame that a page is shown in, which keeps its styles and scripts
            to itself; 0 = a fragment, shown as it is.
    """

    text: str
    height: int = 0

    def _repr_html_(self) -> str:
        if not self.height:
            return self.text
        page = html.escape(self.text, quote=True)
        return (
            f'<iframe srcdoc="{page}" style="width: 100%; height: {self.height}px; border: 0">'
            "</iframe>"
        )

    def save(self, path: str | pathlib.Path) -> None:
        """Writes it to a file of its own."""
        pathlib.Path(path).write_text(self.text, encoding="utf-8")
