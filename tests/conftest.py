"""What every test shares: an unexpected warning of ours is a failure."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from statsbridge import StatsBridgeWarning

# The same examples each time, so that a red run means changed code; HYPOTHESIS_PROFILE=explore seeks new ones.
settings.register_profile("repeat", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=5000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


@pytest.fixture(autouse=True)
def no_unexpected_warning(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    yield
    ours = [str(warning.message) for warning in recwarn if issubclass(warning.category, StatsBridgeWarning)]
    assert not ours, f"statsbridge warned without being expected to: {ours}"
