"""What a captured step asks of the steps beside it, as far as no GPU is needed."""

from __future__ import annotations

import pytest
import torch
from optim_tools import CPU, parameters, same_weights, set_grads, snapshot, train

from ghoffload import OffloadAdamW
from ghoffload.machine.virtual import VirtualMachine

FORK = "step waits for replays"
JOIN = "graph ends with its write-backs"


@pytest.mark.parametrize("transfer", ["copy_engine", "kernel"])
def test_after_a_capture_each_step_is_ordered_with_the_current_stream(
    virtual: VirtualMachine, transfer: str
) -> None:
    ours, expected = parameters(), parameters()
    config = {"bucket_bytes": 4096, "staging_buffers": 2, "transfer": transfer}
    optimizer = OffloadAdamW(ours, config=config)
    reference = OffloadAdamW(expected, machine="cpu", config=CPU.config())
    train(optimizer, steps=2)
    assert FORK not in virtual.labels
    assert JOIN not in virtual.labels
    optimizer._open_engine._stepper.captured = True
    train(optimizer, start=2, steps=2)
    assert virtual.labels[FORK] == 6  # three lanes a step
    assert virtual.labels[JOIN] == (2 if transfer == "copy_engine" else 0)
    # So a replay after it would find what came before complete: here the current stream has it all.
    train(reference, steps=4)
    assert same_weights(ours, expected)
    assert snapshot(optimizer)["state"] == snapshot(reference)["state"]


def test_a_step_on_the_cpu_is_refused_and_changes_nothing(
    virtual: VirtualMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = parameters()
    optimizer = OffloadAdamW(params, config={"step_device": "cpu"})
    train(optimizer, steps=1)
    before = snapshot(optimizer)
    set_grads(params, 1)
    with monkeypatch.context() as patch:
        patch.setattr(VirtualMachine, "capturing", True)
        with pytest.raises(RuntimeError, match=r"step_device='cpu'.* cannot be captured into a"):
            optimizer.step()
    assert snapshot(optimizer) == before
    optimizer.step()
    assert not torch.equal(params[0], parameters()[0])
