"""The redrawn part of the screen, also correct after the window was made narrower."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.control import Control
from rich.live import Live
from rich.live_render import LiveRender
from rich.segment import ControlType, Segment


class Region(Live):
    """rich's own, but the rows to erase are counted with the current window width.

    A terminal that is made narrower wraps its lines, which then take more rows than when they were drawn.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, refresh_per_second=12, transient=True, vertical_overflow="visible")
        self._live_render = _Drawn(console)


class _Drawn(LiveRender):
    def __init__(self, console: Console) -> None:
        super().__init__("", vertical_overflow="visible")
        self._console = console
        self._widths: list[int] | None = None
        """Cells of each line as it was last drawn."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        drawn = super().__rich_console__(console, options)
        segments = [segment for segment in drawn if isinstance(segment, Segment)]
        self._widths = [Segment.get_line_length(line) for line in Segment.split_lines(segments)] or [0]
        yield from segments

    def _rows(self) -> int:
        width = max(1, self._console.width)
        return sum(max(1, -(-cells // width)) for cells in self._widths or ())

    def position_cursor(self) -> Control:
        """Erase the region and move the cursor to its start."""
        if self._widths is None:
            return Control()
        up = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * (self._rows() - 1)
        return Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *up)

    def restore_cursor(self) -> Control:
        """The same from the line below, where the cursor is at the end."""
        if self._widths is None:
            return Control()
        return Control(
            ControlType.CARRIAGE_RETURN, *((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * self._rows()
        )
