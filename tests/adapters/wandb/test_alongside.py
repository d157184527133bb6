"""The user's own W&B code in the same process: their rows, their step counter and their run are as without us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from wandb_helpers import client_records, client_rows, run_script

# The user logs before, between and after our calls; `between` runs while our batches are being sent.
USER = """
import json, threading, wandb
from pathlib import Path
from statsbridge_wandb import WandB
from statsbridge.testing import Session, made_batches, made_run

explicit, threaded, beside = CASE
count = 0

def log(run, times):
    global count
    for _ in range(times):
        run.log({"theirs": count}, **({"step": 3 * count} if explicit else {}))
        run.log({"late": count}, commit=False)
        count += 1

yours = wandb.init(project="p", group="team", dir=".", settings=wandb.Settings(x_disable_stats=True))
log(yours, 3)
if beside:
    session = Session(WandB(), made_run(Path(".")))
    log(yours, 2)
    sending = threading.Thread(target=log, args=(yours, 60))
    if threaded:
        sending.start()
    for batch in made_batches(12):
        session.send(batch)
        if not threaded:
            log(yours, 5)
    if threaded:
        sending.join()
    assert wandb.run is yours
    session.close()
else:
    log(yours, 62)
log(yours, 3)
wandb.log({"global": 1})
print(json.dumps({"step": yours.step, "id": yours.id, "file": yours.settings.sync_file,
                  "ours": session.memory["id"] if beside else None, "open": not yours._is_finished}))
yours.finish()
"""


def record(folder: Path, **case: bool) -> dict[str, Any]:
    """What the user's script tells at its end, and the rows in its run's file."""
    folder.mkdir()
    values = repr((case["explicit"], case["threaded"], case["beside"]))
    told: dict[str, Any] = json.loads(run_script(USER.replace("CASE", values), folder))
    file = folder / told["file"]
    told["rows"] = client_rows(file)
    told["exit"] = [record.exit_code for record in client_records(file, "exit")]
    return told


@pytest.mark.parametrize(
    ("explicit", "threaded"),
    [
        (True, False),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_the_users_run_is_as_without_us(tmp_path: Path, explicit: bool, threaded: bool) -> None:
    alone = record(tmp_path / "alone", explicit=explicit, threaded=threaded, beside=False)
    beside = record(tmp_path / "beside", explicit=explicit, threaded=threaded, beside=True)
    assert beside["rows"] == alone["rows"]
    assert beside["step"] == alone["step"]
    assert beside["open"]
    assert beside["exit"] == alone["exit"] == [0]
    assert len([row for _, row in beside["rows"] if "theirs" in row]) == 68

    (ours,) = (tmp_path / "beside").glob(f"wandb/offline-run-*-{beside['ours']}/*.wandb")
    assert [step for step, _ in client_rows(ours)] == list(range(24))
    assert all(len(row) == 5 for _, row in client_rows(ours))
    (begun,) = client_records(ours, "run")
    assert (begun.project, begun.run_group, begun.job_type) == ("p", "team", "statsbridge")
    assert (
        json.loads({item.key: item.value_json for item in begun.config.update}["statsbridge"])["beside"] == beside["id"]
    )


def test_a_run_that_the_user_begins_after_ours_is_their_own(tmp_path: Path) -> None:
    code = """
    import json, os, sys
    from pathlib import Path
    from statsbridge_wandb import WandB
    from statsbridge.testing import Session, made_batches, made_run
    session = Session(WandB(), made_run(Path(".")))
    session.send(made_batches(1)[0])
    assert "wandb" not in sys.modules  # our client lives in another process
    assert "WANDB_SERVICE" not in os.environ
    import wandb
    yours = wandb.init(project="p", dir=".")
    yours.log({"x": 1})
    session.send(made_batches(2)[1])
    yours.finish()
    wandb.teardown()
    session.send(made_batches(3)[2])
    session.close()
    print(json.dumps([yours.id, session.memory["id"], yours.settings.sync_file]))
    """
    yours, ours, file = json.loads(run_script(code, tmp_path))
    assert yours != ours
    assert client_rows(tmp_path / file) == [(0, {"x": 1})]
    (run,) = tmp_path.glob(f"wandb/offline-run-*-{ours}/*.wandb")
    assert [step for step, _ in client_rows(run)] == list(range(6))
