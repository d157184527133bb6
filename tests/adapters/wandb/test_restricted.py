"""A restricted run offline: nothing that W&B's client could capture by itself is in its files, nothing goes out."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from statsbridge_wandb import WandB

from statsbridge import Reject
from statsbridge.testing import Session, check_restricted, made_run


def test_the_store_holds_no_host_user_folder_command_or_printed_text(tmp_path: Path) -> None:
    store = tmp_path / "store"
    check_restricted(lambda: WandB("offline", dir=str(store)), tmp_path, store, more=["statsbridge.testing.child"])
    names = {path.name for path in store.rglob("*") if path.is_file()}
    assert not names & {"requirements.txt", "wandb-metadata.json", "output.log", "conda-environment.yaml", "diff.patch"}


def test_no_folder_leaves_a_restricted_run_since_w_and_b_would_write_its_path(tmp_path: Path) -> None:
    session = Session(WandB("offline", dir=str(tmp_path)), made_run(tmp_path, restricted=True))
    with pytest.raises(Reject, match="path of this machine"):
        session.call("artifact", session.adapter.artifact, tmp_path)
    session.close()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs a host name of its own")
def test_a_host_name_of_its_own_is_nowhere_and_no_connection_is_tried(tmp_path: Path) -> None:
    """The real host name, in W&B's worker and service too; and every proxy variable leads to a socket of ours."""
    code = """
    import os, socket, sys
    sys.argv = ["command-7b1e.py", "--argument-7b1e"]
    os.chdir(sys.orig_argv[-1])
    from pathlib import Path
    from statsbridge.testing import Session, made_batches, made_event, made_histogram, made_run
    from statsbridge.mirror import Batch
    from statsbridge_wandb import WandB
    assert socket.gethostname() == "host-7b1e"
    session = Session(WandB("offline", dir="../store"), made_run(Path(".."), restricted=True))
    for batch in made_batches(3):
        session.send(Batch(batch.points, [made_histogram(batch.points[-1].step)]))
    session.call("alert", session.adapter.alert, made_event(5))
    print("printed-7b1e")
    session.close()
    """
    work = tmp_path / "folder-7b1e"
    work.mkdir()
    subprocess.run(["git", "init", "-q", "."], cwd=work, check=True)
    subprocess.run(["git", "remote", "add", "origin", "https://git-7b1e.example/x"], cwd=work, check=True)
    (work / "wandb").mkdir()
    (work / "wandb" / "settings").write_text("[default]\nproject = project-7b1e\nentity = entity-7b1e\n")
    tried: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_note, args=(listener, tried), daemon=True).start()
        proxy = f"http://127.0.0.1:{listener.getsockname()[1]}"
        variables = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"), proxy)
        variables |= dict.fromkeys(("USER", "LOGNAME", "USERNAME", "WANDB_USERNAME", "WANDB_USER_EMAIL"), "user-7b1e")
        variables |= {"WANDB_HOST": "host-7b1e", "WANDB_TAGS": "tag-7b1e", "WANDB_NOTES": "note-7b1e"}
        variables |= {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path / "home-7b1e")}
        python = [sys.executable, "-c", textwrap.dedent(code), str(work)]
        command = ["unshare", "--uts", "sh", "-c", 'hostname host-7b1e && exec "$@"', "sh", *python]
        done = subprocess.run(command, env=variables, cwd=work, capture_output=True, text=True, check=False)
    if "Operation not permitted" in done.stderr:
        pytest.skip("this system gives no host name of its own")
    assert done.returncode == 0, done.stderr
    assert not tried
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    for path in files:
        assert b"7b1e" not in path.read_bytes(), path


def _note(listener: socket.socket, tried: list[bytes]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        tried.append(connection.recv(200))
        connection.close()
