"""Headrace: durable reinforcement-learning post-training of language models on Prefect.

Importing this package imports nothing else: the rooms below it differ in what they need (``flows``, ``tasks`` and
``blocks`` run without torch; ``engines`` and ``algorithms`` need what their role needs).
"""

__version__ = "0.1.0"
