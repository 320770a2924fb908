"""``ghoffload watch``: made-up pages, and real processes that train."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ghoffload import cli
from ghoffload.memory import LedgerRow
from ghoffload.memory.neighbours import Published, published
from ghoffload.memory.page_format import Claim, Counters
from ghoffload.watch import run
from ghoffload.watch.frame import Frame, History, ProcessNow, Rates
from ghoffload.watch.gpus import GpuNow, Gpus
from ghoffload.watch.page import gigabytes, page

ROOT = Path(__file__).resolve().parents[1]
GB = 10**9
KINDS = ("device", "managed", "pinned", "system")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs memfd and /proc")


def made_up(pid: int = 7, counters: Counters | None = None, **fields: object) -> Published:
    values: dict = {
        "command": "python train.py",
        "devices": (("cuda:0", "0000:1b:00.0"),),
        "held": (
            LedgerRow("device", "OffloadAdam", 2 * GB),
            LedgerRow("pinned", "OffloadAdam", 96 * GB),
            LedgerRow("system", "loader [x]", 1 * GB),
        ),
        "claims": (Claim("managed", "spare", 10 * GB, 4 * GB),),
    }
    return Published(pid=pid, started=1, counters=counters or Counters(), **{**values, **fields})


def counted(steps: int, at: float, step_ns: int = GB) -> Counters:
    return Counters(steps, 10**9 * steps, 50 * GB * steps, 25 * GB * steps, 4, 4, step_ns, at)


def shown(frame: Frame, width: int = 120, height: int | None = None) -> str:
    out = io.StringIO()
    Console(file=out, width=width, height=height).print(page(frame, width, height))
    return out.getvalue()


GPU = GpuNow(
    index=3,
    name="H200",
    bus_id="0000:1b:00.0",
    busy=0.97,
    hbm_used=60 * GB,
    hbm_total=141 * GB,
    watts=633.2,
    celsius=61,
    pcie_h2d=24.5e9,
    pcie_d2h=1e9,
    processes={7: 40 * GB},
)


# --- rates ---


def test_rates_are_between_steps_and_not_between_looks() -> None:
    history = History()
    (first,) = history.look([made_up(counters=counted(10, at=100.0))], [], now=100.5)
    assert (first.rates, first.idle) == (None, None)
    (second,) = history.look([made_up(counters=counted(14, at=102.0))], [], now=103.9)
    assert second.rates == Rates(steps=2, parameters=2e9, h2d=100 * GB, d2h=50 * GB)
    # No step since: the rate holds until one is overdue.
    (third,) = history.look([made_up(counters=counted(14, at=102.0))], [], now=104.5)
    assert (third.rates, third.idle) == (second.rates, None)
    (fourth,) = history.look([made_up(counters=counted(14, at=102.0))], [], now=114.0)
    assert (fourth.rates, fourth.idle) == (Rates(), 12.0)
    (fifth,) = history.look([made_up(counters=counted(15, at=114.5))], [], now=115.0)
    assert fifth.rates == Rates(steps=0.08, parameters=0.08e9, h2d=4 * GB, d2h=2 * GB)


def test_another_process_with_the_same_number_starts_anew() -> None:
    history = History()
    history.look([made_up(counters=counted(10, at=100.0))], [], now=100.0)
    other = made_up(counters=counted(4, at=101.0))
    other = Published(**{**other.__dict__, "started": 2})
    (seen,) = history.look([other], [], now=101.0)
    assert seen.rates is None


def test_a_process_that_never_stepped_has_no_rates() -> None:
    history = History()
    for now in (1.0, 50.0):
        (seen,) = history.look([made_up()], [], now=now)
        assert (seen.rates, seen.idle) == (None, None)


# --- the page ---


def frame(*processes: ProcessNow, gpus: Sequence[GpuNow] = (GPU,)) -> Frame:
    return Frame(processes=processes, gpus=tuple(gpus), host_available=412 * GB)


def process(pid: int = 7, **fields: object) -> ProcessNow:
    rates = Rates(steps=1.25, parameters=10e9, h2d=43.2e9, d2h=41.1e9)
    values: dict = {"rates": rates, "idle": None, "hbm": 40 * GB}
    return ProcessNow(page=made_up(pid), **{**values, **fields})


def test_the_page_shows_it_all() -> None:
    text = shown(frame(process()))
    gpu, own, *memory = (line.split() for line in text.splitlines() if line[0] not in "Gp ")
    assert " ".join(gpu) == "3 H200 97% 60 GB of 141 GB 633 W 61 C 24.5 1.00"
    assert " ".join(own) == "7 cuda:0 2 GB of 40 GB 97 GB 43.2 41.1 1.25 10.0 python train.py"
    assert memory == [
        ["7", "pinned", "OffloadAdam", "96", "GB"],
        ["7", "managed", "spare", "6", "GB", "promised"],
        ["7", "device", "OffloadAdam", "2", "GB"],
        ["7", "system", "loader", "[x]", "1", "GB"],
        ["host", "memory", "available:", "412", "GB"],
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_page_fits_the_terminal(width: int) -> None:
    text = shown(frame(process(), process(8, idle=75.0, rates=Rates(), hbm=None)), width)
    assert max(map(len, text.splitlines())) <= width
    if width >= 60:
        assert "idle 75 s" in text
        assert "43.2" in text
    assert ("python train.py" in text) == (width == 200)


@pytest.mark.parametrize("height", [16, 24, 50])
def test_what_does_not_fit_is_counted(height: int) -> None:
    text = shown(frame(process(1), process(2), process(3)), 100, height)
    assert len(text.splitlines()) <= height
    words = [line.split() for line in text.splitlines()]
    rows = sum(line[0].isdigit() and line[1] in KINDS for line in words)
    assert (f"{12 - rows} more" in text) == (rows < 12)


def test_sizes() -> None:
    assert [gigabytes(n) for n in (None, 0, 999, 1500, 2 * 10**6, 1.25e9, 141e9)] == [
        "-",
        "0 B",
        "999 B",
        "1.5 kB",
        "2 MB",
        "1.25 GB",
        "141 GB",
    ]


# --- NVML ---


class MadeUpNvml:
    """Two GPUs, of which the second says little."""

    def __init__(self) -> None:
        self.open = 0
        self.asked_pcie: list[int] = []

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> object:
        return types.SimpleNamespace(busId=f"0000000{handle}:1B:00.0".encode())

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> object:
        return types.SimpleNamespace(used=60 * GB, total=141 * GB)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> object:
        if handle == 1:
            raise RuntimeError("not supported")
        return types.SimpleNamespace(gpu=97, memory=3)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 633200

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        assert sensor == 0
        return 61

    def nvmlDeviceGetPcieThroughput(self, handle: int, direction: int) -> int:
        self.asked_pcie.append(handle)
        return {0: 1_000_000, 1: 24_500_000}[direction]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list:
        return [
            types.SimpleNamespace(pid=7, usedGpuMemory=40 * GB),
            types.SimpleNamespace(pid=8, usedGpuMemory=None),
        ]


def test_gpus_by_nvml() -> None:
    nvml = MadeUpNvml()
    with Gpus(nvml) as gpus:
        assert nvml.open == 1
        (gpu,) = gpus.now({"0000:1b:00.0", "0009:00:00.0"})
        assert gpu == GpuNow(**{**GPU.__dict__, "index": 0})
        assert set(nvml.asked_pcie) == {0}
        both = gpus.now(())
        assert [gpu.busy for gpu in both] == [0.97, None]
    assert nvml.open == 0
    assert gpus.now(()) == []
    with Gpus(None) as gpus:
        assert gpus.now(()) == []


# --- the command ---


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "1e9"])
def test_a_bad_interval_is_refused(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", f"--interval={interval}"]) == 2
    assert "--interval expects 0.1 to 3600 seconds, got" in capsys.readouterr().err


def test_nothing_to_watch_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["watch", "--once"]) == 1
    assert "there is nothing to watch" in capsys.readouterr().out
    assert cli.main(["watch", str(2**22 + 1)]) == 1  # beyond any process
    assert "Process 4194305 says nothing" in capsys.readouterr().out
    assert cli.main(["watch", "--json"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "nothing to watch" in said.err


@pytest.mark.parametrize("as_json", [False, True])
def test_the_end_of_what_is_watched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    looks = iter([made_up(), made_up(), Published(**{**made_up().__dict__, "started": 2})])
    monkeypatch.setattr(run, "published", lambda pid: next(looks))
    console = Console(width=100)
    code = run.watch(7, interval=0.001, as_json=as_json, console=console, nvml=MadeUpNvml())
    said = capsys.readouterr()
    assert code == 0
    if as_json:
        lines = [json.loads(line) for line in said.out.splitlines()]
        assert [line["processes"][0]["pid"] for line in lines] == [7, 7]
        assert lines[0]["gpus"][0]["watts"] == 633.2
        assert said.err == "Process 7 has ended.\n"
    else:
        assert said.out.count("python train.py") == 2
        assert said.out.endswith("Process 7 has ended.\n")


# --- real processes ---

VIRTUAL = "use_machine(VirtualMachine())"
LOOP = """
import contextlib, time, torch
from ghoffload import OffloadAdamW, VirtualMachine, use_machine
torch.set_num_threads(1)
weight = torch.nn.Parameter(torch.zeros(1000, 100, device={device!r}))
with {machine}:
    optimizer = OffloadAdamW([weight])
    weight.grad = torch.ones_like(weight)
    while True:
        optimizer.step()
        torch.cuda.synchronize() if weight.is_cuda else None
        time.sleep(0.01)
        if optimizer.state[weight]["step"] == 5:
            print("there", flush=True)
"""


@pytest.fixture
def train() -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts processes that train until the test ends."""
    children = []

    def train(
        device: str = "cpu", machine: str = "use_machine(VirtualMachine())"
    ) -> subprocess.Popen:
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(LOOP.format(device=device, machine=machine))],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "there\n"
        return child

    yield train
    for child in children:
        child.kill()
        child.communicate()


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ghoffload", "watch", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@linux
def test_a_process_that_trains_is_watched(train: Callable[..., subprocess.Popen]) -> None:
    child = train()
    done = command("--once", "--json", "--interval", "0.5")
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    # The process that runs this test is another one that uses the runtime.
    (seen,) = (p for p in json.loads(line)["processes"] if p["pid"] == child.pid)
    assert seen["devices"] == [{"name": "virtual machine", "bus_id": ""}]
    held = {row["kind"]: row["nbytes"] for row in seen["held"]}
    assert held["pinned"] >= 2 * 4 * 100_000
    assert held["device"] >= 2 * 4 * 100_000  # staging buffers
    rates = seen["rates"]
    assert 1 < rates["steps"] < 100
    assert rates["parameters"] == pytest.approx(100_000 * rates["steps"])
    assert rates["h2d"] == pytest.approx(2 * 4 * 100_000 * rates["steps"], rel=0.01)
    assert rates["d2h"] == pytest.approx(2 * 4 * 100_000 * rates["steps"], rel=0.01)
    page = command("--once", "--interval", "0.1").stdout
    assert f"\n{child.pid} " in "\n" + page
    assert "virtual machine" in page


@linux
def test_live_until_ctrl_c_and_until_the_end(train: Callable[..., subprocess.Popen]) -> None:
    child = train(machine="contextlib.nullcontext()")
    for ending in ("interrupt", "end"):
        ours, theirs = os.openpty()
        watcher = subprocess.Popen(
            [sys.executable, "-m", "ghoffload", "watch", str(child.pid), "--interval", "0.1"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        text = ""
        while text.count(str(child.pid)) < 6:
            text += os.read(ours, 4096).decode(errors="replace")
        if ending == "interrupt":
            watcher.send_signal(signal.SIGINT)
        else:
            child.kill()
            child.wait()
        while True:
            try:
                more = os.read(ours, 4096).decode(errors="replace")
            except OSError:  # the other end is closed
                break
            text += more
        assert watcher.wait(60) == 0
        os.close(ours)
        assert "Traceback" not in text
        assert (f"Process {child.pid} has ended." in text) == (ending == "end")


@linux
def test_a_reader_that_stops_reading_ends_it(train: Callable[..., subprocess.Popen]) -> None:
    train(machine="contextlib.nullcontext()")
    watcher = subprocess.Popen(
        [sys.executable, "-m", "ghoffload", "watch", "--json", "--interval", "0.1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watcher.stdout is not None
    assert watcher.stderr is not None
    assert json.loads(watcher.stdout.readline())["processes"]
    watcher.stdout.close()
    assert watcher.wait(60) == 0
    assert watcher.stderr.read() == ""
    watcher.stderr.close()


@linux
@pytest.mark.gpu
def test_a_process_that_trains_on_a_gpu(train: Callable[..., subprocess.Popen]) -> None:
    child = train("cuda", machine="contextlib.nullcontext()")
    time.sleep(0.2)
    found = published(child.pid)
    assert found is not None
    ((name, bus_id),) = found.devices
    assert name == f"cuda:{torch.cuda.current_device()}"
    (line,) = command(str(child.pid), "--once", "--json").stdout.splitlines()
    frame = json.loads(line)
    (gpu,) = frame["gpus"]
    assert gpu["bus_id"] == bus_id
    assert 0 < gpu["hbm_used"] <= gpu["hbm_total"]
    assert gpu["watts"] > 0
    assert gpu["celsius"] > 0
    (seen,) = frame["processes"]
    assert seen["rates"]["h2d"] == pytest.approx(800_000 * seen["rates"]["steps"], rel=0.01)
