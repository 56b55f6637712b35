"""Builds a family's checkpoints: the vlm in every layout, and a base that is its true tower moved by noise.

The truth is taken from the models in memory, by value and not by name: which stored tensors belong to the tower, what
the plain text class makes of them, what the vlm's class answers on text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from mergelab.live.model import quiet_transformers
from tests.builders import write_tokenizer
from tests.families.family import IMAGE, Family, Layout

TOKENS = ("<pad>", "<s>", "</s>", "<unk>", *(f"word{number}" for number in range(4, IMAGE)))
IDS = torch.tensor([[1, 5, 9, 13, 17, 21, 25, 29, 3, 4, 4, 28], [1, 8, 2, 7, 19, 23, 6, 5, 5, 11, 12, 10]])
"""Text: longer than the tiny sliding windows, without the picture token."""

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Built:
    """One family in memory, and its folders on disk."""

    family: Family
    root: Path
    vlm: PreTrainedModel
    tower: PreTrainedModel
    """The plain text class with exactly the tower's weights: the oracle."""
    base_model: PreTrainedModel
    """The same with every weight moved by noise; on disk it is ``base``."""

    @property
    def base(self) -> Path:
        """The folder of the base."""
        return self.root / "base"

    def folder(self, layout: Layout) -> Path:
        """Return the folder of the vlm in a layout, written on first use."""
        folder = self.root / layout
        if not folder.is_dir():
            save_vlm(self.vlm, folder, layout)
        return folder

    @cached_property
    def vlm_logits(self) -> torch.Tensor:
        """What the vlm's class answers on text."""
        return logits(self.vlm)

    @cached_property
    def values(self) -> torch.Tensor:
        """Every number of the tower; random, so that the rest of the vlm shares next to none."""
        return torch.cat([tensor.flatten() for tensor in self.tower.state_dict().values()])

    def is_tower(self, tensor: torch.Tensor) -> bool:
        """Return True if most numbers of a stored tensor are the tower's, fused or transposed as they may be."""
        return bool(torch.isin(tensor.flatten(), self.values).float().mean() > 0.5)


Build = Callable[[Family], Built]


def load(auto_class: Any, folder: Path, attention: str = "eager", **settings: Any) -> PreTrainedModel:
    """Load a folder as its class does, and refuse what transformers would only report."""
    with quiet_transformers():
        model, info = auto_class.from_pretrained(
            folder, output_loading_info=True, attn_implementation=attention, **settings
        )
    assert not any(info.values()), info
    return model.eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    """Return the logits of a model on ``IDS``."""
    if model.config.model_type == "llama4":  # its class asks text for pictures and fails; its language model does not
        model = model.language_model
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits


def stored(folder: Path) -> State:
    """Return the tensors of a checkpoint folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def build(family: Family, root: Path) -> Built:
    """Build the vlm with random weights, the oracle of its tower, and write the base."""
    torch.manual_seed(7)
    auto = AutoModelForImageTextToText if family.sees_pictures else AutoModelForCausalLM
    vlm = auto.from_config(vlm_config(family), attn_implementation="eager").eval()
    randomise(vlm)
    state = text_state(family, vlm)
    tower = AutoModelForCausalLM.from_config(text_config(family), attn_implementation="eager").eval()
    tower.load_state_dict(state)
    base = AutoModelForCausalLM.from_config(text_config(family, tied=family.tied_base)).eval()
    if family.tied_base:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    base.load_state_dict(state)
    with torch.no_grad():
        for tensor in {t.data_ptr(): t for t in base.state_dict().values()}.values():
            tensor += 0.02 * tensor.std(correction=0) * torch.randn(tensor.shape)
    built = Built(family, root, vlm, tower, base)
    base.save_pretrained(built.base)
    write_tokenizer(built.base, TOKENS)
    return built


def vlm_config(family: Family) -> PretrainedConfig:
    """Return the config of the vlm, or of the text model that stands as one."""
    if family.rest is None:
        return text_config(family)
    return CONFIG_MAPPING[family.model_type](text_config=dict(family.text), **family.rest)


def text_config(family: Family, tied: bool = False) -> PretrainedConfig:
    """Return the plain text config of the tower, as the catalogue says it; ``tied`` ties its head all the same."""
    fields = {key: value for key, value in {**family.text, **family.base}.items() if value is not None}
    if tied:
        fields["tie_word_embeddings"] = True
    return CONFIG_MAPPING[fields.pop("model_type")](**fields)


def randomise(model: PreTrainedModel) -> None:
    """Make every weight different from every other, gains and biases included."""
    with torch.no_grad():
        for tensor in {t.data_ptr(): t for t in model.state_dict().values() if t.is_floating_point()}.values():
            noise = torch.randn(tensor.shape)
            tensor.copy_(1 + 0.1 * noise if tensor.dim() < 2 else 0.3 * noise)


def text_state(family: Family, vlm: PreTrainedModel) -> State:
    """Return the language model and the head of a vlm as the plain text class names and shapes them."""
    decoder = vlm.get_decoder()
    inner = getattr(decoder, "model", decoder)  # Llama 4 holds a whole causal LM
    state = {f"model.{name}": tensor for name, tensor in inner.state_dict().items()}
    head = vlm.get_output_embeddings() or decoder.get_output_embeddings()
    state["lm_head.weight"] = head.weight.detach()
    return TO_TEXT.get(family.id, dict)(state)


def without_inserted_layers(state: State) -> State:
    """Drop Mllama's cross-attention layers, close the gaps, and cut the embedding to the head's rows."""
    inserted = {int(found[1]) for name in state if (found := re.match(r"model\.layers\.(\d+)\.cross_attn\.", name))}
    kept: State = {}
    for name, tensor in state.items():
        found = re.match(r"model\.layers\.(\d+)\.(.+)", name)
        if found is None:
            kept[name] = tensor
        elif int(found[1]) not in inserted:
            kept[f"model.layers.{int(found[1]) - sum(i < int(found[1]) for i in inserted)}.{found[2]}"] = tensor
    return with_rows_of_the_head(kept)


def with_rows_of_the_head(state: State) -> State:
    """Cut the embedding to the rows of the head; the rows beyond are picture tokens."""
    rows = len(state["lm_head.weight"])
    return {**state, "model.embed_tokens.weight": state["model.embed_tokens.weight"][:rows]}


def with_norms_after(state: State) -> State:
    """Name Molmo2's norms as Olmo3 does, which norms what a sublayer returns."""
    names = {"post_attention_layernorm": "post_feedforward_layernorm", "input_layernorm": "post_attention_layernorm"}
    renamed = {re.sub("|".join(names), lambda found: names[found[0]], name): t for name, t in state.items()}
    return with_rows_of_the_head(renamed)


TO_TEXT: Mapping[str, Callable[[State], State]] = {
    "mllama": without_inserted_layers,
    "molmo2": with_rows_of_the_head,
    "molmo2-olmo3": with_norms_after,
}
"""Families whose language state is not that of the plain text class by name alone."""


def save_vlm(vlm: PreTrainedModel, folder: Path, layout: Layout) -> None:
    """Write the vlm in a layout, with a tokenizer that has the picture token besides."""
    vlm.save_pretrained(folder, save_original_format=layout == "hub")
    write_tokenizer(folder, (*TOKENS, "<image>"))
    tensors = load_file(folder / "model.safetensors")
    if layout == "repeated":
        tensors = {repeated(name): tensor for name, tensor in tensors.items()}
    elif layout == "transposed":
        tensors = {name: t.mT.contiguous() if ".experts." in name else t for name, t in tensors.items()}
    elif layout == "hub" and vlm.config.model_type == "molmo2":
        # Its class halves the embedding where the hub cuts it at the rows of the head.
        names = [f"model.transformer.wte.{name}" for name in ("embedding", "new_embedding")]
        rows = torch.cat([tensors[name] for name in names])
        known = len(tensors["lm_head.weight"])
        tensors |= {names[0]: rows[:known].clone(), names[1]: rows[known:].clone()}
    elif layout == "hub" and vlm.config.model_type == "kimi_k25":
        # A rule of its table for the vision tower is not anchored, so that its own class cannot load what it saves.
        tensors = {
            name.replace("language_model.model.blocks.", "language_model.model.layers."): t
            for name, t in tensors.items()
        }
    else:
        return
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def repeated(name: str) -> str:
    """Repeat ``language_model.`` as transformers 5.4 and 5.5 did when they saved a model that was native already."""
    name = re.sub(r"^model\.language_model\.", "model.language_model.language_model.language_model.", name)
    return re.sub(r"^model\.visual\.", "model.language_model.visual.", name)
