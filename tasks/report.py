"""What people see: one table, some samples and one picture in the Prefect UI, metrics as Parquet and for TensorBoard."""

import asyncio
import base64
import json
import time

from prefect.artifacts import acreate_image_artifact, acreate_markdown_artifact, acreate_table_artifact
from prefect.events import emit_event

from headrace.blocks.manifest import Manifest
from headrace.blocks.weights import Served
from headrace.engines.report import history, pictures, tables
from headrace.engines.report.tensorboard import TensorBoard
from headrace.tasks.campaign import Campaign, current
from headrace.tasks.stage import stage

SAMPLES = 4
"""Answers shown of each iteration."""
MOVING = 5
"""Iterations of the mean reward in the summary."""
