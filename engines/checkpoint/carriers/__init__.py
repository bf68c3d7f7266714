"""How partitions get from a publisher's slots to its receivers: one file for each transport.

What is said about partitions is the same for all of them (``courier``, ``link``); a carrier only moves bytes.
"""
