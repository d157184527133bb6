"""The loops of docs/quickstart.md that somebody else writes, as they stand there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from joins import check_joins
from recording import rows, scalars
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import statsbridge

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:::lightning")]

Result = list[Tensor]


def block(beginning: str) -> str:
    """The code of the page that begins so, without the two lines that would sample every 100th step only."""
    found = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if code.startswith(beginning)]
    assert len(found) == 1, f"{len(found)} blocks of {PAGE.name} begin with {beginning!r}"
    return str(found[0]).replace("every=100", "every=2")


def both_ways(train: Callable[[], Result], monkeypatch: pytest.MonkeyPatch, folder: Path) -> statsbridge.RunData:
    """Train with and without us, to the same bit: what was recorded."""
    monkeypatch.chdir(folder)
    results = []
    for disabled in ("1", "0"):
        monkeypatch.setenv("STATSBRIDGE_DISABLED", disabled)
        torch.manual_seed(0)
        results.append([*train(), torch.rand(1)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    (path,) = (folder / "statsbridge-runs").iterdir()
    data = statsbridge.load(path)
    check_joins(data)
    assert [event["message"] for event in data.events.to_pylist()] == []
    assert {row["status"] for row in rows(data)} <= {None, "not_called", "no_grad"}
    return data


def examples() -> TensorDataset:
    x = torch.randn(48, 10, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].sum(1, keepdim=True))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))


class Tokens(Dataset[dict[str, Tensor]]):
    """Random texts."""

    def __init__(self) -> None:
        self.texts = torch.randint(0, 50, (48, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.texts[index], "labels": self.texts[index]}


def hugging_face(code: str, folder: Path, **options: Any) -> Any:
    """A Trainer of a small GPT-2, with the callback that is made by `code`."""
    import transformers

    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, **sizes))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=0.1,
        max_steps=6,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens())
    exec(code, {"statsbridge": statsbridge, "transformers": transformers, "trainer": trainer})
    return trainer


def test_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = block("class Statsbridge(transformers")

    def train() -> Result:
        trainer = hugging_face(code, tmp_path, eval_strategy="steps", eval_steps=3, save_strategy="no")
        trainer.evaluate()
        trainer.train()
        return list(trainer.model.parameters())

    data = both_ways(train, monkeypatch, tmp_path)
    assert sorted({row["step"] for row in rows(data)}) == [2, 4, 6]
    assert sorted(scalars(data.scalars, "loss")) == [1, 2, 3, 4, 5, 6]
    assert sorted(scalars(data.scalars, "eval_loss")) == [3, 6]
    assert data.scalars["name"].to_pylist().count("grad_norm") == 6
    # The two micro-batches of four texts, and neither of the evaluations.
    (embedded,) = rows(data, module="transformer.drop", site="activation", step=2)
    assert embedded["count"] == 2 * 4 * 12 * 16


def test_a_trainer_that_was_interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import transformers

    monkeypatch.chdir(tmp_path)
    code = block("class Statsbridge(transformers").replace("every=2", 'every=2, name="x", resume="auto"')

    class Interrupt(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, _: Any, state: Any, *rest: Any, **more: Any) -> None:
            if state.global_step == 5:
                raise KeyboardInterrupt

    first = hugging_face(code, tmp_path, save_steps=3)
    first.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        first.train()
    (callback,) = [one for one in first.callback_handler.callbacks if type(one).__name__ == "Statsbridge"]
    callback.run.__exit__(KeyboardInterrupt, None, None)  # as the end of the process does
    hugging_face(code, tmp_path, save_steps=3).train(resume_from_checkpoint=True)
    (path,) = (tmp_path / "statsbridge-runs").iterdir()
    data = statsbridge.load(path)
    assert [(row["step"], row["attempt"]) for row in data.scalars.to_pylist() if row["name"] == "loss"] == [
        *((step, 0) for step in (1, 2, 3)),
        *((step, 1) for step in (4, 5, 6)),
    ]
    assert sorted({row["step"] for row in rows(data)}) == [2, 4, 6]


@pytest.mark.parametrize("manual", [False, True])
def test_lightning(manual: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import lightning

    callback = block("class Statsbridge(lightning").split("\n\n\n")[0]

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.automatic_optimization = not manual

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor | None:
            loss = self.loss(batch)
            if not manual:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
            self.log("val_loss", self.loss(batch))

        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    def train() -> Result:
        module = Module()
        names: dict[str, Any] = {"statsbridge": statsbridge, "lightning": lightning}
        exec(callback, names)
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
        accumulating = {} if manual else {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", callbacks=[names["Statsbridge"]()], **quiet, **accumulating
        )
        loader = DataLoader(examples(), batch_size=4)
        trainer.fit(module, loader, loader)
        return list(module.parameters())

    data = both_ways(train, monkeypatch, tmp_path)
    batches, micro_batches = (24, 1) if manual else (12, 2)
    assert sorted({row["step"] for row in rows(data)}) == list(range(0, batches, 2))
    assert sorted(scalars(data.scalars, "loss")) == ([] if manual else list(range(batches)))
    assert sorted(scalars(data.scalars, "grad_norm")) == list(range(batches))
    assert len(scalars(data.scalars, "val_loss")) == 2
    assert {row["count"] for row in rows(data, module="net.0", site="activation")} == {micro_batches * 4 * 16}


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import accelerate
    from accelerate.state import AcceleratorState

    code = block("model, optimizer, loader = accelerator")

    def train() -> Result:
        AcceleratorState._reset_state(True)
        model = network()
        names = {
            "statsbridge": statsbridge,
            "accelerator": accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision),
            "model": model,
            "optimizer": torch.optim.Adam(model.parameters(), lr=1e-2),
            "loader": DataLoader(examples(), batch_size=4),
            "criterion": nn.functional.mse_loss,
        }
        exec(code, names)
        return list(model.parameters())

    data = both_ways(train, monkeypatch, tmp_path)
    assert sorted({row["step"] for row in rows(data)}) == [0, 2, 4]
    assert sorted(scalars(data.scalars, "loss")) == list(range(6))
    before, applied = scalars(data.scalars, "grad_norm"), scalars(data.scalars, "grad_norm_applied")
    assert all(applied[step] == pytest.approx(min(before[step], 1.0), rel=1e-4) for step in range(6))
    assert max(before.values()) > 1.0, "nothing was clipped"
    assert {row["count"] for row in rows(data, module="0", site="activation")} == {2 * 4 * 16}
