"""The processor of a vlm: what turns its prompts and pictures into inputs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from mergelab.checkpoints.headers import Checkpoint
from mergelab.errors import DamagedFileError, MachineError
from mergelab.live.model import quiet_transformers
from mergelab.sweeps.identity import hash_json


@dataclass(frozen=True)
class Processor:
    """A loaded processor, and a hash of what decides its outputs besides the tokenizer."""

    processor: Any
    sha256: str


def load_processor(checkpoint: Checkpoint) -> Processor:
    """Load the processor of a vlm's folder.

    Which library resizes is part of the hash: pillow's and torchvision's pixels differ.

    Raises:
        MachineError: It needs a library that is not installed.
        DamagedFileError: Its files are missing or cannot be loaded.
    """
    from transformers import AutoProcessor

    folder = checkpoint.folder
    try:
        with quiet_transformers():
            processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        first = str(error).strip().partition("\n")[0]
        raise MachineError(
            f"{folder}: its processor needs a library that is not installed ({first}). "
            "Install with: pip install 'mergelab[vision]'"
        ) from error
    except Exception as error:  # transformers raises many kinds for a missing or damaged processor
        raise _unusable(checkpoint, str(error)) from error
    # Without its files AutoProcessor hands out a bare tokenizer.
    if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
        raise _unusable(checkpoint, f"only a {type(processor).__name__} was found")
    content = {
        "processor": processor.to_dict(),
        "classes": [type(part).__name__ for part in (processor, processor.image_processor)],
        "template": processor.chat_template,
        "versions": {name: version(name) for name in ("pillow", "torchvision") if find_spec(_MODULES[name])},
    }
    return Processor(processor, hash_json(_plain(content)))


_MODULES = {"pillow": "PIL", "torchvision": "torchvision"}
_NOT_THE_PICTURE = ("name_or_path", "_name_or_path", "_processor_class", "transformers_version")


def _plain(value: Any) -> Any:
    """Return a value as JSON can say it, without what depends on where the files lie."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if key not in _NOT_THE_PICTURE}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _unusable(checkpoint: Checkpoint, why: str) -> DamagedFileError:
    return DamagedFileError(
        f"{checkpoint.folder}: its processor cannot be loaded ({why}). Picture tasks need preprocessor_config.json or "
        "processor_config.json, with the image processor's settings: fetch the complete vlm."
    )
