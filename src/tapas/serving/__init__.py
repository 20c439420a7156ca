"""Transformers models that generate: prefill and decode over one set of weights and one cache, planned together."""
