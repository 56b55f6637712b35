"""Further classes of transformers that the prefix table reads, checked by the slow suite."""

from __future__ import annotations

from tests.families.family import (
    CLIP,
    GLM_ROPE,
    HYBRID,
    INDEX,
    LLAMA,
    LLAVA,
    MROPE,
    ONE,
    PINS,
    PIXTRAL,
    QWEN2,
    QWEN3,
    QWEN_VIT,
    ROPE,
    SIGLIP,
    TOKEN,
    VIT,
    Family,
    nested,
    text,
)

SAM = {
    "hidden_size": 16,
    "output_channels": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
    "mlp_dim": 16,
    "window_size": 2,
    "global_attn_indexes": [0],
}
VIDEO = {"video_token_index": 29}

FURTHER: tuple[Family, ...] = (
    nested("vipllava", CLIP, LLAMA, **INDEX, vision_feature_layers=[-1, 0]),
    nested("video_llava", CLIP, LLAMA, **INDEX, **VIDEO),
    nested("llava_next_video", CLIP, LLAMA, **LLAVA, **PINS, **VIDEO),
    nested("lighton_ocr", PIXTRAL, QWEN3, **TOKEN, layouts=ONE),
    nested("got_ocr2", SAM, QWEN2, **INDEX),
    nested(
        "deepseek_vl_hybrid",
        SIGLIP,
        LLAMA,
        **TOKEN,
        high_res_vision_config={**SAM, "model_type": "sam_vision_model"},
        layouts=ONE,
    ),
    nested("exaone4_5", QWEN_VIT, text("exaone4", head_dim=4), **TOKEN, layouts=ONE),
    nested(
        "glm46v",
        {**QWEN_VIT, "image_size": 8, "patch_size": 4, "model_type": "glm4v_vision"},
        text("glm4v_text", rope_parameters={**GLM_ROPE, **MROPE}),
        base={"model_type": "glm4", "head_dim": 4, "rms_norm_eps": 1e-5, "rope_parameters": GLM_ROPE},
        layouts=ONE,
    ),
    nested("video_llama_3", {**VIT, "model_type": "video_llama_3_vision"}, QWEN2, **TOKEN, layouts=ONE),
    nested(
        "minicpmv4_7",
        {**VIT, "image_size": 16},
        text("qwen3_5_text", **HYBRID, rope_parameters={**ROPE, "partial_rotary_factor": 0.5}),
        **TOKEN,
        insert_layer_id=0,
        layouts=ONE,
    ),
    # What its class saves as hub names from scratch, no class loads.
    nested("qianfan_ocr", {**VIT, "image_size": [8, 8], "patch_size": [4, 4]}, QWEN3, **TOKEN, layouts=ONE),
    nested("hyperclovax_vision_v2", QWEN_VIT, text("hyperclovax"), **TOKEN),
)
