"""Meter: a GPU's SM clock, power and temperature while something is measured, N/A where nothing answers.

Asked by a thread of its own, several times a second: torch (which needs NVML's Python package), or else nvidia-smi, which goes on printing.
"""
from __future__ import annotations

import math
import subprocess
import threading
import time
from statistics import mean

import torch

EVERY_S = 0.1
SENSED = {"clock_MHz": 0, "power_W": 1, "temperature_C": 0}
"""What is read, and how many decimals of it are worth keeping."""


class Meter:
    """With a device of kind cpu, and where nothing answers, `read` knows nothing."""

    def __init__(self, device: torch.device) -> None:
        self._samples: list[tuple[float | None, ...]] = []
        """(when, MHz, W, degrees), None where N/A."""
        self._over = threading.Event()
        self._smi: subprocess.Popen | None = None
        self._threads = []
        if device.type == "cuda":
            self._threads.append(threading.Thread(target=self._watch, args=(device,), daemon=True))
            self._threads[0].start()

    def read(self, begin: float, end: float) -> dict[str, float | None]:
        """Means of what is sensed between two times of time.monotonic, or at the sample nearest to them; None where N/A."""
        samples = list(self._samples)
        inside = [s for s in samples if begin <= s[0] <= end] or sorted(samples, key=lambda s: abs(s[0] - end))[:1]
        known = {name: [s[k] for s in inside if s[k] is not None] for k, name in enumerate(SENSED, 1)}
        return {name: round(mean(known[name]), digits or None) if known[name] else None for name, digits in SENSED.items()}

    def close(self) -> None:
        self._over.set()
        if self._smi is not None:
            self._smi.kill()
        for thread in self._threads:
            thread.join(timeout=5)

    def _watch(self, device: torch.device) -> None:
        try:
            while not self._over.is_set():
                self._samples.append((time.monotonic(), float(torch.cuda.clock_rate(device)), torch.cuda.power_draw(device) / 1e3, float(torch.cuda.temperature(device))))
                self._over.wait(EVERY_S)
        except Exception:  # no NVML package, or a driver that does not tell
            self._read_smi(device)

    def _read_smi(self, device: torch.device) -> None:
        try:
            gpu = "GPU-" + str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
            ask = ["nvidia-smi", "-i", gpu, "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader,nounits", "-lms", str(int(EVERY_S * 1e3))]
            self._smi = subprocess.Popen(ask, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace")
            if self._over.is_set():  # closed before there was anything to end
                self._smi.kill()
            for line in self._smi.stdout:
                if parsed := sample(line):
                    self._samples.append((time.monotonic(), *parsed))
        except (OSError, AttributeError):
            return


def sample(line: str) -> tuple[float | None, ...] | None:
    """(MHz, W, degrees) of a line of nvidia-smi's, each None where it says [N/A]; None where the line is another."""
    found = tuple(map(number, line.split(",")))
    return found if len(found) == len(SENSED) else None


def number(said: str) -> float | None:
    """A number that nvidia-smi prints, None where it is none that can be."""
    try:
        value = float(said)
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None
