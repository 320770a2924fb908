"""The benchmark's findings as tables, and beside what was promised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from _bench_optimizers import OPTIMIZERS
from _bench_worker import ITEM_BYTES

FLAT_HBM = 0  # bytes of drift that still count as flat
FLAT_RSS = 64 << 20

Rows = dict[str, dict[str, Any]]


def render(rows: Rows) -> str:
    """All tables (Markdown, aligned) for the findings of each optimizer, by its name."""
    titled = [
        ("The machine, as each process found it (GB/s)", _machine(rows)),
        ("Optimizer step alone, all weights and gradients in HBM", _step(rows)),
        ("Whole training step", _whole(rows)),
        ("Host memory", _host(rows)),
        ("Many steps", _steady(rows)),
        ("loss.item() while state is written back", _item(rows)),
        ("Judged", [["criterion", "measured", "wanted", "met"], *verdicts(rows)]),
        ("Not measured", _errors(rows)),
    ]
    return "\n\n".join(f"### {title}\n\n{table(lines)}" for title, lines in titled if lines[1:])


def table(lines: Sequence[Sequence[str]]) -> str:
    """Aligned Markdown; the first line is the head. Columns of figures are flushed right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = [
        all(cell[:1] in "0123456789+-" for cell in column[1:])
        for column in zip(*lines, strict=True)
    ]
    ruler = ["-" * (w - 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)]
    return "\n".join(
        "| "
        + " | ".join(
            cell.rjust(w) if r else cell.ljust(w)
            for cell, w, r in zip(line, widths, right, strict=True)
        )
        + " |"
        for line in [lines[0], ruler, *lines[1:]]
    )


def verdicts(rows: Rows) -> list[list[str]]:
    """One line for each promise that was measured: what, found, wanted, whether it was kept."""
    ours = rows.get("ours", {})
    lines: list[list[str]] = []

    def judge(what: str, found: str, wanted: str, met: bool) -> None:
        lines.append([what, found, wanted, "yes" if met else "NO"])

    fraction = step_fraction(ours)
    if fraction is not None:
        judge("step, of two-way link rate / bytes moved", f"{fraction:.3f}", ">= 0.90",
              fraction >= 0.90)  # fmt: skip
        peer = rows.get("deepspeed", {}).get("step")
        if peer:
            times = ours["step"]["gparam_per_s"] / peer["gparam_per_s"]
            judge("step, against DeepSpeed ZeRO-2 offload", f"{times:.2f} x", "> 1 x", times > 1)
    if "whole" in ours and "alone" in ours:
        growth = ours["whole"]["peak_allocated"] / ours["alone"]["peak_allocated"] - 1
        judge("peak HBM over forward + backward alone", f"{growth:+.2%}", "<= +3 %", growth <= 0.03)
        outside = ours["whole"]["outside_torch"] - ours["alone"]["outside_torch"]
        growth += outside / ours["alone"]["peak_allocated"]
        judge("the same, with HBM outside torch's allocator", f"{growth:+.2%}", "<= +3 %",
              growth <= 0.03)  # fmt: skip
    if "ledger" in ours:
        held = _host_ledger(ours) / ours["parameters"]
        judge("host bytes a parameter, ledger", f"{held:.3f}", "<= 12.2", held <= 12.2)
        grown = _grown(ours) / ours["parameters"]
        judge("host bytes a parameter, growth of RSS", f"{grown:.3f}", "<= 12.2", grown <= 12.2)
    if "steady" in ours:
        hbm, resident = ours["steady"]["hbm"]["drift"], ours["steady"]["rss"]["drift"]
        steps = ours["steady"]["steps"]
        judge(f"drift of HBM over {steps} steps", f"{hbm:,} B", f"<= {FLAT_HBM} B", hbm <= FLAT_HBM)
        judge(f"drift of RSS over {steps} steps", f"{resident / 2**20:.1f} MiB",
              f"<= {FLAT_RSS >> 20} MiB", resident <= FLAT_RSS)  # fmt: skip
    if "item" in ours and "large" in ours["item"]:
        large = ours["item"]["large"]
        latency = max(large["at_once_ms"], large["after_update_ms"])
        judge("item() after the last update", f"{latency:.2f} ms", "<= 5 ms", latency <= 5)
        judge("bytes then still to be written back", f"{large['outstanding'] / 1e9:.2f} GB",
              f">= {ITEM_BYTES / 1e9:.0f} GB", large["outstanding"] >= ITEM_BYTES)  # fmt: skip
    if "sync" in ours:
        sync = ours["sync"]
        judge("step() waits for the device", sync["step"] or "never", "never", not sync["step"])
        judge("a training step waits for the device", sync["training"] or "never", "never",
              not sync["training"])  # fmt: skip
        judge("allocations in step()", str(sync["allocations"]), "0", sync["allocations"] == 0)
    return lines


def figures(rows: Rows) -> Iterator[str]:
    """Sentences about the run itself: versions and times."""
    for name, row in rows.items():
        seconds = row.get("seconds", {})
        spent = sum(seconds.values())
        longest = max(seconds, key=seconds.__getitem__, default="")
        if longest:
            yield (
                f"{_label(name)} ({row.get('version', 'not started')}): {spent:.0f} s, "
                f"{seconds[longest]:.0f} of them for {longest}"
            )


def step_fraction(row: dict[str, Any]) -> float | None:
    """Rate of the step as a fraction of what the link, measured before and after it, allows.

    All state that ghoffload holds on the host moves there and back. ``None`` where it holds none,
    and of an optimizer that keeps no ledger.
    """
    if any(key not in row for key in ("step", "link", "ledger")) or not _host_ledger(row):
        return None
    moved = 2 * _host_ledger(row) / row["parameters"]
    return row["step"]["gparam_per_s"] * moved / _two_way(row)


def _two_way(row: dict[str, Any]) -> float:
    return sum(rates["two_way"] for rates in row["link"]) / len(row["link"])


def _machine(rows: Rows) -> list[list[str]]:
    lines = [["measured by", "when", "h2d", "d2h", "both ways", "HBM copy"]]
    for name, row in rows.items():
        for when, rates in zip(("before the step", "after it"), row.get("link", []), strict=False):
            figures = (f"{rates[key]:,.1f}" for key in ("h2d", "d2h", "two_way", "hbm"))
            lines.append([_label(name), when, *figures])
    return lines


def _step(rows: Rows) -> list[list[str]]:
    lines = [["optimizer", "state", "rounds", "step ms", "step() returned after", "Gparam/s",
              "with gradients' way, ms", "of the link"]]  # fmt: skip
    for name, row in rows.items():
        if "step" in row:
            step, fraction, kind = row["step"], step_fraction(row), OPTIMIZERS[name]
            lines.append([
                kind.label, kind.state, kind.rounds, f"{step['step_ms']:.1f}",
                f"{step['step_returned_ms']:.1f}", f"{step['gparam_per_s']:.2f}",
                f"{step['with_gradients_ms']:.1f}",
                "-" if fraction is None else f"{fraction:.3f}",
            ])  # fmt: skip
    return lines


def _whole(rows: Rows) -> list[list[str]]:
    lines = [["optimizer", "alone ms", "step ms", "added", "peak HBM alone GB", "peak HBM GB",
              "growth", "grew outside torch GB"]]  # fmt: skip
    for name, row in rows.items():
        if "whole" in row and "alone" in row:
            whole, alone = row["whole"], row["alone"]
            lines.append([
                _label(name), f"{alone['ms']:.1f}", f"{whole['ms']:.1f}",
                f"{whole['ms'] / alone['ms'] - 1:+.1%}",
                f"{alone['peak_allocated'] / 1e9:.2f}", f"{whole['peak_allocated'] / 1e9:.2f}",
                f"{whole['peak_allocated'] / alone['peak_allocated'] - 1:+.2%}",
                f"{(whole['outside_torch'] - alone['outside_torch']) / 1e9:.2f}",
            ])  # fmt: skip
    return lines


def _host(rows: Rows) -> list[list[str]]:
    lines = [["optimizer", "RSS grew by GB", "of it imports", "bytes a parameter",
              "host in use grew by GB", "ledger, bytes a parameter"]]  # fmt: skip
    for name, row in rows.items():
        if "stepped" in row.get("host", {}):
            host = row["host"]
            lines.append([
                _label(name), f"{_grown(row) / 1e9:.3f}",
                f"{(host['imported']['rss'] - host['bare']['rss']) / 1e9:.3f}",
                f"{_grown(row) / row['parameters']:.3f}",
                f"{(host['stepped']['used'] - host['bare']['used']) / 1e9:.2f}",
                f"{_host_ledger(row) / row['parameters']:.3f}" if "ledger" in row else "-",
            ])  # fmt: skip
    return lines


def _steady(rows: Rows) -> list[list[str]]:
    lines = [["ghoffload, GB", "first", "settled", "last", "largest drift"]]
    found = rows.get("ours", {}).get("steady")
    if found:
        titles = {"hbm": "HBM allocated", "reserved": "HBM reserved", "rss": "RSS"}
        for key, title in titles.items():
            values = [found[key][when] / 1e9 for when in ("first", "settled", "last", "drift")]
            lines.append([title, *(f"{value:.4f}" for value in values)])
    return lines


def _item(rows: Rows) -> list[list[str]]:
    lines = [["case", "item() ms", "worst", "called when the update has ended", "worst",
              "still to write back, GB"]]  # fmt: skip
    found = rows.get("ours", {}).get("item", {})
    for key, title in (("default", "default config"), ("large", "buckets of 5 GB")):
        if key in found:
            item = found[key]
            times = ("at_once_ms", "at_once_ms_worst", "after_update_ms", "after_update_ms_worst")
            lines.append([title, *(f"{item[time]:.2f}" for time in times),
                          f"{item['outstanding'] / 1e9:.2f}"])  # fmt: skip
    if "unpaced_ms" in found:
        lines.append(["copies queued at once", f"{found['unpaced_ms']:.2f}", "-", "-", "-",
                      f"{ITEM_BYTES / 1e9:.2f}"])  # fmt: skip
    return lines


def _errors(rows: Rows) -> list[list[str]]:
    lines = [["optimizer", "why"]]
    for name, row in rows.items():
        lines += [[_label(name), row[why]] for why in ("error", "left_out") if why in row]
    return lines


def _label(name: str) -> str:
    return OPTIMIZERS[name].label


def _grown(row: dict[str, Any]) -> int:
    return row["host"]["stepped"]["rss"] - row["host"]["bare"]["rss"]


def _host_ledger(row: dict[str, Any]) -> int:
    return sum(nbytes for kind, nbytes in row["ledger"].items() if kind != "device")
