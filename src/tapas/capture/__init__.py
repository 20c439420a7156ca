"""nn.Module -> Graph, through torch.export on fake tensors. Nothing else uses torch.export."""

from tapas.capture.program import Captured, capture, capture_program
from tapas.ir.interpreter import resolve

__all__ = ["Captured", "capture", "capture_program", "resolve"]
