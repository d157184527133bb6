"""Where a mirror goes: what the code names, the user's run, the environment, W&B's defaults; and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from statsbridge_wandb import WandB
from wandb_helpers import run_script

from statsbridge import ConfigError
from statsbridge.testing import check_destination, check_key

VARIABLES = ("PROJECT", "ENTITY", "RUN_GROUP", "MODE", "DIR", "BASE_URL", "SERVICE")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(f"WANDB_{name}", raising=False)


def test_the_default_is_the_public_server_and_nobody_named_it() -> None:
    destination = WandB().destination()
    assert (destination.address, destination.explicit) == ("https://api.forge.coreweave.com", False)
    assert destination.details["url_from"] == "default"


def test_the_environment_decides_what_the_code_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in zip(VARIABLES, ("p", "e", "g", "offline", str(tmp_path), "https://w.example"), strict=False):
        monkeypatch.setenv(f"WANDB_{name}", value)
    destination = WandB().destination()
    assert (destination.address, destination.explicit) == (str(tmp_path / "wandb"), False)
    assert {name: destination.details[name] for name in ("project", "entity", "group", "url")} == {
        "project": "p", "entity": "e", "group": "g", "url": "https://w.example"
    }  # fmt: skip
    assert WandB(project="mine").destination().details["project"] == "mine"
    assert WandB("https://other.example/").destination().address == "https://other.example"


@pytest.mark.parametrize("mode", ["online", "offline", "disabled"])
def test_the_mode_is_the_users(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    assert WandB().destination().details["mode"] == mode


def test_offline_names_its_folder_only_where_the_code_does(tmp_path: Path) -> None:
    here = WandB("offline").destination()
    assert (here.address, here.explicit) == (os.path.join(os.getcwd(), "wandb"), False)
    for adapter in (WandB("offline", dir=str(tmp_path)), WandB(f"offline:{tmp_path}")):
        assert adapter.destination() == WandB(mode="offline", dir=str(tmp_path)).destination()
        assert (adapter.destination().address, adapter.destination().explicit) == (str(tmp_path / "wandb"), True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"target": "api.wandb.ai"}, "no target"),
        ({"target": "https://key@wandb.example"}, "no target"),
        ({"target": "ftp://wandb.example"}, "no target"),
        ({"mode": "dry"}, "one of online, offline, disabled"),
        ({"target": "offline", "mode": "online"}, "contradict"),
        ({"target": "https://wandb.example", "mode": "offline"}, "contradict"),
        ({"target": "offline:a", "dir": "b"}, "one of them"),
        ({"attach": True, "project": "p"}, "goes where your run goes"),
    ],
)
def test_what_means_nothing_is_refused_at_once(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        WandB(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("adapter", [WandB("offline"), WandB(attach=True)], ids=["own", "attach"])
def test_keys_and_options_conform(adapter: WandB) -> None:
    check_key(lambda: type(adapter)(**adapter.options()))


def test_asking_for_the_destination_imports_and_touches_nothing() -> None:
    check_destination(lambda: WandB("offline"))


def test_the_users_open_run_decides_what_the_code_does_not(tmp_path: Path) -> None:
    code = """
    import json, wandb
    from statsbridge_wandb import WandB
    run = wandb.init(project="team", entity="us", group="sweep", dir="w", settings={"base_url": "https://w.example"})
    first = WandB().destination()
    run.finish()
    print(json.dumps([first.address, first.explicit, dict(first.details), run.id]))
    """
    address, explicit, details, identity = json.loads(run_script(code, tmp_path))
    assert (address, explicit) == (str(tmp_path / "w" / "wandb"), False)
    assert details["user_run"] == identity
    assert [details[name] for name in ("project", "entity", "group", "url")] == [
        "team",
        "us",
        "sweep",
        "https://w.example",
    ]
