"""Builds live models and hands out their weights by canonical name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from mergelab.errors import DamagedFileError, PairingError
from mergelab.towers.generic import REPAIRS
from mergelab.towers.layouts import locate_tower
from mergelab.towers.parts import find_parts

ATTENTION = "sdpa"

_UNSET = -7_777_777
"""Stands in a buffer of integers until it is computed."""


@dataclass
class LiveModel:
    """A tower's weights on a device, seen as a text model and, where asked for, inside their vlm.

    ``vlm`` is None without a picture view. Otherwise its language part and ``text`` share storage: one write
    changes both.
    """

    text: PreTrainedModel
    vlm: PreTrainedModel | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the live weights by canonical name; a tied head appears once, as the embedding.

        Experts that lie stacked in memory appear one by one, as the class stores them. Buffers that checkpoints store
        (Gemma 4's layer scalars, DeepSeek's correction of the router) are weights too. Asked for anew before every
        write: code that wraps a model may replace its parameters.
        """
        return _expert_by_expert(dict(_weights(self.text)))

    @property
    def num_parameters(self) -> int:
        """Parameters of the text view."""
        return sum(parameter.numel() for parameter in self.text.parameters())


def _expert_by_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace stacked experts [experts, rows, columns] by views of each one.

    Classes that stack them so store them one by one; those that stack them transposed (Llama4, GPT-OSS) store the
    stack, and theirs stays.
    """
    stacked = find_parts(None, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, {})
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        parts = stacked.get(name, ())
        if not parts or not all(part.view.whole.is_run for part in parts):
            found[name] = tensor
            continue
        flat = tensor.view(-1)
        for part in parts:
            first = part.view.offset
            found[part.name] = flat[first : first + part.view.num_entries].view(part.view.shape)
    return found


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and load reports; what they say is checked and raised instead."""
    verbosity = transformers_logging.get_verbosity()
    had_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bar:
            transformers_logging.enable_progress_bar()


def _with_attention(build: Callable[[str], Any]) -> Any:
    """Build a model with sdpa attention, or with eager attention where the class cannot run sdpa.

    Soft-capped scores and learned sink logits are beyond sdpa; transformers says so before weights are loaded.
    """
    try:
        return build(ATTENTION)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return build("eager")


def load_text_model(folder: Path, device: str, dtype: torch.dtype) -> LiveModel:
    """Load a plain text checkpoint with its own config.

    Raises:
        DamagedFileError: Not every weight of the model is in the folder, or the folder holds others.
    """
    return LiveModel(text=_load(AutoModelForCausalLM, folder, device, dtype))


def build_tower(config: PretrainedConfig, device: str, dtype: torch.dtype, vlm_folder: Path | None = None) -> LiveModel:
    """Build the live model of a tower.

    Args:
        config: The tower's causal-LM config (``configs.tower_config``).
        device: Where the weights live.
        dtype: Dtype of the weights and of the forward pass.
        vlm_folder: The vlm, if pictures are to be answered as well. Its language weights then are the text
            view's. Without it the text view's weights are uninitialised: stream a checkpoint into them first.

    Raises:
        DamagedFileError: The vlm folder does not hold every weight of its model class.
        PairingError: The vlm's language weights cannot be shared with the text class.
    """
    with torch.device("meta"):
        text = _with_attention(
            lambda name: AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=name)
        )
    _compute_buffers(text, device)
    vlm = None
    if vlm_folder is None:
        for name, tensor in [*_weights(text)]:
            _put(text, name, torch.empty_like(tensor, device=device))
    else:
        vlm = _load(AutoModelForImageTextToText, vlm_folder, device, dtype, REPAIRS)
        _share_weights(text, vlm, tied=bool(config.tie_word_embeddings))
    if config.tie_word_embeddings:
        text.tie_weights()
    stranded = [name for name, t in (*text.named_parameters(), *text.named_buffers()) if t.is_meta]
    if stranded:
        raise PairingError(
            f"{type(text).__name__}: no live storage for {', '.join(stranded[:5])} ({len(stranded)} in all). "
            "This architecture cannot be measured live yet."
        )
    return LiveModel(text=text.eval(), vlm=vlm)


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and storage of everything that a checkpoint of the model holds, shared storage once."""
    stored = model.state_dict().keys()
    yield from ((name, parameter.data) for name, parameter in model.named_parameters())
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in stored)


def _put(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> None:
    """Give a parameter or buffer of the model new storage."""
    module_name, _, attribute = name.rpartition(".")
    module = model.get_submodule(module_name)
    is_parameter = attribute in module._parameters
    setattr(module, attribute, torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


def _compute_buffers(text: PreTrainedModel, device: str) -> None:
    """Compute the buffers that no checkpoint holds, such as rotary frequencies, for a model without storage.

    transformers gives each such buffer its value in the hook that also initialises weights; those have no storage here,
    so that for them the hook does nothing.

    Raises:
        PairingError: The hook leaves a buffer as it was, which would then be random.
    """
    stored = text.state_dict().keys()
    computed = {name: buffer for name, buffer in text.named_buffers() if name not in stored}
    for name, buffer in computed.items():
        blank = float("nan") if buffer.is_floating_point() else _UNSET
        _put(text, name, torch.full_like(buffer, blank, device=device))
    owners = {name.rpartition(".")[0] for name in computed}
    with torch.no_grad():
        for owner in sorted(owners):
            text._init_weights(text.get_submodule(owner))
    stranded = [
        name
        for name in computed
        if bool((value.isnan() if (value := text.get_buffer(name)).is_floating_point() else value == _UNSET).any())
    ]
    if stranded:
        raise PairingError(
            f"{type(text).__name__}: it computes {', '.join(stranded[:5])} when it is made, which cannot be done here. "
            "This architecture cannot be measured live yet."
        )


def tower_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every weight of a tower's text model, as ``LiveModel.tensors`` will name them.

    No weight is allocated. A tied head is left out.
    """
    return {name: tuple(tensor.shape) for name, tensor in tower_outline(config).items()}


def tower_outline(config: PretrainedConfig, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Return every weight of a tower's text model without storage, in the dtype that it has in a model of ``dtype``."""

    def build(attention: str) -> Any:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)

    with torch.device("meta"):
        text = _with_attention(build)
    if config.tie_word_embeddings:
        text.tie_weights()
    return LiveModel(text).tensors()


def _load(
    auto_class: Any, folder: Path, device: str, dtype: torch.dtype, key_mapping: Mapping[str, str] | None = None
) -> PreTrainedModel:
    def build(attention: str) -> Any:
        return auto_class.from_pretrained(
            folder,
            dtype=dtype,
            device_map=None if device == "cpu" else {"": device},  # straight to the device, not through host memory
            attn_implementation=attention,
            output_loading_info=True,
            key_mapping=key_mapping,
            local_files_only=True,
            trust_remote_code=False,
        )

    with quiet_transformers():
        model, info = _with_attention(build)
    problems = [
        f"{what}: {', '.join(map(str, sorted(info[key])[:5]))} ({len(info[key])} in all)"
        for key, what in (
            ("missing_keys", "not in the files"),
            ("unexpected_keys", "in the files, but not in the model"),
            ("mismatched_keys", "of another shape"),
        )
        if info.get(key)
    ]
    if problems:
        raise DamagedFileError(
            f"{folder}: the weights are not those of {type(model).__name__}: {'; '.join(problems)}. "
            "Loading would leave random weights; fetch the complete checkpoint."
        )
    return model.to(device).eval()


@dataclass(frozen=True)
class _InMemory:
    """What ``locate_tower`` asks of a tensor."""

    shape: tuple[int, ...]
    dtype: str


def _share_weights(text: PreTrainedModel, vlm: PreTrainedModel, tied: bool) -> None:
    """Make the parameters of ``text`` those of the language part of ``vlm``.

    The rules that read names on disk read those in memory as well. Rows that only the vlm's vocabulary has stay out.
    """
    memory = vlm.state_dict()
    expected = {name: tensor.shape for name, tensor in text.state_dict().items()}
    headers = {name: _InMemory(tuple(tensor.shape), str(tensor.dtype)) for name, tensor in memory.items()}
    stored = dict(locate_tower(headers, vlm.config.to_dict(), expected).stored)
    if tied:
        stored.pop("lm_head.weight", None)
    state = {name: memory[own] for name, own in stored.items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in state and name in expected and len(state[name]) > expected[name][0]:
            state[name] = state[name][: expected[name][0]]
    wrong = [name for name, tensor in state.items() if expected.get(name, tensor.shape) != tensor.shape]
    outcome = text.load_state_dict({n: t for n, t in state.items() if n not in wrong}, strict=False, assign=True)
    missing = [name for name in outcome.missing_keys if not (tied and name == "lm_head.weight")]
    if missing or outcome.unexpected_keys:
        raise PairingError(
            f"{type(vlm).__name__}: its language weights do not fill {type(text).__name__}: "
            f"missing {missing[:5]}, left over {outcome.unexpected_keys[:5]}."
        )
