"""Under Hugging Face's Trainer: accumulation, clipping, a scheduler, and a resumed run.

Needs transformers and accelerate, which ghoffload does not; skipped where they are not installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ghoffload
from ghoffload.check.programs import same_bits

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 256, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def train(kind: str, folder: Path, device: str, resume: str | None = None) -> list[Any]:
    """The loss of every step, and the weights."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads)).to(device)
    if kind == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = ghoffload.OffloadAdamW(
            model.parameters(), lr=1e-3, config={"bucket_bytes": 65536}
        )
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=10,
        save_steps=5,
        logging_steps=1,
        max_grad_norm=1.0,
        seed=0,
        data_seed=0,
        report_to=[],
        use_cpu=device == "cpu",
        disable_tqdm=True,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Tokens(), optimizers=(optimizer, schedule)
    )
    trainer.train(resume_from_checkpoint=resume)
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return [losses, [p.detach().clone() for p in model.parameters()]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_trains_as_torch_and_resumes_bit_for_bit(tmp_path: Path, device: str) -> None:
    losses, weights = train("ghoffload", tmp_path / "ours", device)
    theirs, _ = train("torch", tmp_path / "theirs", device)
    assert len(losses) == 10
    assert losses == pytest.approx(theirs, abs=2e-3)
    again, resumed = train(
        "ghoffload", tmp_path / "ours", device, resume=str(tmp_path / "ours" / "checkpoint-5")
    )
    assert again[5:] == losses[5:]
    assert same_bits(resumed, weights)
