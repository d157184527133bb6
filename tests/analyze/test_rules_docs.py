"""docs/rules.md names every rule, every limit with its value, and both tables of trainings."""

from dataclasses import fields
from pathlib import Path

from zoo_broken_helpers import BROKEN
from zoo_healthy_helpers import HEALTHY

from statsbridge.analyze.rules.words import WORDS
from statsbridge.analyze.thresholds import Thresholds

TEXT = (Path(__file__).parents[2] / "docs" / "rules.md").read_text(encoding="utf-8")


def test_every_rule_is_there() -> None:
    assert [kind for kind, words in WORDS.items() if f"**`{kind}`**: {words.title}" not in TEXT] == []


def test_every_limit_is_there_with_its_value() -> None:
    joined = " ".join(TEXT.split())
    for field in fields(Thresholds):
        value = "none" if field.default is None else f"{field.default:g}"
        forms = [f"`{field.name}` = {form}" for form in (value, value.replace("e-0", "e-").replace("e+0", "e"))]
        assert any(form in joined for form in forms), forms


def test_both_tables_are_whole() -> None:
    for name in HEALTHY:
        assert f"\n| {name} |" in TEXT
    for name, broken in BROKEN.items():
        assert f"\n| {name} | `{broken.kind}` |" in TEXT
