"""How much a device can compute at most, for the share of it that a run uses (MFU). Only what makers publish."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# 10^12 operations a second without sparsity: bfloat16 on tensor cores, and plain float32. From the makers' data sheets.
_PEAKS: Mapping[str, Mapping[str, float]] = {
    "GB200": {"bfloat16": 2500.0, "float32": 80.0},
    "B200": {"bfloat16": 2250.0, "float32": 75.0},
    "H200": {"bfloat16": 989.0, "float32": 67.0},
    "H100 NVL": {"bfloat16": 835.0, "float32": 60.0},
    "H100 PCIe": {"bfloat16": 756.0, "float32": 51.0},
    "H100": {"bfloat16": 989.0, "float32": 67.0},
    "A100": {"bfloat16": 312.0, "float32": 19.5},
    "A40": {"bfloat16": 149.7, "float32": 37.4},
    "A30": {"bfloat16": 165.0, "float32": 10.3},
    "A10G": {"bfloat16": 70.0, "float32": 35.0},
    "A10": {"bfloat16": 125.0, "float32": 31.2},
    "L40S": {"bfloat16": 362.0, "float32": 91.6},
    "L40": {"bfloat16": 181.0, "float32": 90.5},
    "L4": {"bfloat16": 121.0, "float32": 30.3},
    "V100": {"float32": 15.7},
    "T4": {"float32": 8.1},
    "RTX 4090": {"bfloat16": 165.2, "float32": 82.6},
    "RTX 3090": {"bfloat16": 71.0, "float32": 35.6},
}


def peak_flops(device: str, precision: str) -> float | None:
    """Operations a second, of a device by the name that CUDA gives it; None where it is not known."""
    words = f" {device.replace('-', ' ')} "
    for name, peaks in _PEAKS.items():  # longer names stand first
        if f" {name} " in words:
            peak = peaks.get(precision)
            return None if peak is None else peak * 1e12
    return None


def utilization(devices: Iterable[str], num_devices: int, precision: str, flops_a_second: float) -> float | None:
    """The share of what all devices could compute at most; None where one of them or the model's cost is not known."""
    peaks = [peak for device in devices if (peak := peak_flops(device, precision)) is not None]
    return flops_a_second / sum(peaks) if len(peaks) >= num_devices and flops_a_second > 0 else None
