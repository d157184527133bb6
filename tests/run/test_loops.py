"""Training loops of every kind: the same weights with and without us, and the numbers of tensors computed by hand.

One function a loop. It trains with whatever `start` returns, a run or nothing at all, and tells what each step's
rows must be about.
"""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from joins import check_joins
from recording import events, rows, scalars
from tap_oracle import check_numbers
from torch import Tensor, nn
from torch.nn import functional

import statsbridge

Loss = Callable[[Tensor], Tensor]
pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """Two linear layers with a Tanh between, which has a second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.tanh = nn.Tanh()
        self.second = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.tanh(self.first(x)))  # type: ignore[no-any-return]


class Nothing:
    """A run that is not there."""

    def step(self, *_: Any, **__: Any) -> None:
        pass

    log = log_tensor = step


Key = tuple[int, str, str, str]  # step, site, module, tensor


class Told:
    """What the rows of a run must be: tensors, a status, or scalars of each step."""

    def __init__(self) -> None:
        self.tensors: dict[Key, list[Tensor]] = {}
        self.status: dict[Key, str] = {}
        self.scalars: dict[tuple[str, int], float] = {}
        self.losses: list[Tensor] = []
        self.kinds: set[str] = set()  # events that must be there

    def add(self, step: int, site: str, module: str, value: Tensor, tensor: str = "") -> None:
        self.tensors.setdefault((step, site, module, tensor), []).append(value.detach().clone())

    def hand(self, step: int, model: Net, x: Tensor, loss: Loss, prefix: str = "", backward: bool = True) -> None:
        """Activations and their gradients of one pass, by autograd on the formulas."""
        a = functional.linear(x, model.first.weight.detach(), model.first.bias.detach()).requires_grad_()
        b = a.tanh()
        c = functional.linear(b, model.second.weight.detach(), model.second.bias.detach())
        found = torch.autograd.grad(loss(c), (a, b, c))
        for module, value, gradient in zip(("first", "tanh", "second"), (a, b, c), found, strict=True):
            self.add(step, "activation", f"{prefix}{module}", value)
            if backward:
                self.add(step, "activation_grad", f"{prefix}{module}", gradient)
        root = prefix.rstrip(".")
        self.add(step, "activation", root, c)
        if backward:
            self.add(step, "activation_grad", root, found[2])

    def parameters(self, step: int, model: nn.Module, prefix: str = "") -> None:
        """Parameters and gradients as they are when the optimizer is about to step."""
        for name, parameter in model.named_parameters():
            module, tensor = f"{prefix}{name}".rsplit(".", 1)
            self.add(step, "parameter", module, parameter, tensor)
            if parameter.grad is not None:
                self.add(step, "parameter_grad", module, parameter.grad, tensor)

    def updates(self, step: int, model: nn.Module, prefix: str = "") -> None:
        """How far the parameters are from what `parameters` was told."""
        for name, parameter in model.named_parameters():
            module, tensor = f"{prefix}{name}".rsplit(".", 1)
            before = self.tensors[step, "parameter", module, tensor][0]
            self.add(step, "update", module, parameter.detach() - before, tensor)


Start = Callable[..., Any]


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


def batch(size: int = 5) -> Tensor:
    return torch.randn(size, 8)


def one_step(run: Any, told: Told, step: int, model: Net, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """A plain step, told in full."""
    told.hand(step, model, x, mean_square)
    loss = mean_square(model(x))
    optimizer.zero_grad()
    loss.backward()
    told.parameters(step, model)
    optimizer.step()
    told.updates(step, model)
    told.losses.append(loss.detach())
    run.step(loss=loss)


def accumulation(start: Start, told: Told) -> nn.Module:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = start(model)
    for step in range(2):
        optimizer.zero_grad()
        for size in (5, 2, 7):
            x = batch(size)
            told.hand(step, model, x, lambda y: mean_square(y) / 3)
            (mean_square(model(x)) / 3).backward()
        told.parameters(step, model)
        optimizer.step()
        told.updates(step, model)
        run.step()
    return model


def generator_and_discriminator(start: Start, told: Told) -> nn.Module:
    """The discriminator's gradients are those of its own step, not those that the generator's backward adds."""
    generator, discriminator = Net(), nn.Linear(3, 1)
    optimizers = [torch.optim.Adam(generator.parameters()), torch.optim.SGD(discriminator.parameters(), lr=0.1)]
    run = start({"generator": generator, "discriminator": discriminator})
    for step in range(2):
        noise, real = batch(), torch.randn(4, 3)
        weight, bias = discriminator.weight.detach().clone(), discriminator.bias.detach().clone()
        fake = generator(noise)
        optimizers[1].zero_grad()
        loss = discriminator(real).sigmoid().mean() - discriminator(fake.detach()).sigmoid().mean()
        loss.backward()
        for given, sign in ((real, 1), (fake.detach(), -1)):
            y = functional.linear(given, weight, bias).requires_grad_()
            told.add(step, "activation", "discriminator", y)
            told.add(step, "activation_grad", "discriminator", torch.autograd.grad(sign * y.sigmoid().mean(), y)[0])
        told.parameters(step, nn.ModuleDict({"discriminator": discriminator}))
        optimizers[1].step()
        told.updates(step, nn.ModuleDict({"discriminator": discriminator}))
        weight, bias = discriminator.weight.detach(), discriminator.bias.detach()
        told.hand(step, generator, noise, lambda y: functional.linear(y, weight, bias).sigmoid().mean(), "generator.")  # noqa: B023
        y = functional.linear(fake.detach(), weight, bias).requires_grad_()
        told.add(step, "activation", "discriminator", y)
        told.add(step, "activation_grad", "discriminator", torch.autograd.grad(y.sigmoid().mean(), y)[0])
        optimizers[0].zero_grad()
        discriminator(fake).sigmoid().mean().backward()
        told.parameters(step, nn.ModuleDict({"generator": generator}))
        optimizers[0].step()
        told.updates(step, nn.ModuleDict({"generator": generator}))
        run.step(loss=loss)
    return nn.ModuleList([generator, discriminator])


def lbfgs(start: Start, told: Told) -> nn.Module:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    run = start(model)
    for step in range(2):
        x = batch()
        told_before = {name: p.detach().clone() for name, p in model.named_parameters()}

        def closure() -> Tensor:
            optimizer.zero_grad()
            told.hand(step, model, x, mean_square)  # noqa: B023
            loss = mean_square(model(x))  # noqa: B023
            loss.backward()
            return loss

        run.step(loss=optimizer.step(closure))
        for name, parameter in model.named_parameters():
            module, tensor = name.rsplit(".", 1)
            assert parameter.grad is not None
            told.add(step, "parameter", module, told_before[name], tensor)
            told.add(step, "update", module, parameter.detach() - told_before[name], tensor)
            told.add(step, "parameter_grad", module, parameter.grad, tensor)
    return model


def autocast(start: Start, told: Told) -> nn.Module:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = start(model)
    for step in range(2):
        x = batch()
        with torch.autocast("cpu", torch.bfloat16):
            half = functional.linear(x, model.first.weight.detach(), model.first.bias.detach())
            assert half.dtype == torch.bfloat16
            told.add(step, "activation", "first", half)
            out = functional.linear(half.tanh(), model.second.weight.detach(), model.second.bias.detach())
            told.add(step, "activation", "second", out)
            loss = mean_square(model(x).float())
        out = out.detach().requires_grad_()
        told.add(step, "activation_grad", "second", torch.autograd.grad(mean_square(out.float()), out)[0])
        optimizer.zero_grad()
        loss.backward()
        told.parameters(step, model)
        optimizer.step()
        told.updates(step, model)
        run.step(loss=loss)
    return model


def scaled(fused: bool) -> Callable[[Start, Told], nn.Module]:
    def loop(start: Start, told: Told) -> nn.Module:
        model = Net()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
        run = start(model, grad_scaler=scaler)
        for step in range(4):
            x = batch()
            if step == 2:
                told.status[step, "parameter_grad", "second", "weight"] = "step_skipped"
                told.kinds |= {"optimizer_step_skipped", "nonfinite_loss_outside"}
            else:
                told.hand(step, model, x, mean_square)
            loss = mean_square(model(x)) * (float("inf") if step == 2 else 1.0)
            optimizer.zero_grad()
            scale = scaler.scale(torch.ones(())).item()
            scaler.scale(loss).backward()
            if step != 2:
                for name, parameter in model.named_parameters():
                    module, tensor = name.rsplit(".", 1)
                    assert parameter.grad is not None
                    told.add(step, "parameter", module, parameter, tensor)
                    told.add(step, "parameter_grad", module, parameter.grad / scale, tensor)
            scaler.step(optimizer)
            scaler.update()
            if step != 2:
                told.updates(step, model)
            run.step(loss=loss)
        return model

    return loop


def clipping(start: Start, told: Told) -> nn.Module:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = start(model)
    for step in range(3):
        x = batch() * 10
        told.hand(step, model, x, mean_square)
        optimizer.zero_grad()
        mean_square(model(x)).backward()
        norm = torch.cat([p.grad.ravel() for p in model.parameters() if p.grad is not None]).double().norm().item()
        before = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        told.scalars["grad_norm", step] = norm if step < 2 else 0.01  # where it is not given, what the hook sees
        told.scalars["grad_norm_applied", step] = 0.01
        told.parameters(step, model)
        optimizer.step()
        told.updates(step, model)
        run.step(**({"grad_norm": before} if step < 2 else {}))
    return model


def gradient_penalty(start: Start, told: Told) -> nn.Module:
    """The gradients of the inner pass are no gradients of the step; what flows back through them is."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = start(model)
    for step in range(2):
        x = batch().requires_grad_()
        a = functional.linear(x, model.first.weight, model.first.bias)
        b = a.tanh()
        c = functional.linear(b, model.second.weight, model.second.bias)
        inner = torch.autograd.grad(c.sum(), x, create_graph=True)[0]
        by_hand = torch.autograd.grad(mean_square(c) + inner.square().sum(), (a, b, c))
        for module, value, gradient in zip(("first", "tanh", "second"), (a, b, c), by_hand, strict=True):
            told.add(step, "activation", module, value)
            told.add(step, "activation_grad", module, gradient)
        y = model(x)
        (penalty,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        optimizer.zero_grad()
        (mean_square(y) + penalty.square().sum()).backward()
        told.parameters(step, model)
        optimizer.step()
        told.updates(step, model)
        run.step()
    return model


def validation(start: Start, told: Told) -> nn.Module:
    """Between steps and inside one, under no_grad, in inference mode, and with gradients in eval mode."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = start(model)
    for step in range(3):
        x = batch()
        told.hand(step, model, x, mean_square)
        loss = mean_square(model(x))
        model.eval()
        with torch.no_grad():
            model(batch(50))
        with torch.inference_mode():
            model(batch(60))
        model(batch(70))
        model.train()
        with torch.no_grad():
            model(batch(80))
        optimizer.zero_grad()
        loss.backward()
        told.parameters(step, model)
        optimizer.step()
        told.updates(step, model)
        run.step(loss=loss)
        model.eval()
        with torch.no_grad():
            run.log({"val/loss": mean_square(model(batch(90)))})
        model.train()
    return model


def interrupted(error: type[BaseException], where: str) -> Callable[[Start, Told], nn.Module]:
    """Raised in a forward, in a backward, or between: the loop catches it and goes on with another batch."""

    def loop(start: Start, told: Told) -> nn.Module:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = start(model)

        def stop(*_: Any) -> None:
            raise error("stopped")

        for step in range(3):
            if step == 1:
                broken, x = batch(7), batch()
                handle = model.tanh.register_forward_hook(stop) if where == "forward" else None
                try:
                    y = model(broken)
                    if where == "between":
                        stop()
                    y.register_hook(stop)
                    mean_square(y).backward()
                except (KeyboardInterrupt, ValueError):
                    pass
                if handle is None:  # the pass itself ended well, and had no gradient
                    told.hand(step, model, broken, mean_square, backward=False)
                else:
                    handle.remove()
                y = None  # type: ignore[assignment]
                optimizer.zero_grad()
            x = batch()
            one_step(run, told, step, model, optimizer, x)
            if step == 1 and where == "backward":
                # Our hook on the output ran before the one that raised.
                told.tensors.pop((1, "activation_grad", "second", ""))
                told.tensors.pop((1, "activation_grad", "", ""))
        return model

    return loop


def forward_called_directly(start: Start, told: Told) -> nn.Module:
    """Its hooks do not run: the children are seen, the model itself is not."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = start(model)
    for step in range(2):
        x = batch()
        told.hand(step, model, x, mean_square)
        for site in ("activation", "activation_grad"):
            told.tensors.pop((step, site, "", ""))
        told.status[step, "activation", "", ""] = "not_called"
        optimizer.zero_grad()
        mean_square(model.forward(x)).backward()
        told.parameters(step, model)
        optimizer.step()
        told.updates(step, model)
        run.step()
    return model


def optimizer_replaced(start: Start, told: Told) -> nn.Module:
    model = Net()
    run = start(model)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        one_step(run, told, step, model, optimizer, batch())
        told.scalars["lr/0", step] = 0.1 if step < 2 else 0.01
    return model


def copied_saved_and_loaded(start: Start, told: Told) -> nn.Module:
    model = Net()
    run = start(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x = batch()
        if step == 1:
            twin = copy.deepcopy(model)
            again = pickle.loads(pickle.dumps(model))
            for other in (twin, again):
                mean_square(other(batch(40))).backward()
        if step == 2:
            buffer = io.BytesIO()
            torch.save(model.state_dict(), buffer)
            buffer.seek(0)
            model.load_state_dict(torch.load(buffer))
        if step == 3:  # this one replaces the parameters
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one_step(run, told, step, model, optimizer, x)
    return model


LOOPS: dict[str, Callable[[Start, Told], nn.Module]] = {
    "gradient accumulation": accumulation,
    "a generator and a discriminator": generator_and_discriminator,
    "a closure": lbfgs,
    "bfloat16 under autocast": autocast,
    "a scaler that skips a step": scaled(fused=False),
    "a scaler and a fused optimizer": scaled(fused=True),
    "clipping": clipping,
    "gradient penalty": gradient_penalty,
    "validation": validation,
    "forward() called directly": forward_called_directly,
    "an optimizer replaced": optimizer_replaced,
    "copied, saved and loaded": copied_saved_and_loaded,
    **{
        f"{error.__name__} in {where}": interrupted(error, where)
        for error in (ValueError, KeyboardInterrupt)
        for where in ("forward", "backward", "between")
    },
}


def train(name: str, start: Start) -> tuple[Told, list[Tensor]]:
    torch.manual_seed(4)
    told = Told()
    model = LOOPS[name](start, told)
    return told, [*told.losses, *(value.clone() for value in model.state_dict().values())]


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_trains_the_same_and_its_numbers_are_right(name: str, tmp_path: Path) -> None:
    _, plain = train(name, lambda *_, **__: Nothing())
    runs: list[statsbridge.Run] = []

    def start(model: Any, **options: Any) -> statsbridge.Run:
        runs.append(statsbridge.init(model, dir=tmp_path, every=1, **options))
        return runs[-1]

    told, watched = train(name, start)
    runs[0].finish()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert not torch.overrides._get_current_function_mode_stack()
    check(statsbridge.load(runs[0].path), told)


def check(data: statsbridge.RunData, told: Told) -> None:
    assert check_joins(data) == data.stats.num_rows
    assert {event["kind"] for event in data.events.to_pylist()} == told.kinds
    found = {(r["step"], r["site"], r["module"], r["tensor"]): r for r in rows(data)}
    assert len(found) == data.stats.num_rows
    assert told.tensors
    for key, tensors in told.tensors.items():
        check_numbers(found[key], tensors)
    for key, status in told.status.items():
        assert (found[key]["status"], found[key]["mean"]) == (status, None)
    for (name, step), value in told.scalars.items():
        assert scalars(data.scalars, name)[step] == pytest.approx(value, rel=1e-3), (name, step)


# Several runs, as in a notebook whose cell is run again


def test_two_runs_at_once_record_the_same(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model, told = Net(), Told()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runs = [statsbridge.init(model, dir=tmp_path, every=1) for _ in range(2)]

    class Both:
        def step(self, **given: Any) -> None:
            for run in runs:
                run.step(**given)

    for step in range(3):
        one_step(Both(), told, step, model, optimizer, batch())
    for run in runs:
        run.finish()
    for run in runs:
        check(statsbridge.load(run.path), told)


@pytest.mark.parametrize("finished", [True, False])
def test_a_cell_that_is_run_again(finished: bool, tmp_path: Path) -> None:
    """The first run is finished, or simply left: the second is as if it were alone."""
    torch.manual_seed(4)
    model, told = Net(), [Told(), Told()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runs = []
    for turn in range(2):
        run = statsbridge.init(model, dir=tmp_path, every=1)
        runs.append(run)
        for step in range(3):
            one_step(run, told[turn], step, model, optimizer, batch())
        if finished or turn:
            run.finish()
    check(statsbridge.load(runs[1].path), told[1])
    if not finished:
        assert runs[0]._collector.is_open, "it waits for a step that will not come"
        runs[0].finish()
    check(statsbridge.load(runs[0].path), told[0])


def test_a_run_that_is_left_does_not_keep_the_model_alive(tmp_path: Path) -> None:
    model = Net()
    run = statsbridge.init(model, dir=tmp_path, every=1)
    mean_square(model(batch())).backward()
    run.step()
    gone = weakref.ref(model)
    del model
    assert gone() is None
    run.finish()


# Labels of events


@pytest.mark.parametrize("stride", [None, 1, 10])
def test_what_happens_during_a_step_has_the_label_of_that_step(stride: int | None, tmp_path: Path) -> None:
    model = Net()
    run = statsbridge.init(model, dir=tmp_path, every=1)
    with pytest.warns(statsbridge.StatsBridgeWarning, match="no torch.Tensor"):
        for number in range(4):
            mean_square(model(batch())).backward()
            if number >= 2 or not stride:
                run.log_tensor("nonsense", number)
            run.step(**({} if stride is None else {"step": number * stride}))
            run.note("after")
            with pytest.warns(statsbridge.StatsBridgeWarning) if number == 0 else _quiet():
                run.log({"bad": object()})
    run.finish()
    data = statsbridge.load(run.path)
    labels = [number * (stride or 1) for number in range(4)]
    assert [e["step"] for e in events(data, "bad_tensor")] == (labels if stride is None else labels[2:])
    assert [e["step"] for e in events(data, "note")] == labels
    assert [e["step"] for e in events(data, "bad_scalar")] == labels


def _quiet() -> Any:
    from contextlib import nullcontext

    return nullcontext()
