"""Progress while a run trains: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from ghoffload.demo.train import Result

_LINES = 10  # of a run, where there is no terminal
_WINDOW = 20  # steps that the rate is the mean of


class Display:
    """Shows the steps of one run after another. Enter it around all of them."""

    def __init__(self, console: Console, *, steps: int, tokens: int) -> None:
        self._console, self._steps, self._tokens = console, steps, tokens
        self._tasks: dict[str, TaskID] = {}
        self._bar = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
            expand=True,
        )

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def start(self, name: str) -> None:
        """Show a run that has not made a step yet."""
        if self._console.is_terminal:
            self._tasks[name] = self._bar.add_task(
                name, total=self._steps, figures="preparing; the first step compiles"
            )

    def step(self, result: Result) -> None:
        """Show a run as it is after a step."""
        done = len(result.losses)
        if self._console.is_terminal:
            self._bar.update(
                self._tasks[result.name],
                completed=done,
                figures=self._figures(result),
            )
        elif done == 1 or done == self._steps or done % max(1, self._steps // _LINES) == 0:
            width = len(str(self._steps))
            where = f"step {done:>{width}}/{self._steps}"
            self._console.print(f"{result.name:<12}  {where}  {self._figures(result)}")

    def _figures(self, result: Result) -> str:
        recent = result.seconds[-_WINDOW:]
        if len(recent) > 1 and len(recent) == len(result.seconds):
            recent = recent[1:]  # the first step compiles: it says nothing of the others
        each = sum(recent) / len(recent)
        left = round(each * (self._steps - len(result.losses)))
        return (
            f"loss {result.losses[-1]:.3f}  {self._tokens / each:>9,.0f} tokens/s  "
            f"{left // 60}:{left % 60:02} left"
        )
