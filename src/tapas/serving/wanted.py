"""What `generate` is asked for, and what of that a split model does not carry."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers.generation.stopping_criteria import MaxTimeCriteria

from tapas.errors import TapasError

# What can be asked for, and the values that leave it at what is carried.
CARRIED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1, None), "num_beam_groups": (1, None), "constraints": (None,), "force_words_ids": (None,),
    "penalty_alpha": (None, 0.0), "dola_layers": (None,), "assistant_model": (None,),
    "prompt_lookup_num_tokens": (None,), "assistant_early_exit": (None,), "use_mtp": (False, None),
    "custom_generate": (None,), "prefill_chunk_size": (None,), "cache_implementation": (None,),
    "use_cache": (True, None), "past_key_values": (None,), "inputs_embeds": (None,), "encoder_outputs": (None,),
    "guidance_scale": (None, 1, 1.0), "max_time": (None,),
    "negative_prompt_ids": (None,), "output_attentions": (False, None), "output_hidden_states": (False, None),
    "token_type_ids": (None,), "decoder_attention_mask": (None,), "synced_gpus": (False, None),
    "continuous_batching_config": (None,),
}  # fmt: skip
SPOKEN = {
    "num_beams": "beam search", "assistant_model": "assisted decoding", "penalty_alpha": "contrastive search",
    "max_time": "a limit of time, which ranks reach at different tokens,",
}  # fmt: skip
# What `generate` gives a model besides, of its own accord.
READ = {"use_cache", "return_dict", "logits_to_keep"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Arguments come first, then the configuration that is given with them, then the model's own."""

    asked: Mapping[str, Any]
    given: Any  # a GenerationConfig or None
    own: Any

    def __getitem__(self, name: str) -> Any:
        return self.asked[name] if name in self.asked else self._first(name, self.given, self.own)

    def by_caller(self, *names: str) -> bool:
        """Whether one of them is said with the call."""
        return any(self.asked.get(name, self._first(name, self.given)) is not None for name in names)

    @staticmethod
    def _first(name: str, *configs: Any) -> Any:
        found = (getattr(config, name, None) for config in configs)
        return next((value for value in found if value is not None), None)

    def check(self) -> None:
        for name, values in CARRIED.items():
            value = self[name]
            if not any(value is v or (isinstance(v, (int, float)) and value == v) for v in values):
                by_model = f"the model's own configuration asks for it: pass {name}={values[0]}"
                raise _not_carried(name, "leave it out" if self.by_caller(name) else by_model)
        if any(isinstance(criterion, MaxTimeCriteria) for criterion in self.asked.get("stopping_criteria") or ()):
            raise _not_carried("max_time", "leave it out of stopping_criteria")


def check_given(others: Mapping[str, Any]) -> None:
    """What the original's forward would be given and no program reads."""
    for name, value in others.items():
        if name not in READ and value is not None and value is not False:
            raise _not_carried(name, "leave it out")


def _not_carried(name: str, remedy: str) -> TapasError:
    return TapasError(f"generate({name}=...)", f"{SPOKEN.get(name, name)} is not carried by a split model", remedy)
