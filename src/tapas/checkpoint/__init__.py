"""Checkpoints that know nothing of a mesh, and weights in the format of transformers.

    save_checkpoint, load_checkpoint    everything to go on training, on any mesh, plan or single device
    load_safetensors, save_safetensors  model.safetensors, or shards with an index
    load_weights                        a state_dict that `torch.save` wrote on a single device

Every rank that holds a part of the module calls them. A plain module is loaded by each process for itself;
where a process group exists, it is saved by all of its ranks together.
"""

from tapas.checkpoint.export_weights import save_safetensors
from tapas.checkpoint.import_weights import load_safetensors, load_weights
from tapas.checkpoint.module_state import CheckpointError
from tapas.checkpoint.save_load import load_checkpoint, save_checkpoint

__all__ = [
    "CheckpointError",
    "load_checkpoint",
    "load_safetensors",
    "load_weights",
    "save_checkpoint",
    "save_safetensors",
]
