"""What is known of transports without loading them."""

SLOTS = 4
"""On either side. Two would do, if telling each other took no time: with four it is hidden."""

LOCAL = ("shm", "cuda-ipc")
"""Transports of one machine: publisher and receivers meet at a unix socket. The others meet at a TCP port."""
ON_GPU = ("cuda-ipc", "nccl")
"""Transports whose slots are always in GPU memory. NIXL's are where the weights are; the others' in host memory."""
