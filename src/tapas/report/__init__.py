"""Plans, folds, explanations and comparisons as tables: rich in a terminal, plain text elsewhere."""

from tapas.report.frame import print_to, text_of, width_from
from tapas.report.plan import plan_text, print_plan

__all__ = ["plan_text", "print_plan", "print_to", "text_of", "width_from"]
