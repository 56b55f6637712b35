"""Offline, seeded, one thread: what every test may rely on."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out unless -m asks for them; skip GPU tests, with the reason, where there is none."""
    if not config.getoption("markexpr"):
        skip_slow = pytest.mark.skip(reason="slow: run with pytest -m slow")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skip_slow)
    if any("gpu" in item.keywords for item in items):
        import torch

        if not torch.cuda.is_available():
            skip_gpu = pytest.mark.skip(reason="gpu: torch sees no CUDA device here")
            for item in items:
                if "gpu" in item.keywords:
                    item.add_marker(skip_gpu)


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the caches of the tests away from the user's."""
    os.environ["MERGELAB_CACHE_DIR"] = str(tmp_path_factory.mktemp("mergelab-cache"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny tensors are slower on several threads, and other jobs may share the machine."""
    import sys

    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
