"""Names of scalars as they leave where names are hashed."""

from statsbridge.mirror.hashing import Namer


def test_one_ranks_part_of_a_norm_keeps_its_name() -> None:
    """`shard/…` is ours, as is what it is a part of; a user's name behind it is a user's name."""
    namer = Namer(bytes(32))
    own = ("grad_norm", "grad_norm_applied", "param_norm", "update_norm", "param_norm_before")
    for name in own:
        assert namer.scalar(f"shard/{name}") == f"shard/{name}"
    assert namer.scalar("shard/secret") == f"shard/{namer.scalar('secret')}"
    assert "secret" not in namer.scalar("shard/secret")
    assert "secret" not in namer.scalar("shard/shard/secret")
    assert namer.scalar("lr/secret/0") == f"lr/{namer.name('group', 'secret')}/0"
