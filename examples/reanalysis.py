"""Look at a run again, offline: with other limits, another smoothing and other groups than those used live.

    python examples/reanalysis.py

Needs no GPU, takes a few seconds. The first part trains and records; all that follows needs only the record.
"""

from __future__ import annotations

import torch
from torch import nn

import statsbridge

# %% A training, recorded at every second step, with a validation loss now and then.
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
centres = torch.randn(4, 20)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(0, 4, (size,))
    return centres[labels] + 1.5 * torch.randn(size, 20), labels


inputs, labels = batch(64)
held_out = batch(256)
with statsbridge.init(model, every=2, name="reanalysis", config={"lr": 3e-3, "width": 64}) as run:
    for step in range(120):
        chosen = torch.randint(0, 64, (16,))
        loss = nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
        if step % 6 == 5:
            with torch.no_grad():
                validation = nn.functional.cross_entropy(model(held_out[0]), held_out[1])
            run.log({"val_loss": validation}, step=step, kind="recomputed")

# %% From here on there is only the folder: no torch, on any machine.
data = statsbridge.load(run.path)
print(data, end="\n\n")

# %% Where gradients shrink or grow along the depth, at the last sampled step.
print("gradient and update, relative to the parameter")
for row in data.gradient_flow().to_pylist():
    print(f"  {row['module']}.{row['tensor']:6s}  {row['gradient_to_parameter']:.2e}  {row['update_to_parameter']:.2e}")

# %% Other groups: all layers of a type as one, over the whole training.
print("\nactivations by type, all steps merged")
for row in data.merged_over("module", "step", sites="activation").to_pylist():
    print(f"  {row['type']:10s}  {row['rows']:4d} rows  mean {row['mean']:+.3f}  std {row['std']:.3f}")

# %% Other limits: what would a stricter rule for sparse units have said?
print("\nReLU outputs with more zeros than", end=" ")
for limit in (0.8, 0.55):
    rows = data.select(sites="activation", columns=["module", "type", "step", "zero_fraction"]).to_pylist()
    found = [row for row in rows if row["type"] == "ReLU" and row["zero_fraction"] > limit]
    first = f", first {found[0]['module']} at step {found[0]['step']}" if found else ""
    print(f"{limit:.0%}: {len(found)}{first}", end="; ")

# %% Another smoothing, beside the raw values; and what the shape of the curves says.
print("\n\nlearning curves")
for weight in (0.6, 0.95):
    judged = statsbridge.curves(data, validation="val_loss", smoothing=weight)
    print(f"  weight {weight}: last {judged.smoothed.raw[-1]:.3f}, average {judged.smoothed.corrected[-1]:.3f}")
print(f"  {judged.verdict.word}: {'; '.join(judged.verdict.reasons)}")

# %% Anything else is SQL.
print("\nthe widest update of each layer")
sql = "SELECT module, max(update_ratio) AS widest, arg_max(step, update_ratio) AS step FROM stats GROUP BY 1 ORDER BY 1"
for row in data.query(f"SELECT * FROM ({sql}) WHERE widest IS NOT NULL").to_pylist():
    print(f"  layer {row['module']}: {row['widest']:.3f} at step {row['step']}")
