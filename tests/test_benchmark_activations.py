"""examples/benchmark_activations.py: arguments, figures and tables; all of it on virtual HBM."""

from __future__ import annotations

import io
import json
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from rich.console import Console
from rich.table import Table

import ghoffload
from ghoffload.activations.mover import release
from ghoffload.machine.virtual import VirtualMachine

EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_groups_and_lengths() -> None:
    from benchmark_activations import parse

    assert parse(["--only", "peers,plain"]).only == ["plain", "peers"]
    assert parse([]).only == [
        "plain", "everything", "budgets", "blocks", "checkpointed", "peers"
    ]  # fmt: skip
    assert parse([]).tokens == [(4, 2048)]
    assert parse(["--tokens", "8k,2x512, 100"]).tokens == [(1, 8192), (2, 512), (1, 100)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "palin"], "peers, got 'palin'"),
        (["--only", ","], "peers, got nothing"),
        (["--tokens", "8m"], "expects lengths such as 4x2048, 8192 or 8k, got '8m'"),
        (["--tokens", "0"], "got '0'"),
        (["--tokens", "4x"], "got '4x'"),
    ],
)
def test_what_is_not_known_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmark_activations import parse

    with pytest.raises(SystemExit):
        parse(words)
    assert message in " ".join(capsys.readouterr().err.split())


def test_budgets_bring_the_peaks_they_are_between() -> None:
    from _activation_ways import LeftOut, Setting, budget_of, settings

    assert [row.words for row in settings(["budgets"])] == [
        "no offload", "ghoffload", "budget 0.25", "budget 0.50", "budget 0.75"
    ]  # fmt: skip
    assert [row.words for row in settings(["blocks"])][:3] == [
        "no offload", "checkpointing", "blocks, budget 0.00"
    ]  # fmt: skip
    assert [row.name for row in settings(["peers"])] == ["no offload", "TRL", "torchtune"]
    peaks = {"no offload": 900, "ghoffload": 100, "checkpointing": 300}
    assert budget_of(Setting("budgets", "budget", 0.25), peaks) == 300
    assert budget_of(Setting("blocks", "blocks, budget", 0.5), peaks) == 600
    with pytest.raises(LeftOut, match="the peak of checkpointing, which was not measured"):
        budget_of(Setting("blocks", "blocks, budget", 0.5), {"no offload": 900})


def test_a_digest_is_of_every_bit_and_its_place() -> None:
    from _activation_device import digest

    one, other = torch.randn(40, 30).bfloat16(), torch.randn(7)
    found = digest([one, None, other])
    assert digest([one.clone(), None, other.clone()]) == found
    swapped = one.clone()
    swapped[3, 4], swapped[3, 5] = one[3, 5], one[3, 4]
    nudged = other.clone()
    nudged.view(torch.int32)[6] ^= 1
    gradients = ([swapped, None, other], [one, None, nudged], [one, other], [one.T, None, other])
    assert len({found, *map(digest, gradients)}) == 5
    assert digest([torch.zeros(3)]) != digest([-torch.zeros(3)])


def row(name: str, ms: float, peak: float, moved: tuple[float, float], **more: Any) -> Any:
    out, back = (int(1e9 * gb) for gb in moved)
    found = {"name": name, "words": name, "group": "plain", "ms": ms, "wall_ms": ms + 1}
    found |= {"peak": int(1e9 * peak), "over": int(1e9 * (peak - 4)), "moved": (out, back)}
    return found | {"digests": ["a"]} | more


def lines_of(table: Table) -> list[list[str]]:
    out = io.StringIO()
    Console(width=160, file=out).print(table)
    lines = out.getvalue().splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]


def rows_of_a_run() -> list[Any]:
    blocks = {"group": "blocks", "fraction": 0.5, "budget": int(13e9)}
    return [
        row("no offload", 100, 20, (0, 0), digests=["a", "a"]),
        row("checkpointing", 130, 6, (0, 0)),
        row("save_on_cpu", 1000, 5.5, (16, 16)),
        row("ghoffload", 630, 5, (15, 15), group="everything"),
        row("ghoffload fp8", 320, 5, (7.5, 7.5), group="everything", digests=["b"]),
        row("blocks, budget", 120, 12.5, (1, 0.5), **blocks),
        row("ghoffload, checkpointed", 140, 5.5, (1, 1), group="checkpointed", digests=["b"]),
        {"name": "TRL", "words": "TRL", "group": "peers", "error": "cannot be\nimported"},
    ]


def test_rows_are_held_against_the_floor_and_no_offload() -> None:
    from _activation_tables import bits, derive, left_out, table

    rows = rows_of_a_run()
    derive(rows, {"d2h": 50e9, "h2d": 50e9})
    bits(rows)
    found = lines_of(table(rows, "title"))
    none = ["no offload", "100.0", "101.0", "1.000", "20.00", "16.00", "-", "-", "-", "-", "equal"]
    assert found[0] == none
    # 15 GB out and 15 GB back at 50 GB/s are 600 ms.
    times = ["630.0", "631.0", "6.300", "5.00", "1.00", "15.00", "15.00", "600.0", "1.050"]
    assert found[3] == ["ghoffload", *times, "equal"]
    assert found[4][-1] == "differ"
    assert found[5][0] == "blocks, budget (13.00)"
    assert len(found) == 7
    assert left_out(rows) == ["left out: TRL: cannot be"]


def test_what_cannot_be_compared_is_said() -> None:
    from _activation_tables import bits

    rows = rows_of_a_run()
    rows[0]["digests"] = ["a", "c"]
    bits(rows)
    assert {found["bits"] for found in rows if "bits" in found} == {"not comparable"}


def test_what_was_promised_is_judged() -> None:
    from _activation_tables import bits, derive, verdicts

    rows = rows_of_a_run()
    derive(rows, {"d2h": 50e9, "h2d": 50e9})
    bits(rows)
    assert verdicts(rows) == [
        ["everything, of the link's floor", "1.050", "<= 1.080", "yes"],
        ["everything, of save_on_cpu's peak HBM", "0.909", "<= 1.001", "yes"],
        ["fp8, of everything's time", "0.508", "<= 0.600", "yes"],
        ["layers' inputs offloaded, of checkpointing's time", "1.077", "<= 1.020", "NO"],
        ["blocks, budget: peak of the budget", "0.962", "<= 1.000", "yes"],
        # Of those within 13 GB; no offload is not.
        ["blocks, budget: of the best other's time (checkpointing)", "0.923", "<= 1.020", "yes"],
        ["ghoffload, checkpointed: gradients' bits", "differ", "equal", "NO"],
    ]
    assert verdicts(rows[:1]) == []


class Thought:
    """A device whose memory is virtual and whose times are the host's."""

    def __init__(self) -> None:
        self.machine = VirtualMachine(hbm_bytes=1 << 30)
        self.device = torch.device("cpu")

    def timed(self, work: Callable[[], object]) -> tuple[float, float]:
        begun = time.perf_counter()
        work()
        taken = 1e3 * (time.perf_counter() - begun)
        return taken, taken

    def rates(self) -> dict[str, float]:
        return {"d2h": 50e9, "h2d": 50e9}

    def clear(self) -> None:
        release(self.machine)


class Peer(torch.autograd.graph.saved_tensors_hooks):
    """Keeps copies in ``tracker``, as others do; the last one is served from its stash."""

    def __init__(self, model: Any) -> None:
        self.tracker: dict[int, tuple[torch.Tensor, bool]] = {}
        self.fwd_stash: dict[int, torch.Tensor] = {}
        model.output.register_forward_hook(lambda *found: None)
        super().__init__(self.keep, lambda number: self.tracker.pop(number)[0])

    def keep(self, tensor: torch.Tensor) -> int:
        number = len(self.tracker)
        large = tensor.nbytes >= 1024
        self.tracker[number] = (tensor.detach().clone() if large else tensor, large)
        if large:
            self.fwd_stash = {number: tensor.detach()}
        return number


def test_all_of_it_on_virtual_hbm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import _activation_ways as ways
    import benchmark_activations

    real = ghoffload.offload_activations

    def small(**options: Any) -> Any:
        return real(min_offload_bytes=1024, window_bytes=1 << 16, ahead_bytes=1 << 16, **options)

    monkeypatch.setattr(ways.ghoffload, "offload_activations", small)
    peer = types.ModuleType("peer")
    peer.get_act_offloading_ctx_manager = lambda model, *more: Peer(model)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peer", peer)
    monkeypatch.setitem(ways.PEERS, "TRL", "peer")
    monkeypatch.setitem(ways.PEERS, "torchtune", "no_such_package.offloading")
    gpu, out = Thought(), tmp_path / "found.json"
    rates, kept = gpu.rates, []

    def rated() -> dict[str, float]:
        kept.append(len(json.loads(out.read_text())["rows"]) if out.exists() else 0)
        return rates()

    monkeypatch.setattr(gpu, "rates", rated)
    words = ["--shape", "tiny", "--tokens", "2x64,96", "--repeats", "1", "--out", str(out)]
    with ghoffload.use_machine(gpu.machine):
        assert benchmark_activations.main(words, gpu) == 0  # type: ignore[arg-type]
    assert kept == [0, 34]  # what was found is there before the end
    document = json.loads(out.read_text())
    for tokens in ([2, 64], [1, 96]):
        rows = {(r["name"], r["fraction"]): r for r in document["rows"] if r["tokens"] == tokens}
        assert len(rows) == 17
        errors = {name: r["error"] for (name, _), r in rows.items() if "error" in r}
        assert errors.keys() == {"torchtune"}
        assert "No module named 'no_such_package'" in errors["torchtune"]
        lossy = ("ghoffload fp8",)
        for (name, _), found in rows.items():
            assert found.get("bits", "equal") == ("differ" if name in lossy else "equal"), name
        none, everything = rows["no offload", None], rows["ghoffload", None]
        assert none["moved"] == [0, 0]
        assert everything["moved"][0] >= everything["moved"][1] > 0
        assert everything["peak"] < none["peak"]
        assert (
            rows["ghoffload fp8", None]["moved"][0] < 0.8 * everything["moved"][0]
        )  # logits are fp32
        assert rows["save_on_cpu", None]["moved"][0] > everything["moved"][0]
        assert rows["TRL", None]["moved"][0] > rows["TRL", None]["moved"][1] > 0
        assert rows["checkpointing", None]["moved"] == [0, 0]
        assert rows["ghoffload, checkpointed", None]["moved"][0] < everything["moved"][0]
        moved = [rows["budget", f]["moved"][0] for f in (0.25, 0.5, 0.75)]
        assert moved == sorted(moved, reverse=True)
        assert "chosen: " in rows["blocks, budget", 0.4]["report"]
    printed = capsys.readouterr().out
    assert "2 x 64 tokens" in printed
    assert "left out: torchtune: torchtune cannot be imported" in printed


def test_the_model_is_left_as_it_was() -> None:
    import _activation_ways as ways
    from _bench_model import SHAPES, Llama

    model = Llama(SHAPES["tiny"])
    with ways.checkpointing(model):
        assert "forward" in vars(model.blocks[0])
    assert "forward" not in vars(model.blocks[0])
    with ways._no_hooks_left(model):
        model.output.register_forward_pre_hook(lambda *found: None)
        model.output.register_forward_hook(lambda *found: None, always_call=True)
    assert not model.output._forward_pre_hooks
    assert not model.output._forward_hooks
    assert not model.output._forward_hooks_always_called


def test_what_torch_would_pin_is_counted_in_powers_of_two() -> None:
    from _activation_ways import pinned_by_torch

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin().exp().sum()  # 300 bytes each: of x, and of the result of exp

    x = torch.randn(75, requires_grad=True)
    assert pinned_by_torch(Model(), x) == 2 * 512  # type: ignore[arg-type]
