"""Models from the Hub: measured as they are saved, or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import hub_environment
from hub import Hub
from simcse_st import Recipe, build_model

PROGRAM = """
import json, sys
from simcse_st import InputError, evaluate

outcomes = []
for reference in json.loads(sys.argv[1]):
    try:
        record = evaluate(reference, tasks="dev", dev=sys.argv[2])
        outcomes.append(record.model_dump()["models"][0])
    except InputError as error:
        outcomes.append(str(error))
print(json.dumps(outcomes))
"""


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def measure(hub: Hub, home: Path, dev: Path, models: list[str], token: str = "") -> list[Any]:
    command = [sys.executable, "-c", PROGRAM, json.dumps(models), str(dev)]
    settings = hub_environment(hub, home, token)
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_models_of_the_hub(hub: Hub, tiny_base: Path, tiny_data: Path, tmp_path: Path):
    build_model(tiny_base, device="cpu").save_pretrained(str(tmp_path / "cls"), create_model_card=False)
    build_model(tiny_base, pooling="mean", device="cpu").save_pretrained(
        str(tmp_path / "mean"), create_model_card=False
    )
    first = hub.add_repo("model", "acme/full", files_of(tmp_path / "cls"))
    second = hub.add_repo("model", "acme/full", files_of(tmp_path / "mean"))
    hub.add_repo("model", "acme/bare", files_of(tiny_base))
    hub.add_repo("model", "acme/private", files_of(tmp_path / "cls"), private=True)
    hub.add_repo("model", "acme/nothing", {"README.md": b"soon\n"})
    models = [
        "acme/full", f"acme/full@{first}", "acme/full:cls",
        "acme/bare", "acme/bare:mean",
        "acme/private", "acme/nothing:mean", "acme/ful", "acme/full@v9",
    ]  # fmt: skip
    found = measure(hub, tmp_path / "home", tiny_data / "dev.csv", models)
    assert [model["revision"] for model in found[:3]] == [second, first, second]
    assert [model["modules"][1] for model in found[:3]] == ["Pooling(mean)", "Pooling(cls)", "Pooling(cls)"]
    assert found[1]["tasks"]["dev"]["spearman"] == found[2]["tasks"]["dev"]["spearman"]
    assert found[0]["tasks"]["dev"]["spearman"] == found[4]["tasks"]["dev"]["spearman"]
    assert found[0]["tasks"]["dev"]["spearman"] != found[1]["tasks"]["dev"]["spearman"]
    assert found[3].startswith("acme/bare is a bare encoder: say how")
    for message, name in zip(found[5:], ("acme/private", "acme/nothing", "acme/ful", "acme/full"), strict=True):
        assert isinstance(message, str)
        assert name in message
        assert "\n" not in message
    (mine,) = measure(hub, tmp_path / "mine", tiny_data / "dev.csv", ["acme/private"], token="hf_alice")
    assert mine["modules"][1] == "Pooling(cls)"


def test_a_stack_that_cannot_be_fetched_is_not_read_otherwise(
    hub: Hub, tiny_base: Path, tiny_data: Path, tmp_path: Path
):
    """Where modules.json does not come, Sentence Transformers itself would read the encoder through its mean."""
    build_model(tiny_base, device="cpu").save_pretrained(str(tmp_path / "cls"), create_model_card=False)
    hub.add_repo("model", "acme/full", files_of(tmp_path / "cls"))
    fault = hub.fault("status", path="modules.json", status=403, times=99)
    (message,) = measure(hub, tmp_path / "home", tiny_data / "dev.csv", ["acme/full"])
    assert fault.times < 99
    assert isinstance(message, str)
    assert "acme/full" in message


TRAIN = """
import sys
from simcse_st import load_recipe, train

recipe = load_recipe(sys.argv[1], [f"model.base={sys.argv[2]}", f"model.revision={sys.argv[3]}", "model.pooling=null"])
run = train(recipe, sys.argv[4])
print(run.results.base_model, run.results.stack, run.results.untrained, run.manifest.train.truncation.tokenizer)
"""


@pytest.mark.slow
def test_a_base_of_the_hub_goes_on_as_it_is_saved(hub: Hub, tiny_base: Path, tiny_recipe: Recipe, tmp_path: Path):
    for pooling in ("mean", "cls"):
        build_model(tiny_base, pooling=pooling, device="cpu").save_pretrained(str(tmp_path / pooling))
    first = hub.add_repo("model", "acme/full", files_of(tmp_path / "mean"))
    hub.add_repo("model", "acme/full", files_of(tmp_path / "cls"))
    hub.add_repo("model", "acme/bare", files_of(tiny_base))
    (tmp_path / "mine.yaml").write_text(tiny_recipe.to_yaml())
    for base, revision, mode in (
        ("acme/full", first, "mean"),
        ("acme/full", "null", "cls"),
        ("acme/bare", "null", "cls"),
    ):
        folder = tmp_path / f"{base[5:]}-{mode}"
        command = [sys.executable, "-c", TRAIN, str(tmp_path / "mine.yaml"), base, revision, str(folder)]
        settings = hub_environment(hub, tmp_path / "home")
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        expected = f"{base} Transformer -> Pooling({mode}) -> Normalize None {base}"
        assert done.stdout.splitlines()[-1] == expected
        for path in (folder / "model").rglob("*"):
            if path.suffix in (".json", ".md"):
                assert str(tmp_path) not in path.read_text(), path
