"""Which files are in force, what they let out together, and what a refusal says."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statsbridge.errors import PolicyError
from statsbridge.mirror import policy as policy_module
from statsbridge.mirror.contract import CHANNELS, Destination
from statsbridge.mirror.destinations import Folder, Url
from statsbridge.mirror.policy import LISTS, Grant, Policy, load_policy
from statsbridge.mirror.policy_file import STATISTICS, TABLES, DestinationRule, Limits, PolicyFile, read_policy_file

LAB = Destination("mlflow", "https://mlflow.lab.example/team", explicit=True)
RULE = '[[destinations]]\nbackend = "mlflow"\nurl = "https://mlflow.lab.example"\n'


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's file in `etc`, the project in `project/sub`; nothing of this machine's counts."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "project" / "sub").mkdir(parents=True)
    monkeypatch.setattr(policy_module, "system_file", lambda: tmp_path / "etc" / "policy.toml")
    monkeypatch.delenv("STATSBRIDGE_POLICY", raising=False)
    monkeypatch.chdir(tmp_path / "project" / "sub")
    return tmp_path


def policy_of(folder: Path, *texts: str) -> Policy:
    files = []
    for number, text in enumerate(texts):
        (folder / f"{number}.toml").write_text(text)
        files.append(read_policy_file(folder / f"{number}.toml", "project"))
    return Policy(frozenset(file for file in files if file is not None))


def refusal(policy: Policy, destination: Destination = LAB, *, restricted: bool = True) -> str:
    with pytest.raises(PolicyError) as error:
        policy.judge(destination, restricted=restricted)
    return str(error.value)


# ---- where files are found ---------------------------------------------------------------------------------------


def test_all_places_count_at_once(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_policy() == Policy()
    wanted = [
        places / "environment.toml",
        places / "etc" / "policy.toml",
        places / "project" / "statsbridge-policy.toml",
        places / "project" / "sub" / "statsbridge-policy.toml",
    ]
    for file in wanted:
        file.write_text("")
    monkeypatch.setenv("STATSBRIDGE_POLICY", str(wanted[0]))
    assert [Path(file.path) for file in load_policy().ordered()] == wanted


def test_a_nearer_file_does_not_lift_what_one_further_up_forbids(places: Path) -> None:
    (places / "project" / "statsbridge-policy.toml").write_text("destinations = []")
    (places / "project" / "sub" / "statsbridge-policy.toml").write_text(RULE)
    assert str(places / "project" / "statsbridge-policy.toml") in refusal(load_policy())


@pytest.mark.parametrize("named", ["", "  ", "nowhere.toml"])
def test_a_variable_that_names_no_file_is_an_error(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATSBRIDGE_POLICY", named)
    with pytest.raises(PolicyError, match=r"\$STATSBRIDGE_POLICY"):
        load_policy()


def test_one_bad_file_is_enough(places: Path) -> None:
    (places / "project" / "sub" / "statsbridge-policy.toml").write_text(RULE)
    (places / "etc" / "policy.toml").symlink_to(places / "project" / "sub" / "statsbridge-policy.toml")
    with pytest.raises(PolicyError, match="symbolic link"):
        load_policy()


def test_a_working_folder_that_is_gone_is_an_error(places: Path) -> None:
    (places / "project" / "sub").rmdir()
    with pytest.raises(PolicyError, match="the working folder is gone"):
        load_policy()


# ---- what they say -----------------------------------------------------------------------------------------------


def test_without_a_policy_an_unrestricted_run_goes_anywhere() -> None:
    for address in ("https://anywhere", "databricks", "relative/path", "https://user:password@host"):
        assert Policy().judge(Destination("x", address, explicit=False), restricted=False) == Grant(frozenset(CHANNELS))


def test_without_a_policy_a_restricted_run_goes_nowhere(tmp_path: Path) -> None:
    told = refusal(Policy())
    assert "no policy file lists any destination" in told
    # What it says to write is what allows it.
    snippet = told.split("write ")[1].split(" into statsbridge-policy.toml")[0]
    assert policy_of(tmp_path, snippet).judge(LAB, restricted=True).channels == {"metrics"}
    folder = Destination("tensorboard", str(tmp_path / "runs"), explicit=True)
    snippet = refusal(Policy(), folder).split("write ")[1].split(" into statsbridge-policy.toml")[0]
    assert policy_of(tmp_path, snippet).judge(folder, restricted=True).channels == {"metrics"}
    assert "no policy file lists any destination" in refusal(policy_of(tmp_path, 'names = "hashed"'))


def test_a_restricted_run_names_its_destination(tmp_path: Path) -> None:
    found = Destination("mlflow", "https://mlflow.lab.example", explicit=False)
    told = refusal(policy_of(tmp_path, RULE), found)
    assert "must name its destination" in told
    assert "backend='mlflow:https://mlflow.lab.example'" in told
    everyone = policy_of(tmp_path, 'applies_to = "all"\n' + RULE)
    assert everyone.judge(found, restricted=False).channels == {"metrics"}


def test_a_refusal_names_the_rule_and_the_file(tmp_path: Path) -> None:
    told = refusal(
        policy_of(tmp_path, RULE),
        Destination("mlflow", "https://mlflow.lab.example.evil.com", explicit=True),
    )
    assert str(tmp_path / "0.toml") in told
    assert "[[destinations]] 1 (mlflow at https://mlflow.lab.example)" in told
    assert "its host is mlflow.lab.example.evil.com, not mlflow.lab.example" in told
    told = refusal(policy_of(tmp_path, RULE), Destination("aim", "https://mlflow.lab.example", explicit=True))
    assert f"policy {tmp_path / '0.toml'}: none of its 1 [[destinations]] is for aim" in told
    told = refusal(
        policy_of(tmp_path, RULE), Destination("mlflow", "https://me:secret@mlflow.lab.example", explicit=True)
    )
    assert str(tmp_path / "0.toml") in told
    assert "names a user before the host" in told
    assert "secret" not in told


def test_a_file_for_all_binds_unrestricted_runs_too(tmp_path: Path) -> None:
    away = Destination("wandb", "https://api.wandb.ai", explicit=False)
    assert policy_of(tmp_path, RULE).judge(away, restricted=False).channels == set(CHANNELS)
    assert str(tmp_path / "0.toml") in refusal(
        policy_of(tmp_path, 'applies_to = "all"\n' + RULE), away, restricted=False
    )


def test_the_first_destination_that_fits_decides(tmp_path: Path) -> None:
    narrow = RULE.replace("example", "example/team") + 'channels = ["alerts"]\n'
    assert policy_of(tmp_path, narrow + RULE).judge(LAB, restricted=True).channels == {"alerts"}
    assert policy_of(tmp_path, RULE + narrow).judge(LAB, restricted=True).channels == {"metrics"}


def test_files_that_leave_nothing_in_common_forbid(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, RULE, RULE + 'channels = ["alerts"]')
    told = refusal(policy)
    assert "no channel open" in told
    assert str(tmp_path / "0.toml") in told
    assert str(tmp_path / "1.toml") in told


def test_a_file_without_destinations_only_limits(tmp_path: Path) -> None:
    grant = policy_of(tmp_path, RULE, 'names = "hashed"\nsites = ["update"]').judge(LAB, restricted=True)
    assert grant.hashed
    assert grant.admits("sites", "update")
    assert not grant.admits("sites", "activation")
    assert grant.admits("statistics", "mean")


ALL = f"channels = {list(CHANNELS)}\n"


def test_the_folder_of_the_run_goes_only_where_everything_may(tmp_path: Path) -> None:
    assert "artifacts" in policy_of(tmp_path, RULE + ALL).judge(LAB, restricted=True).channels
    for limit in ('names = "hashed"', 'sites = ["*"]', 'scalars = ["loss"]', 'tables = ["stats"]'):
        grant = policy_of(tmp_path, RULE + ALL + limit).judge(LAB, restricted=True)
        assert grant.channels == set(CHANNELS) - {"artifacts"}
        assert "artifacts" in grant.withheld[0]
    grant = policy_of(tmp_path, RULE + 'channels = ["metrics", "artifacts"]').judge(LAB, restricted=True)
    assert grant.channels == {"metrics"}


def test_files_that_go_elsewhere_must_be_allowed_there_too(tmp_path: Path) -> None:
    elsewhere = Destination("mlflow", LAB.address, explicit=True, artifacts="s3://bucket/prefix")
    grant = policy_of(tmp_path, RULE + ALL).judge(elsewhere, restricted=True)
    assert grant.channels == set(CHANNELS) - {"artifacts", "figures"}
    assert "s3://bucket/prefix" in grant.withheld[0]
    there = '[[destinations]]\nbackend = "mlflow"\nurl = "s3://bucket"\n'
    figures = there + 'channels = ["metrics", "figures"]\n'
    assert policy_of(tmp_path, RULE + ALL + figures).judge(elsewhere, restricted=True).channels == set(CHANNELS) - {
        "artifacts"
    }
    assert policy_of(tmp_path, RULE + ALL + there + ALL).judge(elsewhere, restricted=True).channels == set(CHANNELS)
    odd = Destination("mlflow", LAB.address, explicit=True, artifacts="mlflow-artifacts:/x")
    assert "figures" not in policy_of(tmp_path, RULE + ALL).judge(odd, restricted=True).channels


def test_figures_show_metrics(tmp_path: Path) -> None:
    grant = policy_of(tmp_path, RULE + 'channels = ["alerts", "figures"]').judge(LAB, restricted=True)
    assert grant.channels == {"alerts"}
    assert grant.withheld == ("figures: they are made of metrics, which may not leave",)


def test_the_digest_tells_the_files_that_apply(tmp_path: Path) -> None:
    one, other = policy_of(tmp_path, RULE), policy_of(tmp_path, RULE + "# changed")
    both = one.combine(other)
    digests = [policy.judge(LAB, restricted=True).policy for policy in (one, other, both)]
    assert len({*digests, ""}) == 4
    assert one.judge(LAB, restricted=False).policy == ""


def test_scalars_are_spelled_out_only_by_every_file_that_hashes(tmp_path: Path) -> None:
    hashing = RULE + 'names = "hashed"\nscalars = ["val/loss", "val/*"]\n'
    listing = 'scalars = ["val/accuracy", "val/loss"]\n'
    assert policy_of(tmp_path, hashing, listing).judge(LAB, restricted=True).spelled_out("val/loss")
    assert not policy_of(tmp_path, hashing, listing).judge(LAB, restricted=True).spelled_out("val/accuracy")
    stricter = policy_of(tmp_path, hashing, 'names = "hashed"').judge(LAB, restricted=True)
    assert not stricter.spelled_out("val/loss")


def test_the_key_is_shared_only_where_every_file_that_hashes_says_so(tmp_path: Path) -> None:
    shared = RULE + 'names = "hashed"\n'
    assert policy_of(tmp_path, 'key_file = "k"\n' + shared).judge(LAB, restricted=True).key_file == str(tmp_path / "k")
    assert policy_of(tmp_path, shared).judge(LAB, restricted=True).key_file is None
    for other in ('names = "hashed"', 'names = "hashed"\nkey_file = "other"'):
        assert policy_of(tmp_path, 'key_file = "k"\n' + shared, other).judge(LAB, restricted=True).key_file is None


# ---- combining ---------------------------------------------------------------------------------------------------

SCALARS = ("loss", "val/loss", "lr/0")
NAMES = {"tables": TABLES, "sites": ("activation", "update"), "statistics": STATISTICS[:4], "scalars": SCALARS}


def subset(names: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...] | None]:
    globs = st.lists(st.sampled_from([*names, "*", f"{names[0][:2]}*"]), max_size=3).map(tuple)
    return st.none() | globs


limits = st.builds(
    Limits,
    channels=st.none() | st.lists(st.sampled_from(CHANNELS), unique=True).map(tuple),
    tables=subset(TABLES),
    sites=subset(NAMES["sites"]),
    statistics=subset(NAMES["statistics"]),
    scalars=subset(SCALARS),
    names=st.sampled_from(["plain", "hashed"]),
    key_file=st.sampled_from([None, "/a", "/b"]),
)
ADDRESSES = st.sampled_from([Url("https", "a", None, ()), Url("https", "a", None, ("x",)), Folder("/no-such-folder")])
files = st.builds(
    PolicyFile,
    path=st.sampled_from(["/1", "/2", "/3", "/4"]),
    place=st.sampled_from(["environment", "system", "project"]),
    digest=st.sampled_from(["d1", "d2", "d3"]),
    restricted_only=st.booleans(),
    limits=limits,
    destinations=st.none()
    | st.lists(
        st.builds(
            DestinationRule, number=st.just(1), backend=st.sampled_from(["m", "*"]), address=ADDRESSES, limits=limits
        ),
        max_size=3,
    ).map(tuple),
)
policies = st.lists(files, max_size=3).map(lambda found: Policy(frozenset(found)))
destinations = st.builds(
    Destination,
    backend=st.sampled_from(["m", "n"]),
    address=st.sampled_from(["https://a", "https://a/x", "/no-such-folder/x"]),
    explicit=st.just(True),
    artifacts=st.sampled_from([None, "https://a/x"]),
)


def leaving(policy: Policy, destination: Destination, restricted: bool) -> set[tuple[str, str]]:
    """Everything that may leave, as pairs that are more where more may."""
    try:
        grant = policy.judge(destination, restricted=restricted)
    except PolicyError:
        return set()
    open_ = {("channel", channel) for channel in grant.channels}
    open_ |= {(kind, name) for kind in LISTS for name in NAMES[kind] if grant.admits(kind, name)}
    if not grant.hashed:
        open_ |= {("plain", "modules"), *(("plain", name) for name in SCALARS)}
    else:
        open_ |= {("plain", name) for name in SCALARS if grant.spelled_out(name)}
    return open_


@given(policies, policies, policies, destinations, st.booleans())
def test_combining_is_commutative_associative_idempotent_and_never_widens(
    a: Policy, b: Policy, c: Policy, destination: Destination, restricted: bool
) -> None:
    assert a.combine(b) == b.combine(a)
    assert a.combine(b).combine(c) == a.combine(b.combine(c))
    assert a.combine(a) == a
    both = leaving(a.combine(b), destination, restricted)
    # The empty policy says nothing for a restricted run, but forbids it all: it is no file that lets it go.
    for one in (a, b):
        if not restricted or any(file.destinations is not None for file in one.files):
            assert both <= leaving(one, destination, restricted)


@given(st.lists(files, max_size=3, unique_by=lambda file: file.path), destinations, st.booleans())
def test_the_order_of_files_changes_nothing(
    found: list[PolicyFile], destination: Destination, restricted: bool
) -> None:
    def outcome(order: tuple[PolicyFile, ...]) -> object:
        policy = Policy()
        for file in order:
            policy = policy.combine(Policy(frozenset([file])))
        try:
            return policy.judge(destination, restricted=restricted)
        except PolicyError as error:
            return str(error)

    assert len({repr(outcome(order)) for order in itertools.permutations(found)}) == 1
