"""One step of generation as a module: what is captured as prefill, and as decode, by the shape of its tokens."""

import copy
import inspect
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

from tapas.errors import TapasError
from tapas.serving.static_cache import KEYS, VALUES, CacheHomes, CacheShape, StaticBufferCache, StaticBufferCaches
from tapas.serving.workload import Workload


class GenerationStep(nn.Module):
    """What a model becomes, under the same names: its forward gives the logits of the next tokens. In the prefill all
    tokens of the prompts come, padded to one length; in a decode step one for each of them. A decoder beside an encoder
    starts with a token of its own, which the prefill adds."""

    config: Any
    dtype: torch.dtype
    device: torch.device
    workload: Workload
    cached: tuple[CacheHomes, CacheHomes]  # see attention_modules
    keeps: bool  # the original can be asked for the last logits only

    @property
    def both(self) -> bool:
        """Encoder and decoder."""
        return bool(self.config.is_encoder_decoder)

    @property
    def length(self) -> int:
        """Places of the cache."""
        return self.workload.new + (1 if self.both else self.workload.prompt)

    def inputs(self, decode: bool) -> dict[str, torch.Tensor]:
        """Examples, for capture."""
        batch, prompt = self.workload.batch, self.workload.prompt
        tokens = torch.zeros(batch, 1 if decode else prompt, dtype=torch.long)
        mask = torch.ones(batch, prompt if self.both else self.length, dtype=torch.long)
        own = {} if self.both else {"position_ids": torch.zeros_like(tokens)}
        return {"input_ids": tokens, "attention_mask": mask, **own, "position": torch.zeros((), dtype=torch.long)}

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """`position`: the place of the first of these tokens in the cache. The mask is as long as the cache, or as the
        encoder's prompts."""
        now = 1 if self.both else input_ids.shape[1]
        places = torch.arange(now, device=input_ids.device) + position
        cache = StaticBufferCache(self.cached[0], places, position, self.length)
        given: dict[str, Any] = {"attention_mask": attention_mask, "use_cache": True}
        if self.keeps:
            given["logits_to_keep"] = 1
        given |= self._beside_encoder(cache, input_ids) if self.both else {
            "input_ids": input_ids, "position_ids": position_ids, "past_key_values": cache
        }  # fmt: skip
        return super().forward(**given).logits[:, -1:]  # type: ignore[misc]

    def _beside_encoder(self, cache: StaticBufferCache, tokens: torch.Tensor) -> dict[str, Any]:
        batch, prompt, device = len(tokens), self.workload.prompt, tokens.device
        decode = tokens.shape[1] == 1
        # what is read anew in every step has to depend on something that is given
        places = cache.layers[0].places if decode else torch.arange(prompt, device=device)
        cross = StaticBufferCache(self.cached[1], places, 0, prompt)
        both = StaticBufferCaches(cache, cross, decode)
        if decode:  # only the shape of the encoder's results is read: keys and values of them are in the cache
            unread: Any = torch.zeros(batch, prompt, self.config.hidden_size, device=device, dtype=self.dtype)
            return {"encoder_outputs": BaseModelOutput(unread), "decoder_input_ids": tokens, "past_key_values": both}
        first = torch.full((batch, 1), self.config.decoder_start_token_id, dtype=torch.long, device=device)
        return {"input_ids": tokens, "decoder_input_ids": first, "past_key_values": both}


def generation_step(model: Any, workload: Workload) -> GenerationStep:
    """The model with caches and another forward; it has the same weights, and the model stays what it is."""
    check_model(model)
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    step: Any = copy.deepcopy(model, shared)
    step.keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    step.workload, step.cached = workload, attention_modules(step)
    step.__class__ = type(type(model).__name__, (GenerationStep, type(model)), {"__module__": __name__})
    own, cross = step.cached
    for homes, places in ((own, step.length), (cross, workload.prompt)):
        shape = usual_shape(model, workload.batch, places)
        homes.misfits |= {(module, name): shape for module in homes.modules for name in (KEYS, VALUES)}
        homes.fit(model.device)
    return step.eval()


def check_model(model: Any) -> None:
    """Refuse what has a cache of another kind."""
    name, library = type(model).__name__, vars(GenerationMixin)
    if not (hasattr(model, "config") and hasattr(model, "can_generate") and model.can_generate()):
        raise TapasError(name, "is no model of transformers that generates", "give one such as LlamaForCausalLM")
    if type(model).generate is not library["generate"]:
        raise TapasError(name, "has a `generate` of its own", "serve it with transformers")
    text = model.config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"]) - {"full_attention", "sliding_attention"}
    if kinds or getattr(model, "_is_stateful", False):
        what = ", ".join(sorted(kinds)) or "a state of its own"
        raise TapasError(name, f"has {what}, which is no cache of keys and values", "serve it with transformers")
    for flag in ("num_kv_shared_layers", "kv_lora_rank", "qk_head_dim"):
        if getattr(text, flag, None):
            raise TapasError(name, f"has a cache of another form ({flag})", "serve it with transformers")


def attention_modules(model: Any) -> tuple[CacheHomes, CacheHomes]:
    """Those that add to the cache, by layer: of a decoder's own tokens, and of an encoder's results."""
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    layers: dict[int, list[nn.Module]] = {}
    for module in decoder.modules():
        number = getattr(module, "layer_idx", None)
        inner = any(getattr(m, "layer_idx", None) is not None for m in module.modules() if m is not module)
        if isinstance(number, int) and not inner:
            layers.setdefault(number, []).append(module)
    kinds = 2 if model.config.is_encoder_decoder else 1
    if (
        not layers
        or any(len(modules) != kinds for modules in layers.values())
        or set(layers) != set(range(len(layers)))
    ):
        raise TapasError(
            type(model).__name__, "does not tell which of its modules add to a cache", "serve it elsewhere"
        )
    own = tuple(layers[i][0] for i in range(len(layers)))
    cross = tuple(layers[i][1] for i in range(len(layers))) if kinds == 2 else ()
    return CacheHomes(own), CacheHomes(cross)


def usual_shape(model: Any, batch: int, places: int) -> CacheShape:
    """As most configurations mean it. What a layer adds is the evidence, see CacheHomes."""
    config = model.config.get_text_config(decoder=True)
    heads = _said(config, "num_key_value_heads") or config.num_attention_heads
    features = _said(config, "head_dim") or _said(config, "d_kv")
    return CacheShape(batch, heads, places, features or config.hidden_size // config.num_attention_heads, model.dtype)


def _said(config: Any, name: str) -> int | None:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # it says one for each layer
        return None
