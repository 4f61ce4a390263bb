"""What tests share: arrays, bounds, data and GPUs to run them on."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the repository
