"""What people see of a campaign: its history, one picture, tables, samples, TensorBoard files. Without torch."""

from headrace.engines.report.curves import curves_png
from headrace.engines.report.history import History
from headrace.engines.report.samples import samples_markdown
from headrace.engines.report.stages import stage_table
from headrace.engines.report.tensorboard import write_tensorboard

__all__ = ["History", "curves_png", "samples_markdown", "stage_table", "write_tensorboard"]
