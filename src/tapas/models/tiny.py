"""Configurations of transformers' model types, made small: a few layers of a few channels each."""

from typing import Any

from tapas.models.hub import config_of_type, library, quiet
from tapas.models.tiny_scaled import scaled

# By the end of a field's name, longest first: what it is in a small model. Whatever is smaller stays.
_SIZES: dict[str, int] = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "hidden_dim": 32, "embed_dim": 32, "embedding_size": 32,
    "embedding_dim": 32, "emb_dim": 32, "dim": 32, "projection_dim": 32, "intermediate_size": 48, "ffn_dim": 48,
    "mlp_dim": 48, "d_ff": 48, "intermediate_dim": 48, "proj_size": 32, "channels": 32, "feature_size": 32,
    "num_attention_heads": 4, "attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "d_head": 8, "q_lora_rank": 16, "kv_lora_rank": 16,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2, "depth": 2, "vocab_size": 128, "max_position_embeddings": 64,
    "n_positions": 64, "max_source_positions": 32, "max_target_positions": 32, "image_size": 32, "patch_size": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_queries": 8,
    "num_mel_bins": 16, "codebook_size": 32, "num_query_tokens": 4, "out_hidden_size": 32, "state_size": 8,
    "mamba_d_state": 8, "num_frames": 2, "tubelet_size": 1, "sliding_window": 16,
    "output_dim": 32, "expert_capacity": 16, "index_n_heads": 2, "index_topk": 8, "n_group": 1, "topk_group": 1,
    "experts_per_tok": 2, "experts_per_token": 2, "rotary_dim": 4, "mask_time_length": 2, "mask_feature_length": 2,
    "attention_window": 8, "mm_tokens_per_image": 4, "num_image_tokens": 16, "moe_topk": 2, "num_selected_experts": 2,
    "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8, "num_filters": 4,
    "d_latents": 32, "num_latents": 8, "bottleneck_features": 32, "num_self_attends_per_block": 2,
    "top_k_experts": 2, "n_shared_experts": 1, "indexer_kv_heads": 2, "moe_k": 2,
}  # fmt: skip
_COUNTS = (  # of a wide one
    "layers", "layer", "depth", "vocab_size", "experts", "experts_per_tok", "experts_per_token", "moe_topk", "moe_k",
    "num_selected_experts",
)  # fmt: skip
_TOKENS = ("_token_id", "_token_index")
_OWN_TOKENS = {"image_token_id": 120, "image_token_index": 120, "pad_token_id": 0, "decoder_start_token_id": 0}
CROPPED = 64  # pixels of a side
FIRST_TOKEN = 100  # of those that stand for something else


# What a type needs besides: lengths of time series have no default, and backbones of timm are not at hand.
_OWN: dict[str, dict[str, Any]] = {
    name: {"prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2, 3], "num_time_features": 2,
           "num_parallel_samples": 4}
    for name in ("informer", "autoformer", "time_series_transformer")
}  # fmt: skip
_OWN["reformer"] = {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "num_buckets": 4}
_OWN["patchtst"] = {"context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4}
_OWN["patchtsmixer"] = {"context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4}
# Parts of a head's rotation, for time, height and width, that are no field by default.
_SECTIONS = {name: [2, 1, 1] for name in ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm_ocr_text")}
_SECTIONS["glm4v_moe_text"] = [1, 1, 0]
# What a stage makes is what the next one takes.
_STAGES: dict[str, dict[str, Any]] = {"hgnet_v2": {
    "stem_channels": [3, 16, 16], "stage_in_channels": [16, 16, 16, 32], "stage_mid_channels": [16, 16, 16, 16],
    "stage_out_channels": [16, 16, 32, 64],
}}  # fmt: skip
_RESNET = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1],
    "layer_type": "basic", "out_features": ["stage4"],
}  # fmt: skip


def tiny_config(
    model_type: str, wide: bool = False, sections: bool = False, filled: bool = False, cropped: bool = False,
    divided: bool = False, listed: bool = False,
) -> Any:  # fmt: skip
    """A small configuration of a type: all its parts as small as their fields go together. A `wide` one has few layers
    only: widths that hang together in ways of their own stay as they are, and images too if they are not `cropped`.
    With `sections`, rotations have parts for time, height and width. In a `filled` one, sizes and counts that are None
    by default have a number. In a `divided` one, all widths are smaller by one factor. In a `listed` one, what lists
    say of layers is left out with these."""
    place = f"hf:{model_type}"
    with quiet():
        cls: Any = library().CONFIG_MAPPING[model_type]
        fields = _smaller(cls(), {}, wide or divided)
        if divided:
            fields = scaled(cls(), fields)
        if listed:
            fields = _listed(cls(), fields)
        if cropped:
            fields |= _cropped(cls(), fields)
        if filled:
            fields |= _filled(cls(), fields)
        fields |= _OWN.get(model_type, {})
        if sections:
            fields |= _sectioned(cls(), fields)
        if _is_timm(getattr(cls(), "backbone_config", None)):
            several = ["stage2", "stage3", "stage4"] if model_type == "deformable_detr" else ["stage4"]
            fields["backbone_config"] = {**_RESNET, "out_features": several}
        return config_of_type(place, model_type, fields, {})


def _is_timm(config: Any) -> bool:
    return getattr(config, "model_type", "") == "timm_backbone"


def _smaller(config: Any, tokens: dict[str, int], wide: bool = False) -> dict[str, Any]:
    """Fields of a configuration and of its parts that are to be other than they are by default; a token has one number
    in all parts."""
    made: dict[str, Any] = {}
    parts = {name for name, value in vars(config).items() if _is_config(value)}
    for name, value in vars(config).items():
        if name.startswith("_") or name == "layer_types":
            continue
        if name in parts:
            part = _smaller(value, tokens, wide)
            made[name] = {**_said(value), **part, **_outputs(value, part), **_type_of(value)}
        elif name.endswith(_TOKENS):
            made |= _token(name, value, tokens)
        elif name in ("mask_time_prob", "mask_feature_prob"):  # what numpy draws on the way cannot be captured
            made[name] = 0.0
        elif name == "apply_spec_augment":
            made[name] = False
        elif isinstance(value, int) and not isinstance(value, bool):
            made |= _number(name, value) if not wide or name.endswith(_COUNTS) else {}
        elif isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
            made |= _numbers(name, list(value)) if not wide or name.endswith("depths") else {}
        elif isinstance(value, dict) and "mrope_section" in value and not wide:
            made[name] = {**value, "mrope_section": [2, 1, 1]}
    heads = vars(config).get("num_attention_heads")
    grouped = vars(config).get("num_key_value_heads") != heads  # some have no groups of heads
    if not wide and isinstance(heads, int) and not grouped:
        made["num_key_value_heads"] = made.get("num_attention_heads", heads)
    if not wide and getattr(config, "model_type", "") in _SECTIONS:
        made["rope_parameters"] = {**_rope(config), "mrope_section": _SECTIONS[config.model_type]}
    if not wide:
        made |= {**_windowed(config), **_STAGES.get(getattr(config, "model_type", ""), {})}
    layers = made.get("num_hidden_layers")
    if layers and isinstance(vars(config).get("layer_types"), list):
        made["layer_types"] = _some_of_each(config.layer_types, layers)
    return made


def _listed(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """`fields`, and lists that say something of each layer, for fewer of them."""
    made = dict(fields)
    for name, value in vars(config).items():
        if _is_config(value):
            made[name] = _listed(value, fields.get(name, {}))
    return made | _by_layer(config, made)


def _by_layer(config: Any, made: dict[str, Any]) -> dict[str, Any]:
    fields = vars(config)
    name = next((name for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers") if name in made), "")
    before, layers = fields.get(name, 0), made.get(name, 0)
    shorter: dict[str, Any] = {}
    for key, value in fields.items():
        if not name or not isinstance(value, (list, tuple)) or key in made or key[0] == "_":
            continue
        items: list[Any] = list(value)
        if len(items) == before:
            shorter[key] = _some_of_each(items, layers) if all(isinstance(x, str) for x in items) else items[:layers]
        elif len(items) == 1 and isinstance(items[0], (list, tuple)) and len(items[0]) == 2:
            kinds, times = items[0]  # so many times these kinds, one after the other
            if isinstance(kinds, (list, tuple)) and isinstance(times, int) and len(kinds) * times == before:
                shorter[key] = [[list(kinds), max(layers // len(kinds), 1)]]
    return shorter


def _said(config: Any) -> dict[str, Any]:
    """What a model says of its part that is not so by default: how it works, not how large it is."""
    usual = vars(type(config)())
    said = {name: value for name, value in vars(config).items() if isinstance(value, (bool, str))}
    return {name: value for name, value in said.items() if name in usual and name[0] != "_" and usual[name] != value}


def _outputs(config: Any, made: dict[str, Any]) -> dict[str, Any]:
    """What a backbone gives to the rest of the model: of its first layers, where the last are left out."""
    names = list(getattr(config, "out_features", None) or ())
    if not names or "num_hidden_layers" not in made:
        return {"out_features": names} if names else {}
    layers = max(made["num_hidden_layers"], len(names))
    first = layers - len(names) + 1
    return {"num_hidden_layers": layers, "out_features": [f"stage{first + n}" for n in range(len(names))]}


def _windowed(config: Any) -> dict[str, int]:
    """Stages that halve an image each, and look at it window by window: the last of them has to have one."""
    fields = vars(config)
    if not (isinstance(fields.get("depths"), (list, tuple)) and isinstance(fields.get("window_size"), int)):
        return {}
    side = 2 * fields.get("patch_size", 4) * 2 ** (len(fields["depths"]) - 1) if fields.get("patch_size") != 1 else 16
    return {"window_size": 2} | ({"image_size": side} if isinstance(fields.get("image_size"), int) else {})


def _sectioned(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    parts = {name: value for name, value in vars(config).items() if _is_config(value)}
    made = {name: {**fields.get(name, {}), **_sectioned(value, fields.get(name, {}))} for name, value in parts.items()}
    if hasattr(config, "rope_parameters") and "num_hidden_layers" in vars(config):
        made["rope_parameters"] = {**_rope(config), "mrope_section": [2, 1, 1]}
    return made


def _cropped(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in vars(config).items():
        if _is_config(value):
            made[name] = {**fields.get(name, {}), **_cropped(value, fields.get(name, {}))}
        elif name == "image_size":
            many = isinstance(value, (list, tuple))
            made[name] = [min(CROPPED, side) for side in value] if many else min(CROPPED, value)
    return made


def _filled(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in vars(config).items():
        if _is_config(value):
            made[name] = {**fields.get(name, {}), **_filled(value, fields.get(name, {}))}
        elif value is None and not name.startswith("_") and (end := _end(name)):
            made[name] = _SIZES[end]
        elif value is None and name in _OWN_TOKENS:
            made[name] = _OWN_TOKENS[name]
    return made


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}


def _is_config(value: Any) -> bool:
    return hasattr(value, "to_diff_dict")


def _type_of(config: Any) -> dict[str, str]:
    return {"model_type": config.model_type} if getattr(config, "model_type", "") else {}


def _token(name: str, value: Any, tokens: dict[str, int]) -> dict[str, Any]:
    if not isinstance(value, int) or value < 96:
        return {}
    return {name: tokens.setdefault(name.rpartition("_token_")[0], FIRST_TOKEN + len(tokens))}


def _number(name: str, value: int) -> dict[str, int]:
    if name == "qk_head_dim":  # the sum of two others
        return {}
    end = _end(name)
    return {name: _SIZES[end]} if end and value > _SIZES[end] else {}


def _end(name: str) -> str:
    """The longest end of a field's name that tells what it is."""
    fitting = [end for end in _SIZES if name == end or name.endswith(f"_{end}")]
    return max(fitting, key=len, default="")


def _numbers(name: str, values: list[int]) -> dict[str, list[int]]:
    """Of stages: as many of them, each small."""
    if name == "depths" or name.endswith(("_depths", "layers")):
        return {name: [1] * len(values)}
    if name in ("num_heads", "num_attention_heads"):
        return {name: [2] * len(values)}
    if name == "image_size":
        return {name: [32] * len(values)}
    if name == "attention_window":
        return {name: [8, 8]}  # for each layer
    if name.endswith(("hidden_sizes", "embed_dims", "channels", "conv_dim", "hidden_size", "out_channels")):
        most = max(values)
        if len(values) > 1 and min(values) == most:
            return {name: [min(32, most)] * len(values)}  # as wide as what has one width
        return {name: [max(16, 64 * value // most // 8 * 8) for value in values]} if most > 64 else {}
    return {}


def _some_of_each(kinds: list[str], layers: int) -> list[str]:
    """The kinds of so many layers, with as many different ones among them as there is room for."""
    different = list(dict.fromkeys(kinds))
    return (different + kinds)[:layers] if len(different) <= layers else different[:layers]
