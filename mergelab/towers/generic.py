"""The naming layouts that most families share, as data.

One prefix table covers the families whose tower differs from a plain causal LM by a prefix alone: LLaVA,
LLaVA-NeXT, LLaVA-OneVision, InternVL, Qwen2-VL to Qwen3-VL, SmolVLM, Idefics, Mistral3, Ovis, MiniCPM-V,
plain text models and others, each as the hub and as transformers 5 stores it. Families that need more have files of
their own (``mergelab.towers.rules``), which turn their names into names that this table reads.

**Source**: key sets of tiny models of 34 transformers classes in both layouts; loaders of transformers 5.24
and vLLM 0.33.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mergelab.towers.rules import Experts

TOWER_ROOTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    # transformers 5.4 and 5.5 repeated `language_model.` when saving; the repeats are read as one.
    ("language_model.model.", re.compile(r"(?:model\.)?(?:language_model\.)+model\.")),
    ("model.language_model.", re.compile(r"model\.(?:language_model\.)+")),
    ("model.text_model.", re.compile(r"model\.text_model\.")),
    ("llm.model.", re.compile(r"(?:llm|language)\.model\.")),
    ("model.", re.compile(r"model\.")),
)
"""Layout name and prefix, tried in this order; what follows must look like a tower (``TOWER_LEAF``)."""

REPAIRS: Mapping[str, str] = {
    r"^model\.(?:language_model\.){2,}": "model.language_model.",
    r"^(?:language_model\.){2,}": "language_model.",
    r"^model\.language_model\.visual\.": "model.visual.",
}
"""Names that transformers 5.4 and 5.5 corrupted when they saved, and what they were: pattern -> replacement.

No class of transformers loads them; nor does any family use them in earnest, so that they may be replaced unseen.
"""

HEAD_ROOTS: tuple[re.Pattern[str], ...] = (
    re.compile(r"(?:model\.)?(?:(?:language_model\.)+|llm\.|language\.)(?:lm_head|output)\."),
    re.compile(r"lm_head\."),
)
"""Prefixes of the head, tried in this order; they are independent of the tower's."""

HEAD_LEAF = re.compile(r"weight|bias")

TOWER_LEAF = re.compile(
    r"layers\.\d+\..+"
    r"|embed_tokens\.weight"
    r"|(?:norm|final_layernorm|embedding_norm)\.(?:weight|bias)"
    r"|rotary_emb\.\w+"
    r"|(?:embed_tokens_per_layer|per_layer_model_projection|per_layer_projection_norm)\.weight"
    r"|altup_(?:unembed_)?projections\.\d+\.weight"
)
"""What may follow a tower prefix; it keeps `model.visual.`, `model.mm_projector.` and the like out."""

STRIPPED = re.compile(r"(?:model\.)?(?:language_model\.)*")
"""What is taken off a name before its role is looked up."""

ROLES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("projector", re.compile(r"visual\.(?:merger|deepstack_merger_list)\.")),
    (
        "projector",
        re.compile(
            r"(?:multi_modal_projector|mm_projector|vision_projector|vision_projection|projector|connector|aligner|merger"
            r"|embed_vision|mlp1|resampler)\."
        ),
    ),
    ("projector", re.compile(r"(?:image_newline|view_seperator|high_res_vision_alpha)$")),
    (
        "vision",
        re.compile(
            r"(?:visual|vision|(?:vision|image|video)_tower|vision_model|(?:vision|image)_encoder|vpm|visual_tokenizer"
            r"|visual_embeddings_table|vte|high_res_vision_(?:model|neck|proj))\."
        ),
    ),
    ("extra", re.compile(r"mtp\.")),
)
"""Role of every tensor outside the tower, first match on the stripped name."""

BUFFER = re.compile(r"(?:^|\.)(?:rotary_emb\.(?:\w*inv_freq|cos_cached|sin_cached)|position_ids|masked_bias)$")
"""Tensors that a model computes itself; older files store them."""

EXPERTS: tuple[Experts, ...] = (
    Experts(match=re.compile(r"\.experts\.gate_up_proj$"), into=("gate_proj", "up_proj")),
    Experts(match=re.compile(r"\.experts\.down_proj$"), into=("down_proj",)),
)
"""Stacked experts that need no family: [experts, rows, columns], or its transpose, told by the hidden size."""

PACKED = re.compile(
    r"\.(?:qweight|qzeros|absmax|quant_map|weight_packed|weight_scale|weight_scale_inv|scale_inv|SCB)$"
    r"|_proj_(?:blocks|scales)(?:_blocks|_scales)*$|\.quant_state\."
)
"""Tensors that give quantised weights away: refused, whatever the family."""

HEADLESS = re.compile(r"(?:layers\.\d+\.|embed_tokens\.weight$)")
"""A model saved without its causal-LM class: no `model.` prefix, no head."""

ADAPTERS = re.compile(r"\.base_layer\.|\.lora_[AB]\.")
"""Linear layers with LoRA adapters; refused unless a family says that text does without them."""

FUSION_HINTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.experts\."), "experts are stored in a form that no family file describes"),
    (re.compile(r"\.(?:qkv_proj|gate_up_proj|query_key_value)\."), "projections are fused on one side only"),
)
"""Why tensors may not pair although the models are related; a family file says how such tensors are cut."""

TEXT_CONFIG_KEYS = ("text_config", "llm_config", "language_config", "llm_cfg")
"""Where a multimodal config keeps its text config, first hit; otherwise the top level is the text config."""
