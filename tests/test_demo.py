"""``ghoffload demo``: what it trains, what it leaves behind, and how it ends."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ghoffload import cli
from ghoffload.demo import command, picture, text
from ghoffload.demo.display import Display
from ghoffload.demo.model import GPT
from ghoffload.demo.place import Place
from ghoffload.demo.presets import PRESETS
from ghoffload.demo.steppers import InHbm, Offloaded
from ghoffload.demo.train import Interrupt, Result, train
from ghoffload.memory import ledger

ROOT = Path(__file__).resolve().parents[1]
TINY = PRESETS["tiny"]
STEPS = 5
# Losses of the two optimizers over so few steps: 1e-6 measured, on the CPU and the same on any.
TOLERANCE = 1e-4


def start(out: Path, *words: str, machine: str = "virtual") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ghoffload", "demo", "--preset", "tiny", "--out", str(out), *words],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "GHOFFLOAD_MACHINE": machine,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def loaded(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "demo.json").read_text(encoding="utf-8"))
    return document


def held(run: dict[str, Any]) -> dict[str, tuple[str, int]]:
    return {row["what"]: (row["memory_kind"], row["nbytes"]) for row in run["held"]}


def check_runs(document: dict[str, Any], *, host: str) -> None:
    """What holds on every machine."""
    parameters = 2 * 256 * 64 + 64 * 64 + 2 * (12 * 64**2 + 2 * 64) + 64
    offloaded, in_hbm = document["runs"]
    assert [run["name"] for run in document["runs"]] == ["OffloadAdamW", "torch AdamW"]
    for run in document["runs"]:
        assert run["parameters"] == parameters
        assert run["stopped"] is None
        assert len(run["losses"]) == len(run["seconds"]) == STEPS
        assert all(map(math.isfinite, run["losses"]))
        assert run["losses"][0] == pytest.approx(math.log(256), abs=0.2)
        assert run["losses"][-1] < run["losses"][0] - 0.5
        assert [step for step, _ in run["validation"]] == [1, 2, 3, 4, 5]
        assert run["validation"][-1][1] < run["validation"][0][1]
        assert run["median_step_seconds"] > 0
        assert held(run)["weights"] == ("device", 2 * parameters)
        assert held(run)["gradients"] == ("device", 2 * parameters)
        on = host if run is offloaded else "device"
        for array in ("exp_avg", "exp_avg_sq"):
            assert held(run)[array] == (on, 4 * parameters)
    assert held(offloaded)["rest"] == (host, 2 * parameters)
    assert held(in_hbm)["master"] == ("device", 4 * parameters)
    differences = [abs(a - b) for a, b in zip(offloaded["losses"], in_hbm["losses"], strict=True)]
    assert max(differences) <= TOLERANCE
    assert document["comparison"]["max_loss_difference"] == max(differences)
    # Four staging buffers of a bucket: whole multiples of 1,024 elements below 128 KiB of state.
    assert held(offloaded)["staging buffers"] == ("device", 4 * 10 * 12 * 1024)
    assert "staging buffers" not in held(in_hbm)
    for direction in ("h2d", "d2h"):
        assert offloaded[f"{direction}_bytes_per_step"] == 10 * parameters
        assert in_hbm[f"{direction}_bytes_per_step"] == 0
    assert in_hbm["peak_hbm_bytes"] > offloaded["peak_hbm_bytes"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("demo") / "new" / "directory"
    process = start(out, "--steps", str(STEPS))
    said, complaints = process.communicate(timeout=240)
    assert process.returncode == 0, complaints
    return out, said


def test_json_of_a_run_on_the_virtual_machine(finished: tuple[Path, str]) -> None:
    document = loaded(finished[0])
    check_runs(document, host="pinned")
    assert document["interrupted"] is False
    assert document["figures"].startswith("simulated")
    assert document["machine"]["kind"] == "virtual"
    assert document["versions"]["torch"] == torch.__version__
    assert document["dtype"] == {"weights": "bfloat16", "activations": "float32"}
    # Forward and backward are the same, so the peaks differ by what the optimizers hold.
    offloaded, in_hbm = document["runs"]
    at_rest = [
        sum(nbytes for kind, nbytes in held(run).values() if kind == "device")
        for run in (offloaded, in_hbm)
    ]
    assert in_hbm["peak_hbm_bytes"] - offloaded["peak_hbm_bytes"] == at_rest[1] - at_rest[0]
    assert offloaded["peak_hbm_bytes"] > at_rest[0]


def test_picture_of_a_run(finished: tuple[Path, str]) -> None:
    from matplotlib import image

    pixels = image.imread(finished[0] / "demo.png")
    width, height = (round(inches * picture.DPI) for inches in picture.INCHES)
    assert pixels.shape == (height, width, 4)
    for half in (pixels[:, : width // 2], pixels[:, width // 2 :]):  # a panel each
        assert 0.02 < np.mean(half[..., :3].min(axis=-1) < 0.9) < 0.7


def test_what_is_printed_without_a_terminal(finished: tuple[Path, str]) -> None:
    out, said = finished
    lines = said.splitlines()
    assert sum(line.startswith("OffloadAdamW  step") for line in lines) == STEPS
    assert max(map(len, lines)) < 200
    assert "\x1b" not in said
    assert "VIRTUAL MACHINE" in said
    assert "peak virtual HBM" in said
    assert "Losses of the two differ by at most" in said
    assert f"{out / 'demo.json'}, {out / 'demo.png'}" in said


def test_progress_is_a_few_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    result = Result("OffloadAdamW")
    with Display(Console(), steps=1000, tokens=512) as display:
        display.start(result.name)
        for _ in range(1000):
            result.losses.append(5.0)
            result.seconds.append(0.5)
            display.step(result)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11
    assert lines[5] == "OffloadAdamW  step  500/1000  loss 5.000      1,024 tokens/s  4:10 left"


def test_progress_on_a_terminal_is_a_bar() -> None:
    import io

    from rich.console import Console

    screen = io.StringIO()
    result = Result("OffloadAdamW", losses=[4.25], seconds=[0.5])
    console = Console(file=screen, force_terminal=True, width=100)
    with Display(console, steps=11, tokens=512) as display:
        display.start(result.name)
        display.step(result)
    shown = screen.getvalue()
    assert "1/11" in shown
    assert "loss 4.250" in shown
    assert "1,024 tokens/s  0:05 left" in shown


@pytest.mark.gpu
def test_json_of_a_run_on_a_gpu(tmp_path: Path) -> None:
    process = start(tmp_path, "--steps", str(STEPS), machine="cuda")
    _, complaints = process.communicate(timeout=240)
    assert process.returncode == 0, complaints
    document = loaded(tmp_path)
    check_runs(document, host="pinned")
    assert document["figures"] == "measured"
    assert document["machine"]["gpu"] == torch.cuda.get_device_name()


@pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGINT for one child process")
def test_an_interrupt_ends_with_what_there_is(tmp_path: Path) -> None:
    process = start(tmp_path, "--steps", "100000")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("OffloadAdamW  step"):
            break
    process.send_signal(signal.SIGINT)
    said, complaints = process.communicate(timeout=120)
    assert process.returncode == 130, complaints
    assert "stopping after this step; Ctrl-C again aborts" in said
    assert "OffloadAdamW stopped: interrupted" in said
    assert "Traceback" not in complaints
    document = loaded(tmp_path)
    assert document["interrupted"] is True
    assert document["comparison"] is None
    (run,) = document["runs"]
    assert run["stopped"] == "interrupted"
    assert 1 <= len(run["losses"]) < 100000
    assert run["validation"][-1][0] == len(run["losses"])
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.skipif(os.name != "posix", reason="os.kill is another thing on Windows")
def test_a_second_interrupt_aborts() -> None:
    before = signal.getsignal(signal.SIGINT)
    said: list[str] = []
    with Interrupt(lambda: said.append("stopping")) as interrupt:
        assert not interrupt.noted
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.noted
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert said == ["stopping"]
    assert signal.getsignal(signal.SIGINT) is before


def refused(*words: str) -> int:
    return cli.main(["demo", *words])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run in this process, in an empty directory, on the virtual machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GHOFFLOAD_MACHINE", "virtual")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # the command sets it where it is not set

    def never(*args: object, **kwargs: object) -> None:
        pytest.fail("trained all the same")

    monkeypatch.setattr(command, "train", never)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--preset", "2b"],
            "argument --preset: expected one of auto, tiny, laptop, 1b, 3b; got '2b'",
        ),
        (["--steps", "0"], "argument --steps: expected a whole number of 1 or more, got '0'"),
        (["--steps", "ten"], "argument --steps: expected a whole number of 1 or more, got 'ten'"),
        (["--seed=-1"], "argument --seed: expected a whole number of 0 or more, got '-1'"),
    ],
)
def test_arguments_that_cannot_be_read(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert refused(*words) == 2
    assert capsys.readouterr().err.endswith(f"ghoffload demo: error: {sentence}\n")
    assert list(here.iterdir()) == []


def one_sentence(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("ghoffload demo: error: ")
    assert said.err.count("\n") == 1
    return said.err


def test_an_output_directory_that_cannot_be_written(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "file").write_text("in the way")
    assert refused("--out", "file") == 2
    assert "expected a directory to write to, got 'file': File exists" in one_sentence(capsys)


def test_matplotlib_is_missing(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert refused() == 2
    assert "pip install 'ghoffload[demo]'" in one_sentence(capsys)
    assert list(here.iterdir()) == []


def test_a_gpu_that_torch_cannot_use(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ghoffload.machine import topology

    monkeypatch.delenv("GHOFFLOAD_MACHINE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(topology, "unusable_gpu", lambda: "torch cannot use it.")
    assert refused() == 2
    assert "error: torch cannot use it. " in one_sentence(capsys)


def test_a_standard_library_in_a_zip_file(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "standard_library", lambda: here / "python313.zip")
    assert refused() == 2
    said = one_sentence(capsys)
    assert "got 0 bytes in 0 .py files" in said
    assert "zip" in said


def test_a_bad_option_in_the_environment(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GHOFFLOAD_MASTER", "fp8")
    assert refused() == 2
    assert "master expects one of" in one_sentence(capsys)


def test_the_command_line_loads_nothing_heavy() -> None:
    code = (
        "import argparse, sys, ghoffload.demo as demo\n"
        "demo.add_arguments(argparse.ArgumentParser())\n"
        "print({'torch', 'numba', 'rich', 'matplotlib', 'numpy'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "set()\n", done.stderr


def test_defaults_of_the_command_line() -> None:
    from ghoffload import demo

    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    args = parser.parse_args([])
    assert (args.preset, args.steps, args.seed) == ("auto", None, 0)
    assert args.out == Path("ghoffload-demo")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_count_their_parameters(name: str) -> None:
    preset = PRESETS[name]
    with torch.device("meta"):
        model = GPT(
            hidden=preset.hidden,
            layers=preset.layers,
            heads=preset.heads,
            context=preset.context,
            compute=torch.bfloat16,
        )
    assert preset.parameters == sum(p.numel() for p in model.parameters())
    least = {"tiny": 1e5, "laptop": 2e6, "1b": 1.1e9, "3b": 3e9}[name]
    assert least < preset.parameters < 1.7 * least


def test_the_model_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = GPT(hidden=32, layers=2, heads=2, context=16, compute=torch.float32)
    tokens = torch.randint(0, 256, (1, 17))
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256  # the last target: it is no input
    logits = []
    model.output.register_forward_hook(lambda module, args, out: logits.append(out))
    losses = model(tokens), model(changed)
    assert torch.equal(*logits)
    assert losses[0] != losses[1]
    changed = tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 256
    model(changed)
    same = (logits[0] == logits[2]).all(dim=-1)[0]
    assert same.tolist() == [True] * 8 + [False] * 8


def test_text_is_sorted_and_without_installed_packages(tmp_path: Path) -> None:
    for name in ("b/c.py", "a.py", "site-packages/x.py", "test/y.py", "b/z.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<{name}>")
    for number in range(20):
        (tmp_path / f"m{number:02}.py").write_text(f"<{number:02}>")
    read = text.read_text(tmp_path, context=2)
    assert read.files == 22
    # The first of each 20 files is for validation.
    assert bytes(read.validation) == b"<a.py><18>"
    assert bytes(read.train) == b"<b/c.py>" + b"".join(b"<%02d>" % n for n in range(20) if n != 18)
    with pytest.raises(FileNotFoundError, match=r"got 94 bytes in 22 \.py files"):
        text.read_text(tmp_path, context=10)


def test_batches_repeat_with_their_seed_and_stay_in_the_text() -> None:
    data = np.arange(40, dtype=np.uint8)
    first, again, other = (text.Batches(data, batch=64, context=8, seed=seed) for seed in (3, 3, 4))
    drawn = first.draw()
    assert drawn.shape == (64, 9)
    assert drawn.dtype == np.int64
    assert np.array_equal(drawn, again.draw())
    assert not np.array_equal(drawn, other.draw())
    assert np.array_equal(np.diff(drawn), np.ones((64, 8)))
    assert {drawn.min(), drawn.max()} == {0, 39}  # the first and the last byte can be drawn


@pytest.fixture(scope="module")
def words() -> text.Text:
    return text.read_text(context=TINY.context)


def trained(
    kind: type[Offloaded] | type[InHbm],
    words: text.Text,
    *,
    interrupt: Interrupt | None = None,
    on_step: Callable[[Result], None] = lambda result: None,
    **changes: Any,
) -> Result:
    place = Place(torch.device("cpu"))
    preset = dataclasses.replace(TINY, **{"steps": 3, **changes})
    interrupt = interrupt or Interrupt(lambda: None)
    return train(kind, place, preset, words, seed=0, interrupt=interrupt, on_step=on_step)


@pytest.mark.parametrize("kind", [Offloaded, InHbm])
def test_a_run_that_is_interrupted_between_two_steps(
    kind: type[Offloaded] | type[InHbm], words: text.Text
) -> None:
    interrupt = Interrupt(lambda: None)

    def on_step(result: Result) -> None:
        interrupt.noted = len(result.losses) == 2

    result = trained(kind, words, interrupt=interrupt, on_step=on_step, steps=20)
    assert result.stopped == "interrupted"
    assert len(result.losses) == 2
    assert [step for step, _ in result.validation] == [2]


def test_nothing_of_a_run_is_left_behind(words: text.Text) -> None:
    before = ledger.total()
    assert trained(Offloaded, words).stopped is None
    assert ledger.total() == before


def test_hbm_that_suffices_with_offloading_alone(words: text.Text) -> None:
    peaks = [trained(kind, words).peak_hbm_bytes for kind in (Offloaded, InHbm)]
    assert peaks[0] is not None
    assert peaks[1] is not None
    between = (peaks[0] + peaks[1]) // 2
    assert trained(Offloaded, words, hbm_bytes=between).stopped is None
    stopped = trained(InHbm, words, hbm_bytes=between).stopped
    assert stopped is not None
    assert stopped.startswith("out of memory: virtual HBM out of memory. Tried to allocate")


def test_an_optimizer_that_does_not_fit_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GHOFFLOAD_MACHINE", "virtual")
    monkeypatch.setitem(command.PRESETS, "tiny", dataclasses.replace(TINY, host_bytes=1_000_000))
    code = command.run("tiny", 2, tmp_path, 0)
    assert code == 1
    assert "OffloadAdamW stopped: out of memory: virtual host out" in capsys.readouterr().out
    offloaded, in_hbm = loaded(tmp_path)["runs"]
    assert offloaded["losses"] == []
    assert offloaded["final_loss"] is None
    assert len(in_hbm["losses"]) == 2
