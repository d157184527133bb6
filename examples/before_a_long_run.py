"""Before a long run: is this data, this model, this learning rate worth starting at all?

python examples/before_a_long_run.py        # needs scikit-learn and plotly: pip install "statsbridge[demo,figures]"

The same checklist from the command line, in the folder examples:
statsbridge preflight before_a_long_run:setup
"""

import itertools

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import statsbridge
from statsbridge.debug import find_dead_units, preflight, revive_dead_units


def setup():
    """Handwritten digits and a small network: what `statsbridge preflight before_a_long_run:setup` calls."""
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    mixed = torch.randperm(len(images))
    training, validation = mixed[:1500], mixed[1500:]
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    return {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "loader": DataLoader(TensorDataset(images[training], labels[training]), batch_size=60, shuffle=True),
        "validation": TensorDataset(images[validation], labels[validation]),
        "classes": 10,
    }


def main(steps: int = 60) -> None:
    """Run the checklist, kill most units, see the training stand still, bring them back and record how it learns."""
    torch.set_num_threads(1)
    given = setup()
    checked = preflight(**given)
    print(checked)

    model, loss, loader = given["model"], given["loss"], given["loader"]
    with torch.no_grad():  # as one step with much too large a rate would leave it
        model[0].bias[:23] = -50.0
        model[2].bias[:23] = -50.0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    *_, value = train(model, loss, loader, optimizer, steps)
    print(f"loss {value:.3f}, accuracy {accuracy(model, loader):.3f} after {steps} steps with most units dead")
    found = find_dead_units(model, loss, loader)
    print(found)
    print(revive_dead_units(model, found, optimizer))

    run = statsbridge.init(model, every=10, name="before a long run")
    checked.log_to(run)  # what was measured stands in the run, and goes where it is mirrored
    for value in train(model, loss, loader, optimizer, steps):
        run.step(loss=value)
    print(f"loss {value:.3f}, accuracy {accuracy(model, loader):.3f} after as many steps more")
    find_dead_units(model, loss, loader).log_to(run)
    run.finish()
    print(f"recorded in {run.path}")


def train(model, loss, loader, optimizer, steps):
    """So many steps, over and over through the loader; gives the loss of each."""
    epochs = itertools.repeat(loader)
    for inputs, labels in itertools.islice(itertools.chain.from_iterable(epochs), steps):
        value = loss(model(inputs), labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        yield value.detach()


@torch.no_grad()
def accuracy(model, loader) -> float:
    """The share of the samples that are told right."""
    right = [model(inputs).argmax(1) == labels for inputs, labels in loader]
    return float(torch.cat(right).float().mean())


if __name__ == "__main__":
    main()
