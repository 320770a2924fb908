"""What benchmark_activations.py found, as tables, beside the link's floor and what was promised."""

from __future__ import annotations

from typing import Any

from _activation_ways import (
    CHECKPOINTING,
    EVERYTHING,
    FP8,
    INPUTS,
    NOTHING,
    SAVE_ON_CPU,
)
from rich.table import Table

Row = dict[str, Any]

EVERYTHING_FLOOR = 1.08  # of the link's floor
FP8_PART = 0.6  # of the time that everything takes
LINK_ALLOWS = 1.02  # where the bytes move in less time than the compute takes
SMALL_STAYS = 1.001  # of a peak: what is too small to be moved, such as the scales of norms
NO_SLOWER = 1.02  # what two medians of the same thing may differ by


def floor_seconds(row: Row, rates: dict[str, float]) -> float | None:
    """Seconds that the link needs for a step's bytes, out and then back.

    ``out / d2h + back / h2d``: where all that is saved has to leave, nothing can come back before
    the forward has ended. It bounds nothing where less moves than the forward's time allows.
    """
    if "moved" not in row or not row["moved"][0]:
        return None
    out, back = row["moved"]
    return out / rates["d2h"] + back / rates["h2d"]


def derive(rows: list[Row], rates: dict[str, float]) -> None:
    """Add ``floor_ms``, ``to_floor`` and ``to_none`` to the rows of one length of sequence."""
    none = _named(rows, NOTHING)
    for row in rows:
        if "ms" not in row:
            continue
        floor = floor_seconds(row, rates)
        row["floor_ms"] = None if floor is None else 1e3 * floor
        row["to_floor"] = None if floor is None else row["ms"] / (1e3 * floor)
        row["to_none"] = row["ms"] / none["ms"] if "ms" in none else None


def table(rows: list[Row], title: str) -> Table:
    """One line a setting. All times in ms, all bytes in GB."""
    made = Table(title=title)
    columns = ("ms", "wall", "x none", "peak", "over w+g", "out", "back", "floor", "x floor")
    for column in ("setting", *columns, "bits"):
        made.add_column(column, justify="right" if column in columns else "left")
    for row in rows:
        words = row["words"]
        if "budget" in row:
            words += f" ({row['budget'] / 1e9:.2f})"
        if "ms" in row:
            out, back = row["moved"]
            made.add_row(
                words,
                f"{row['ms']:.1f}",
                f"{row['wall_ms']:.1f}",
                _ratio(row["to_none"]),
                f"{row['peak'] / 1e9:.2f}",
                f"{row['over'] / 1e9:.2f}",
                f"{out / 1e9:.2f}" if out else "-",
                f"{back / 1e9:.2f}" if out else "-",
                "-" if row["floor_ms"] is None else f"{row['floor_ms']:.1f}",
                _ratio(row["to_floor"]),
                row["bits"],
            )
    return made


def chosen(rows: list[Row]) -> list[str]:
    """A line for each setting whose report says what was chosen for the blocks."""
    return [
        f"{row['words']}: {line.strip()}"
        for row in rows
        for line in row.get("report", "").splitlines()
        if line.strip().startswith("chosen: ")
    ]


def left_out(rows: list[Row]) -> list[str]:
    """A line for each setting without figures, and why."""
    return [
        f"left out: {row['words']}: {row['error'].splitlines()[0]}"
        for row in rows
        if "error" in row
    ]


def bits(rows: list[Row]) -> None:
    """Say of each row whether its gradients are those without offloading, by their digests."""
    digests = _named(rows, NOTHING).get("digests", [])
    comparable = len(digests) == 2 and digests[0] == digests[1]
    for row in rows:
        if "digests" in row:
            same = "equal" if row["digests"][:1] == digests[:1] else "differ"
            row["bits"] = same if comparable and row["digests"] else "not comparable"


def verdicts(rows: list[Row]) -> list[list[str]]:
    """What was promised of one length of sequence: what, found, wanted, whether it was kept."""
    found: list[list[str]] = []

    def judge(what: str, figure: float | None, most: float, form: str = "{:.3f}") -> None:
        if figure is not None:
            kept = "yes" if figure <= most else "NO"
            found.append([what, form.format(figure), f"<= {form.format(most)}", kept])

    everything, fp8 = _named(rows, EVERYTHING), _named(rows, FP8)
    judge("everything, of the link's floor", everything.get("to_floor"), EVERYTHING_FLOOR)
    torchs = _named(rows, SAVE_ON_CPU)
    if "peak" in torchs and "peak" in everything:
        judge(
            "everything, of save_on_cpu's peak HBM",
            everything["peak"] / torchs["peak"],
            SMALL_STAYS,
        )
    judge("fp8, of everything's time", _times(fp8, everything), FP8_PART)
    checkpointed = _named(rows, CHECKPOINTING)
    judge(
        "layers' inputs offloaded, of checkpointing's time",
        _times(_named(rows, INPUTS), checkpointed),
        LINK_ALLOWS,
    )
    for row in rows:
        if row["group"] in ("budgets", "blocks") and "ms" in row:
            judge(f"{row['words']}: peak of the budget", row["peak"] / row["budget"], 1.0)
        if row["group"] == "blocks" and "ms" in row:
            other = _best(rows, row["budget"])
            if other is not None:
                what = f"{row['words']}: of the best other's time ({other['words']})"
                judge(what, _times(row, other), NO_SLOWER)
    for row in rows:
        exact = row["group"] not in ("plain", "peers") and row["name"] != FP8
        if exact and row.get("bits") == "differ":
            found.append([f"{row['words']}: gradients' bits", "differ", "equal", "NO"])
    return found


def verdict_table(lines: list[list[str]]) -> Table:
    made = Table(title="Judged")
    for column in ("what", "found", "wanted", "kept"):
        made.add_column(column)
    for line in lines:
        made.add_row(*line)
    return made


def _best(rows: list[Row], budget: int) -> Row | None:
    """The shortest step of another way whose peak is within a budget."""
    others = [
        row
        for row in rows
        if row["group"] != "blocks" and row["name"] != FP8 and row.get("peak", budget + 1) <= budget
    ]
    return min(others, key=lambda row: row["ms"], default=None)


def _named(rows: list[Row], name: str) -> Row:
    return next((row for row in rows if row["name"] == name), {})


def _times(row: Row, other: Row) -> float | None:
    return row["ms"] / other["ms"] if "ms" in row and "ms" in other else None


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
