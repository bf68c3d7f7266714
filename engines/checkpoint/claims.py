"""A publisher's slots, kept for each address from one publish to the next: touched memory is much faster to write."""

import threading

import torch

from headrace.engines.checkpoint.carriers.base import Carrier, make_carrier
from headrace.engines.checkpoint.delta import forget
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.rendezvous import unreserve

_carriers: dict[str, tuple[str, Carrier]] = {}
"""address → (transport and device, slots)."""
_busy: set[str] = set()
_guard = threading.Lock()


def claim(address: str, transport: str, slot_bytes: int, device: torch.device, version: int) -> Carrier:
    """The slots of an address, made anew where they do not fit. Raises WeightError when they are in use."""
    with _guard:
        if address in _busy:
            raise WeightError(f"another publish to {address.partition('#')[0]} is under way", version=version)
        kind, carrier = _carriers.get(address, ("", None))
        if carrier is None or kind != f"{transport} {device}" or carrier.slot_bytes < slot_bytes:
            if carrier is not None:
                _carriers.pop(address)[1].close()
            carrier = make_carrier(transport, slot_bytes, device)
            _carriers[address] = f"{transport} {device}", carrier
        _busy.add(address)
        return carrier


def unclaim(address: str) -> None:
    """Ends the use of ``claim``; the memory stays for the next publish."""
    with _guard:
        _busy.discard(address)


def release(address: str) -> None:
    """Gives back what this process keeps for ``address``: slots, port, base for changes."""
    with _guard:
        if address in _busy:
            return
        _, carrier = _carriers.pop(address, ("", None))
        if carrier is not None:
            carrier.close()
    unreserve(address)
    forget(address)
