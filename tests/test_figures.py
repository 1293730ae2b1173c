"""Pictures: drawn from what they are given, readable without a display."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from simcse_st import InputError
from simcse_st.evaluation.figures import check_matplotlib, draw_geometry, draw_gold_cosine, draw_training
from simcse_st.evaluation.records import Geometry
from simcse_st.records import HistoryEntry

pytest.importorskip("matplotlib", reason="the plot extra is not installed")

PNG = b"\x89PNG\r\n\x1a\n"


def size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(PNG)
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_a_panel_for_each_model_and_run(tmp_path: Path):
    gold = [0.0, 1.2, 2.5, 3.0, 4.8, 5.0]
    cosines = [0.1, -0.2, 0.5, 0.6, 0.7, 0.9]
    draw_gold_cosine({"one": cosines}, gold, tmp_path / "one.png")
    draw_gold_cosine({f"model {i}": cosines for i in range(4)}, gold, tmp_path / "figures" / "four.png")
    # Three panels side by side, the fourth below.
    assert size(tmp_path / "figures" / "four.png") == (
        3 * size(tmp_path / "one.png")[0],
        2 * size(tmp_path / "one.png")[1],
    )
    history = [
        HistoryEntry(step=0, dev={"spearman": 50}),
        HistoryEntry(step=1, loss=2.0),
        HistoryEntry(step=1, dev={"spearman": 60}),
    ]
    early = HistoryEntry(step=1, early={"alignment": 0.1})
    draw_training({"a": history, "b": [*history, early]}, tmp_path / "training.png")
    assert size(tmp_path / "training.png")[0] == 2 * size(tmp_path / "one.png")[0]
    geometry = Geometry(alignment=0.2, uniformity=-3.0, pairs=264, sentences=2910)
    other = geometry.model_copy(update={"uniformity": -2.0})
    draw_geometry({"a": geometry, "b" * 200: other}, tmp_path / "geometry.png")
    assert size(tmp_path / "geometry.png")[0] == size(tmp_path / "one.png")[0]


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"pip install 'simcse-st\[plot\]'"):
        check_matplotlib()


def test_the_command_draws_all_three(tiny_base: Path, tiny_data: Path, tmp_path: Path):
    program = f"""
from simcse_st import evaluate
sources = {{split: {str(tiny_data)!r} + f"/{{split}}.csv" for split in ("dev", "test")}}
evaluate([{f"{tiny_base}:mean"!r}], output={str(tmp_path / "out")!r}, figures=True, **sources)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    drawn = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert drawn == {"alignment_uniformity.png", "gold_cosine.png"}
    for name in drawn:
        assert size(tmp_path / "out" / "figures" / name)[0] > 800
