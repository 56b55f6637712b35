"""Each family is built once for all tests of this folder."""

import pytest

from tests.families.checkpoints import Build, Built, build
from tests.families.family import Family


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Return what builds a family, or finds it built."""
    root = tmp_path_factory.mktemp("families")
    known: dict[str, Built] = {}

    def once(family: Family) -> Built:
        if family.id not in known:
            known[family.id] = build(family, root / family.id)
        return known[family.id]

    return once
