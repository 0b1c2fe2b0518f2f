"""Large checkpoint experiments are the GPU's: its folder, cells of their own, no mixed frame."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from repro import experiments
from repro.experiments import tidy
from repro.measuring import machine, records

ROOT = Path(__file__).resolve().parents[2]
#: Of attention there is no larger form, and times are taken at the published sizes as it is.
ONE_SCALE = ("checkpoint-attention", "checkpoint-time")
NAMES = [n for n in experiments.names() if n.startswith("checkpoint-") and n not in ONE_SCALE]

CODE = """
import json, sys
from repro.measuring import machine
if sys.argv[1] == "gpu":
    machine.gpu = lambda: machine.Gpu("NVIDIA H200", "580", 1)
else:
    machine.gpu = lambda: None
from repro import experiments
from repro.experiments import run
found = {}
for name in sys.argv[2:]:
    one = experiments.experiment(name)
    found[name] = [run.folder(one.device), one.scale, [cell.id for cell in one.cells()]]
    assert all(cell.get("scale", "small") == one.scale for cell in one.cells())
print(json.dumps(found))
"""


def listed(scale: str, card: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", CODE, card, *NAMES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "REPRO_CHECKPOINT_SCALE": scale},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout)


def test_the_large_scale_lands_in_the_gpus_folder_with_other_cells() -> None:
    assert len(NAMES) == 4
    small, large = listed("small", "gpu"), listed("large", "gpu")
    for name in NAMES:
        assert small[name][:2] == ["local", "small"]
        assert large[name][:2] == ["nvidia-h200", "large"]
        assert len(small[name][2]) == len(large[name][2])
        assert not set(small[name][2]) & set(large[name][2])
    assert {place for place, _, _ in listed("large", "none").values()} == {"local"}
    with pytest.raises(RuntimeError, match="'Large' is neither 'small' nor 'large'"):
        listed("Large", "none")


def test_records_of_the_other_scale_stay_out_of_the_frame(tmp_path) -> None:
    name = "checkpoint-layer-bytes"
    cell = next(iter(experiments.experiment(name).cells()))
    for scale, value in (({}, 1.0), ({"scale": "large"}, 2.0)):
        row = records.record(
            {**cell, **scale},
            experiment=name,
            source="measured",
            metric="peak_bytes",
            value=value,
            unit="B",
            device=machine.cpu(),
        )
        records.append(tmp_path / "card" / f"{name}.jsonl", [row])
    frame = tidy((name,), tmp_path)
    assert frame[frame["source"] == "measured"]["value"].tolist() == [1.0]
