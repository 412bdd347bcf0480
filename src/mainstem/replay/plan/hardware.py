"""Arithmetic, memory and link rates of devices, as their makers state them. A table; nothing is measured here.

Rates are peaks without sparsity. The fraction that prefill reaches is an assumption of the plan, not of this table. A
link rate is that of one direction between a device and its host's memory. Power is the most that the maker states.
Rents are assumptions of a plan, too: round numbers without a source, for a first estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mainstem.errors import BadArgument

_PCIE4, _PCIE5 = 32e9, 64e9  # 16 lanes, one direction


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator.

    Args:
        name: its name on the command line.
        memory_bytes: bytes of device memory.
        memory_bytes_per_s: bandwidth of that memory.
        bf16_flops_per_s: dense peak rate, accumulated in fp32.
        fp8_flops_per_s: the same for fp8; None: not supported.
        host_bytes_per_s: bandwidth to host memory, one direction.
        source: source of the figures.
        watts: maximum power, of the same source.
        dollars_per_h: rent of one device with its share of a machine: a round number of this table's author, no quote.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float | None
    host_bytes_per_s: float
    source: str
    watts: float = 0.0
    dollars_per_h: float = 0.0

    def flops_per_s(self, weights_dtype: str) -> float:
        """Returns the peak rate for weights of a type; types narrower than fp8 are widened to bf16."""
        eight = weights_dtype == "fp8" and self.fp8_flops_per_s is not None
        rate = self.fp8_flops_per_s if eight else self.bf16_flops_per_s
        assert rate is not None
        return rate


_NVIDIA, _AMD = "NVIDIA {} data sheet, figures without sparsity", "AMD Instinct {} data sheet"
_GH200 = _NVIDIA.format("GH200 (96 GB; NVLink-C2C)")
_ADA = "NVIDIA Ada GPU architecture paper, appendix A"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture paper"
_CPU = "60 cores with AMX at 1.9 GHz, 1,024 bf16 operations a core and cycle; 8 channels of DDR5-4800"

_DEVICES = (
    Device("a10", 24e9, 600e9, 125e12, None, _PCIE4, _NVIDIA.format("A10"), 150, 0.75),
    Device("a100-40gb", 40e9, 1.555e12, 312e12, None, _PCIE4, _NVIDIA.format("A100"), 400, 1.25),
    Device("a100-80gb", 80e9, 2.039e12, 312e12, None, _PCIE4, _NVIDIA.format("A100 (SXM)"), 400, 1.5),
    Device("l4", 24e9, 300e9, 121e12, 242e12, _PCIE4, _NVIDIA.format("L4"), 72, 0.6),
    Device("l40s", 48e9, 864e9, 362e12, 733e12, _PCIE4, _NVIDIA.format("L40S"), 350, 1.0),
    Device("h100", 80e9, 3.35e12, 989e12, 1979e12, _PCIE5, _NVIDIA.format("H100 (SXM)"), 700, 2.5),
    Device("h200", 141e9, 4.8e12, 989e12, 1979e12, _PCIE5, _NVIDIA.format("H200 (SXM)"), 700, 3.0),
    Device("gh200", 96e9, 4.0e12, 989e12, 1979e12, 450e9, _GH200, 1000, 2.5),
    Device("b200", 180e9, 8.0e12, 2250e12, 4500e12, _PCIE5, _NVIDIA.format("HGX B200"), 1000, 5.0),
    Device("mi300x", 192e9, 5.3e12, 1307e12, 2615e12, _PCIE5, _AMD.format("MI300X"), 750, 2.5),
    Device("mi325x", 256e9, 6.0e12, 1307e12, 2615e12, _PCIE5, _AMD.format("MI325X"), 1000, 3.0),
    Device("rtx4090", 24e9, 1.008e12, 165e12, 330e12, _PCIE4, _ADA, 450, 0.4),
    Device("rtx5090", 32e9, 1.792e12, 209e12, 419e12, _PCIE5, _BLACKWELL, 575, 0.7),
    Device("cpu", 256e9, 307e9, 117e12, None, 307e9, _CPU, 350, 1.5),
)

DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in _DEVICES})
"""All devices by name."""


def find_device(device: str) -> Device:
    """Returns the device of this name.

    Raises:
        BadArgument: there is no device of this name.
    """
    if device.lower() not in DEVICES:
        own = "for another, the closest one with --flops, --device-memory, --bandwidth-device and --bandwidth-host"
        raise BadArgument("gpu", device, f"one of {', '.join(DEVICES)}; {own}")
    return DEVICES[device.lower()]
