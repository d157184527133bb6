"""`WandB(attach=True)`: rows of ours inside the user's run, which keeps its steps; with W&B's real client, offline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from statsbridge_wandb import WandB
from wandb_helpers import client_records, client_rows, run_script

from statsbridge import MirrorError, PolicyError
from statsbridge.testing import made_batches, made_run

USER = """
import json, math, threading, wandb
from pathlib import Path
import plotly.graph_objects as go
from statsbridge import Retry
from statsbridge.mirror import Batch
from statsbridge_wandb import WandB
from statsbridge.testing import *
from statsbridge.testing.session import compare, expected, read

yours = wandb.init(project="p", dir=".", settings=wandb.Settings(x_disable_stats=True))
run = made_run(Path("."))
session = Session(WandB(attach=True), run)
stop, count = threading.Event(), 0

def log():
    global count
    while not stop.is_set() or count < 80:
        yours.log({"theirs": count}, **({"step": 3 * count} if EXPLICIT else {}))
        count += 1
        stop.wait(0.01)

training = threading.Thread(target=log)
training.start()
for batch in made_batches(10):
    session.send(batch)
names = [made_point(made_series(name), 21, float(n)) for n, name in enumerate(dict.fromkeys(HARD_NAMES))]
session.send(Batch(names, [made_histogram(21)]))
hard = [made_point(made_series("hard"), 22 + n, value) for n, value in enumerate(HARD_VALUES)]
session.send(Batch(hard))
late = [made_point(made_series("loss"), 3, value, late=40) for value in (99.0, 98.0)]
session.send(Batch(late))  # late values have rows of their own
adapter = session.adapter
session.call("figure", adapter.figure, "a figure", go.Figure(), 30)
session.call("alert", adapter.alert, made_event(30))
stop.set()
training.join()
step = yours.step
session.close()
assert (yours.step, wandb.run is yours) == (step, True)
yours.log({"after": 1})
yours.finish()
wandb.teardown()
found = read(WandB(attach=True), run, session.destination, session.memory)
compare(found, expected(adapter, session.acknowledged))
assert len(found) == len(session.acknowledged) > 200
print(json.dumps({"step": step, "count": count, "file": session.memory["file"]}))
"""


@pytest.mark.parametrize("explicit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_row_of_both_arrives_and_no_step_of_the_user_is_used_up(tmp_path: Path, explicit: bool) -> None:
    told = json.loads(run_script(USER.replace("EXPLICIT", str(explicit)), tmp_path))
    file = Path(told["file"])
    rows = client_rows(file)
    theirs = [(step, row["theirs"]) for step, row in rows if "theirs" in row]
    assert theirs == [((3 if explicit else 1) * number, number) for number in range(told["count"])]
    assert told["step"] == (3 * (told["count"] - 1) if explicit else told["count"])
    assert all(key in {"theirs", "after"} or key.startswith("statsbridge/") for _, row in rows for key in row)
    (alert,) = client_records(file, "alert")
    assert alert.title == "loss_not_finite: blocks.0.conv"
    metrics = {record.glob_name: record.step_metric for record in client_records(file, "metric") if record.glob_name}
    assert metrics == {"statsbridge/*": "statsbridge/step"}
    assert sum("statsbridge/histograms/activation/std/blocks.0.conv._type" in row for _, row in rows) == 1
    assert sum("statsbridge/figures/a figure._type" in row for _, row in rows) == 1


@pytest.mark.slow
def test_a_user_that_logs_nothing_gives_no_row_and_the_rest_waits(tmp_path: Path) -> None:
    code = """
    import wandb
    from pathlib import Path
    from statsbridge import MirrorError, Retry
    from statsbridge_wandb import WandB, attached
    from statsbridge.testing import Session, made_batches, made_run
    attached.PATIENCE = 0.2
    yours = wandb.init(project="p", dir=".")
    session = Session(WandB(attach=True), made_run(Path(".")))
    batch = made_batches(1)[0]  # two steps: the second waits for a row of its own
    for _ in range(2):
        try:
            session.call("send", session.adapter.send, batch)
        except Retry as error:
            print(error)
    yours.log({"theirs": 0})
    session.send(batch)
    yours.finish()
    try:
        session.call("send", session.adapter.send, made_batches(2)[1])
    except MirrorError as error:
        print(type(error).__name__, error)
    print(session.memory["file"])
    """
    *told, file = run_script(code, tmp_path).splitlines()
    assert told[0] == told[1] == "your W&B run is still at step 0, whose row holds an earlier step of ours"
    assert told[2].startswith("MirrorError your W&B run has ended")
    assert [row["statsbridge/step"] for _, row in client_rows(Path(file))] == [0, 1]


def test_without_a_run_of_the_users_there_is_nothing_to_attach_to(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    adapter = WandB(attach=True)
    with pytest.raises(MirrorError, match=r"call wandb.init\(\) before"):
        adapter.open(run, adapter.destination(), {})
    with pytest.raises(PolicyError, match="restricted"):
        adapter.open(made_run(tmp_path, restricted=True), adapter.destination(), {})
    assert made_batches(1)
