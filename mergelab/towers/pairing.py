"""The total pairing: which tensors of base, vlm and ancestor are one weight, and what becomes of the rest.

Every tensor of the base is matched, virtual (a tied head stands for its embedding) or explained; every
tensor of the vlm is paired or copied. Whatever is left over is an error that lists it; nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mergelab.errors import PairingError, problem_list
from mergelab.towers.config_differences import config_differences, head_problems
from mergelab.towers.generic import FUSION_HINTS
from mergelab.towers.kinds import module_kind
from mergelab.towers.layouts import HEAD, LAYER, TensorLike, Tower, first, locate_tower, repaired, tie_flags
from mergelab.towers.pairs import CheckpointLike, MustEqual, PairedTensor, Pairing, StoredView
from mergelab.towers.parts import EMBEDDING
from mergelab.towers.rules import Family
from mergelab.towers.taking_apart import PartHeader, taken_apart
from mergelab.towers.vocabulary import RowMap, match_rows, read_vocabulary

__all__ = ["CheckpointLike", "MustEqual", "PairedTensor", "Pairing", "pair_checkpoints"]

FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("BOOL", "I16", "U16", "I32", "U32", "I64", "U64")
VOCABULARY_TENSORS = (EMBEDDING, HEAD, "lm_head.bias")


def pair_checkpoints(models: Mapping[str, CheckpointLike], families: Mapping[str, Family] | None = None) -> Pairing:
    """Pair the tensors of base, vlm and, if given, ancestor.

    Args:
        models: Role -> opened checkpoint; base and vlm must be there. Any of them may be a plain text
            checkpoint or a multimodal one.
        families: Role -> family to read it by; for the others the shipped family files are asked.

    Raises:
        PairingError: With everything that does not fit: missing or foreign tensors, shapes, dtypes, heads,
            vocabularies.
        DamagedFileError: A tokenizer file is damaged.
    """
    located = locate_all(models, families or {})
    accounts = Accounts(models, *taken_apart(located))
    for role in accounts.others:
        accounts.explain_outside(role)
        accounts.settle_head(role)
        accounts.compare(role)
    accounts.check_packed("vlm")
    accounts.check_repairs()
    for role in accounts.towers:
        accounts.check_embedding(role)
    accounts.match_vocabulary()
    accounts.raise_problems()
    accounts.note_families()
    accounts.note_ties()
    accounts.note_repairs()
    return accounts.result()


def locate_all(models: Mapping[str, CheckpointLike], families: Mapping[str, Family]) -> dict[str, Tower]:
    """Locate the tower of every model, or raise one PairingError for all that have none."""
    towers: dict[str, Tower] = {}
    problems = []
    for role in sorted(models, key=["base", "vlm", "ancestor"].index):
        model = models[role]
        known = towers["base"].stored if "base" in towers else ()
        try:
            towers[role] = locate_tower(model.tensors, model.config, known, families.get(role))
        except PairingError as error:
            problems.append(f"{role} {model.folder}: {error}")
    if problems:
        raise PairingError("\n".join(problems))
    return towers


@dataclass
class Accounts:
    """The pairing in the making: what was found so far, and every problem."""

    models: Mapping[str, CheckpointLike]
    towers: Mapping[str, Tower]
    views: Mapping[str, Mapping[str, StoredView]]
    problems: dict[str, list[str]] = field(default_factory=dict)
    """Role that does not fit -> problems."""
    explained: dict[str, str] = field(default_factory=dict)
    gone: dict[str, set[str]] = field(default_factory=dict)
    """Role -> canonical names that are explained and so need no partner."""
    virtual: list[str] = field(default_factory=list)
    integers: set[str] = field(default_factory=set)
    """Canonical names of integer tensors of the tower: copied, and equal in all models."""
    must_equal: list[MustEqual] = field(default_factory=list)
    rows: dict[str, RowMap | None] = field(default_factory=dict)
    vocabulary: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def others(self) -> list[str]:
        """The roles besides the vlm, base first."""
        return [role for role in self.towers if role != "vlm"]

    def header(self, role: str, name: str) -> TensorLike:
        """Return the header of a canonical name; a virtual head is the embedding."""
        return self.header_of(role, self.stored_name(role, name))

    def header_of(self, role: str, stored: str) -> TensorLike:
        """Return the header of a stored name or of a part of a stored tensor."""
        part = self.views[role].get(stored)
        tensors = self.models[role].tensors
        return tensors[stored] if part is None else PartHeader(part.view.shape, tensors[part.stored].dtype)

    def stored_name(self, role: str, name: str) -> str:
        """Return the stored name of a canonical one; a virtual head is the embedding."""
        return self.towers[role].stored[EMBEDDING if name == HEAD and role in self.virtual else name]

    def problem(self, role: str, text: str) -> None:
        """Note that ``role`` does not fit."""
        self.problems.setdefault(role, []).append(text)

    def explain(self, role: str, name: str, reason: str) -> None:
        """Note why a canonical name of ``role`` needs no partner."""
        self.gone.setdefault(role, set()).add(name)
        self.explained[f"{role}: {self.towers[role].stored[name]}"] = reason

    def explain_outside(self, role: str) -> None:
        """Explain buffers, what surrounds the tower of a multimodal base, multi-token-prediction layers."""
        for stored, part in self.towers[role].roles.items():
            if part != "tower":
                reason = "no weight of the text model" if part == "extra" else f"{part}, not text"
                self.explained[f"{role}: {stored}"] = reason
        config = self.towers[role].text_config
        num_layers, num_extra = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
        if isinstance(num_layers, int) and isinstance(num_extra, int) and num_extra:
            for name in set(self.towers[role].stored) - set(self.towers["vlm"].stored):
                layer = LAYER.match(name)
                if layer and int(layer[1]) >= num_layers:
                    self.explain(role, name, "multi-token-prediction layer, which the vlm lacks")

    def settle_head(self, role: str) -> None:
        """Settle a head that only one side stores: a stored head beats a flag."""
        mine, vlm = self.towers[role], self.towers["vlm"]
        if vlm.has_head and not mine.has_head:
            self.virtual.append(role)
            self.notes.append(f"{role}: its head is tied, so its embedding stands for {HEAD}")
        elif mine.has_head and not vlm.has_head:
            self.explain(role, HEAD, "the vlm ties its head; allowed only if it equals the embedding")
            reason = f"the vlm stores no head, so the head of {role} must equal its embedding"
            self.must_equal.append(MustEqual((role, mine.stored[HEAD]), (role, mine.stored[EMBEDDING]), reason))

    def compare(self, role: str) -> None:
        """Note every tensor without partner or of another shape or dtype family, and other head counts."""
        mine, vlm = self.towers[role], self.towers["vlm"]
        self.check_packed(role)
        names = {*mine.stored, *([HEAD] if role in self.virtual else [])} - self.gone.get(role, set())
        for name in sorted(names | set(vlm.stored), key=layer_order):
            if name not in vlm.stored:
                header = self.header(role, name)
                self.problem(role, f"{name}: {role} {header.dtype} {header.shape}, vlm has none")
            elif name not in names:
                header = self.header("vlm", name)
                self.problem(role, f"{name}: {role} has none, vlm {header.dtype} {header.shape}")
            else:
                self.compare_tensor(role, name)
        configs = mine.text_config, vlm.text_config
        for text in head_problems(role, *configs):
            self.problem(role, text)
        if role == "base":
            self.notes.extend(config_differences(*configs))

    def compare_tensor(self, role: str, name: str) -> None:
        """Compare shape and dtype family of one tensor that both sides have."""
        mine, vlm = self.header(role, name), self.header("vlm", name)
        skip = 1 if name in VOCABULARY_TENSORS else 0
        if len(mine.shape) != len(vlm.shape) or mine.shape[skip:] != vlm.shape[skip:]:
            self.problem(role, f"{name}: {role} {mine.shape}, vlm {vlm.shape}")
        elif mine.dtype in FLOATS and vlm.dtype in FLOATS:
            return
        elif mine.dtype in INTEGERS and mine.dtype == vlm.dtype:
            self.integers.add(name)
            names = (role, self.stored_name(role, name)), ("vlm", self.stored_name("vlm", name))
            self.must_equal.append(MustEqual(*names, "integers cannot be merged, only copied"))
        elif mine.dtype in FLOATS + INTEGERS and vlm.dtype in FLOATS + INTEGERS:
            self.problem(role, f"{name}: {role} {mine.dtype}, vlm {vlm.dtype}")

    def check_packed(self, role: str) -> None:
        """Note every tensor of a tower whose numbers are packed or of 8 bits and fewer."""
        model = self.models[role]
        settings = model.config.get("quantization_config")
        named = f" (quantization_config {settings})" if settings else ""
        for stored in self.towers[role].stored.values():
            header = self.header_of(role, stored)
            if header.dtype not in FLOATS + INTEGERS:
                text = f"{stored}: {role} {header.dtype} {header.shape}{named}, expected F32, F16 or BF16"
                self.problem(role, text)

    def check_repairs(self) -> None:
        """Note names of the vlm that would be written under one name."""
        seen: dict[str, str] = {}
        for name in self.models["vlm"].tensors:
            twin = seen.setdefault(repaired(name), name)
            if twin != name:
                self.problem("vlm", f"{name} and {twin}: stored twice, once under a corrupted name")

    def check_embedding(self, role: str) -> None:
        """Note an embedding with fewer rows than its head: the others lie in a tensor that nobody pairs."""
        stored = self.towers[role].stored
        if HEAD not in stored:
            return
        rows, needed = (self.header(role, name).shape[0] for name in (EMBEDDING, HEAD))
        if rows < needed:
            text = f"{stored[EMBEDDING]}: {role} {rows} rows, {stored[HEAD]} {needed}; the other rows lie elsewhere"
            self.problem(role, f"{text}. transformers 5 halves Molmo2's so: save it with save_original_format=False")

    def match_vocabulary(self) -> None:
        """Pair the rows of embedding and head, where all models have them."""
        vocabularies = {role: read_vocabulary(model.folder) for role, model in self.models.items()}
        unread = [role for role, tokens in vocabularies.items() if tokens is None]
        known: dict[tuple[tuple[str, int], ...], RowMap | None] = {}
        for name in VOCABULARY_TENSORS:
            if not all(name in t.stored or (name == HEAD and r in self.virtual) for r, t in self.towers.items()):
                continue
            num_rows = {role: self.header(role, name).shape[0] for role in self.towers}
            key = tuple(num_rows.items())
            try:
                if key not in known:
                    known[key] = match_rows(name, num_rows, vocabularies)
            except PairingError as error:
                self.problem("base", str(error))
                continue
            self.rows[name] = rows = known[key]
            self.vocabulary[name] = {
                "by": "index" if unread else "token",
                "shared": rows.num_shared if rows else num_rows["vlm"],
                "vlm_only": rows.num_vlm_only if rows else 0,
                "base_only": rows.num_base_only if rows else 0,
                "padding": rows.num_padding if rows else 0,
            }
            counts = ", ".join(f"{what} {count}" for what, count in self.vocabulary[name].items())
            because = f" ({', '.join(unread)}: no readable tokenizer files)" if unread else ""
            self.notes.append(f"{name}: rows {counts}{because}")

    def note_families(self) -> None:
        """Note what a family file wants a person to know."""
        for role in ("vlm", *self.others):
            family = self.towers[role].family
            if family is not None and (role == "vlm" or family != self.towers["vlm"].family):
                self.notes.extend(f"{role}: {family.family}: {note}" for note in family.notes)

    def note_ties(self) -> None:
        """Note tie flags that contradict each other or the file."""
        for role, tower in self.towers.items():
            flags = tie_flags(self.models[role].config, tower.family)
            if len(set(flags)) > 1 or (flags and flags[0] == tower.has_head):
                found = "a head, so it is untied" if tower.has_head else "no head, so it is tied"
                self.notes.append(f"{role}: config says tie_word_embeddings {flags}, the file has {found}")

    def note_repairs(self) -> None:
        """Note names that a merged vlm is not written under."""
        corrupted = next((name for name in self.models["vlm"].tensors if repaired(name) != name), None)
        if corrupted is not None:
            self.notes.append(
                f"vlm: its names were corrupted when it was saved, and are repaired in what is written: {corrupted} is "
                f"{repaired(corrupted)}"
            )

    def raise_problems(self) -> None:
        """Raise one PairingError with everything that does not fit, if there is anything."""
        messages = []
        vlm = self.models["vlm"].folder
        for role, problems in self.problems.items():
            fits = f"does not fit {role} {self.models[role].folder}" if role != "vlm" else "cannot be merged"
            heading = f"vlm {vlm} {fits}. Problems: {len(problems)}."
            if role != "vlm" and (layers := self.layer_counts(role)):
                heading += f" {layers}."
            hints = {hint for pattern, hint in FUSION_HINTS if any(pattern.search(text) for text in problems)}
            advice = f"Pick the {role} this vlm was tuned from." if role != "vlm" else "Pick another vlm."
            if hints:
                advice = f"Perhaps {' and '.join(sorted(hints))}. {advice}"
            messages.append(problem_list(heading, first(problems), advice))
        if messages:
            raise PairingError("\n".join(messages))

    def layer_counts(self, role: str) -> str:
        """Word a difference in the number of layers."""
        mine, vlm = (
            len({match[1] for name in self.towers[who].stored if (match := LAYER.match(name))}) for who in (role, "vlm")
        )
        return f"{role} has {mine} layers, vlm {vlm}" if mine != vlm else ""

    def result(self) -> Pairing:
        """Return the finished pairing."""
        vlm = self.towers["vlm"]
        tensors = []
        for name in sorted(set(vlm.stored) - self.integers, key=layer_order):
            header = self.header("vlm", name)
            tensors.append(
                PairedTensor(
                    name=name,
                    kind=module_kind(name, header.shape),
                    shape=tuple(header.shape),
                    dtype=header.dtype,
                    stored={role: self.stored_name(role, name) for role in self.towers},
                    virtual=tuple(self.virtual) if name == HEAD else (),
                    rows=self.rows.get(name),
                    parts=vlm.parts.get(name, ()),
                )
            )
        views = self.views["vlm"]
        merged = {views[own].stored if own in views else own for own in (tensor.stored["vlm"] for tensor in tensors)}
        return Pairing(
            tensors=tuple(tensors),
            copied=tuple(name for name in vlm.roles if name not in merged),
            explained=self.explained,
            must_equal=tuple(self.must_equal),
            layouts={role: tower.layout for role, tower in self.towers.items()},
            towers=self.towers,
            vocabulary=self.vocabulary,
            notes=tuple(self.notes),
            views=self.views,
        )


def layer_order(name: str) -> tuple[Any, ...]:
    """Sort key: embedding, layers by number, norm, head."""
    parts = tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name))
    return (name.startswith("lm_head"), *parts)
