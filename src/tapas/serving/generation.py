"""`generate` of transformers on ranks: each of them runs it, and the model that it calls is the parallel one."""

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput

from tapas.errors import TapasError
from tapas.runtime.agreement import differing
from tapas.runtime.module import ParallelModule, executor_of
from tapas.serving.wanted import Wanted, check_given
from tapas.serving.workload import Workload


class FilledCache(Cache):
    """What `generate` sees of the cache: how many tokens are in it."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.filled = 0
        self.missing = 0  # tokens of prompts that are shorter than planned

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.filled


class PromptOnly:
    """Stands for the encoder, which the prefill runs: what it is given goes there."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=input_ids)  # type: ignore[arg-type]

    __call__ = forward


class ServedModel(nn.Module):
    """Generates as the original does; every rank calls it alike. `module` has the weights, as DTensors."""

    module: ParallelModule
    workload: Workload
    config: Any

    def generate(self, inputs: torch.Tensor | None = None, generation_config: Any = None, **asked: Any) -> Any:
        wanted = Wanted(asked, generation_config, self.generation_config)
        wanted.check()
        given = inputs if inputs is not None else asked.get("input_ids")
        if not wanted.by_caller("max_new_tokens", "max_length"):
            asked["max_new_tokens"] = self.workload.new
        else:
            self.check_new(wanted, 1 if given is None or self.config.is_encoder_decoder else given.shape[-1])
        if wanted["do_sample"]:
            self.check_seeds()
        asked["past_key_values"] = FilledCache()
        return super().generate(inputs, generation_config=generation_config, **asked)  # type: ignore[misc]

    def check_new(self, wanted: Wanted, length: int) -> None:
        """Of what is asked for by the number of tokens, or by the length of the result."""
        tokens, whole = wanted["max_new_tokens"], wanted["max_length"]
        what = f"max_new_tokens {tokens}"
        if tokens is None:
            what, tokens = f"max_length {whole}, {whole - length} new tokens after {length}", whole - length
        if tokens > self.workload.new:
            raise self.too_much(what, self.workload.new)

    def check_seeds(self) -> None:
        rank = executor_of(self.module).rank
        state = torch.cuda.get_rng_state() if rank.device.type == "cuda" else torch.get_rng_state()
        if differing({"seed": state}, rank):
            fact = "ranks would draw different tokens: their random numbers differ"
            raise TapasError("generate(do_sample=True)", fact, "call torch.manual_seed alike on all ranks before")

    def too_much(self, what: str, planned: int) -> TapasError:
        return TapasError(what, f"the plan is for {self.workload}: {planned} at most", "plan for more")

    def forward(
        self, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None, past_key_values: Any = None, encoder_outputs: Any = None,
        decoder_input_ids: torch.Tensor | None = None, **others: Any,
    ) -> Any:  # fmt: skip
        """Of `generate`: the logits of the next tokens."""
        if not isinstance(past_key_values, FilledCache):
            raise TapasError(type(self).__name__, "is called by generate() only", "call generate(), or use parallelize")
        check_given(others)
        if attention_mask is not None:
            attention_mask = attention_mask.ne(0).long()  # of whatever kind it is, the program was captured with this
        if encoder_outputs is not None:
            assert decoder_input_ids is not None
            mask = torch.ones_like(encoder_outputs[0]) if attention_mask is None else attention_mask
            logits = self._beside_encoder(decoder_input_ids, mask, past_key_values, encoder_outputs[0])
            filled: Any = past_key_values
            return Seq2SeqLMOutput(logits=logits, past_key_values=filled)
        assert input_ids is not None
        if attention_mask is None:
            attention_mask = input_ids.new_ones(len(input_ids), past_key_values.filled + input_ids.shape[1])
        if position_ids is None:
            position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        logits = self._decoder_only(input_ids, attention_mask, position_ids, past_key_values)
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)

    def _decoder_only(
        self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: FilledCache
    ) -> Any:
        """Prompts stand at the end of the places that are planned for them; those before are masked."""
        planned, first = self.workload.prompt, not cache.filled
        if first:
            self.check_prompts(tokens)
            cache.missing = planned - tokens.shape[1]
            tokens, positions = (_padded(t, cache.missing, 0, 0) for t in (tokens, positions))
        place = 0 if first else cache.missing + cache.filled
        length = planned + self.workload.new
        if place + tokens.shape[1] > length:
            raise self.too_much(f"{self.workload.new + 1} new tokens", self.workload.new)
        mask = _padded(mask, cache.missing, length - mask.shape[1] - cache.missing, 1)
        mask[:, : cache.missing] = 0
        cache.filled = place + tokens.shape[1] - cache.missing
        return self.logits(input_ids=tokens, attention_mask=mask, position_ids=positions, position=place)

    def _beside_encoder(
        self, tokens: torch.Tensor, mask: torch.Tensor, cache: FilledCache, prompts: torch.Tensor
    ) -> Any:
        """Prompts stand at the beginning of the places that are planned for them."""
        place = cache.filled
        if not place:
            self.check_prompts(prompts)
            start = self.config.decoder_start_token_id
            if tokens.shape[1] != 1 or bool((tokens != start).any()):
                raise TapasError(
                    "decoder_input_ids", f"is not {start} alone, with which the plan starts", "leave it out"
                )
        elif place > self.workload.new:
            raise self.too_much(f"{place} new tokens", self.workload.new)
        missing = self.workload.prompt - prompts.shape[1]
        given = tokens if place else _padded(prompts, 0, missing, self.config.pad_token_id or 0)
        cache.filled += 1
        return self.logits(input_ids=given, attention_mask=_padded(mask, 0, missing, 0), position=place)

    def check_prompts(self, tokens: torch.Tensor) -> None:
        for name, given, planned in (
            ("batch", tokens.shape[0], self.workload.batch), ("prompt", tokens.shape[1], self.workload.prompt)
        ):  # fmt: skip
            if given > planned:
                raise self.too_much(f"{name} {given}", planned)

    def logits(self, position: int, **given: torch.Tensor) -> Any:
        """Of the samples that are given; the last one stands for those that are planned, too."""
        rows = len(given["input_ids"])
        order = torch.arange(self.workload.batch).clamp(max=rows - 1).to(given["input_ids"].device)
        made = self.module(**{name: t[order] for name, t in given.items()}, position=torch.tensor(position))
        return (made.to_local() if isinstance(made, DTensor) else made)[:rows]

    def get_encoder(self, modality: str | None = None) -> Any:
        return PromptOnly()

    def get_experts_implementation(self) -> dict[str, str]:
        return {}  # to be switched for decoding: the programs are made


def served_model(model: Any, module: ParallelModule, workload: Workload) -> Any:
    """What has the `generate` of the model's class, and none of its modules."""
    kind = type(model)
    served: Any = object.__new__(type(f"Served{kind.__name__}", (ServedModel, kind), {"__module__": __name__}))
    nn.Module.__init__(served)
    served.config, served.workload = model.config, workload
    served.generation_config = copy.deepcopy(model.generation_config)
    served.generation_config.use_cache, served.generation_config.cache_implementation = True, None  # ours is filled
    served.module = module
    return served.eval()


def _padded(rows: torch.Tensor, before: int, after: int, value: int) -> torch.Tensor:
    return nn.functional.pad(rows, (before, after), value=value)
