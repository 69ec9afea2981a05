"""Combinations of a device and a codec that do not exist are not collected."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out ANS on a host, which neither encodes nor decodes it."""
    strange = [item for item in items if _is_strange(item)]
    config.hook.pytest_deselected(items=strange)
    items[:] = [item for item in items if item not in strange]


def _is_strange(item: pytest.Item) -> bool:
    chosen = getattr(getattr(item, "callspec", None), "params", {})
    return chosen.get("device") == "cpu" and chosen.get("codec") == "ans"
