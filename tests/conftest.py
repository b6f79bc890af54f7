"""Settings of all tests."""

import gc

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    # Keras collects garbage whenever a test clears its session, and walks each time
    # through all that the imports have made: half a second for TensorFlow.
    gc.collect()
    gc.freeze()
