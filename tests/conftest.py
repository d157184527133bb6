"""What every test shares: an unexpected warning of ours is a failure."""

from collections.abc import Iterator

import pytest

from statsbridge import StatsBridgeWarning


@pytest.fixture(autouse=True)
def no_unexpected_warning(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    yield
    ours = [str(warning.message) for warning in recwarn if issubclass(warning.category, StatsBridgeWarning)]
    assert not ours, f"statsbridge warned without being expected to: {ours}"
