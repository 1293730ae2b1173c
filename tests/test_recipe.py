"""Recipes: read as written, refused with the key that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from simcse_st import InputError, Recipe, load_recipe
from simcse_st.data.sources import resolve
from simcse_st.recipes import shipped_recipes


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_loads_and_survives_a_round_trip(name: str, tmp_path: Path):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description
    path = tmp_path / "again.yaml"
    path.write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(path) == recipe


def test_the_supervised_recipe_is_that_of_the_published_run():
    recipe = load_recipe("snli-sup")
    training = recipe.training
    assert (recipe.model.base, recipe.model.pooling, recipe.model.max_length) == ("bert-base-uncased", "cls", None)
    assert (recipe.loss.temperature, recipe.loss.hard_negative_weight, recipe.seed) == (0.05, 1.0, 42)
    assert (training.batch_size, training.learning_rate, training.epochs, training.max_length) == (128, 5e-5, 3, 32)
    assert (training.schedule, training.warmup_steps, training.weight_decay) == ("linear", 0, 0.0)
    assert (training.max_grad_norm, training.eval_steps) == (None, 50)


def test_an_ablation_differs_in_its_one_key():
    full, ablation = (load_recipe(name).model_dump() for name in ("snli-sup", "snli-sup-no-hard-negatives"))
    assert full["data"].pop("hard_negatives") is True
    assert ablation["data"].pop("hard_negatives") is False
    for recipe in (full, ablation):
        del recipe["name"], recipe["description"]
    assert full == ablation


def test_overrides_are_read_as_yaml():
    recipe = load_recipe(
        "snli-sup", ["training.learning_rate=3e-5", "data.sample=null", "data.train={dataset: a/b, split: c}", "name=x"]
    )
    assert recipe.training.learning_rate == 3e-5
    assert recipe.data.sample is None
    assert (recipe.data.train.dataset, recipe.data.train.split) == ("a/b", "c")
    assert recipe.name == "x"


def test_a_recipe_does_not_change():
    with pytest.raises(ValidationError):
        load_recipe("quickstart").seed = 3


def test_every_key_is_documented():
    def undocumented(schema: dict) -> list[str]:
        return [
            name for name, prop in schema.get("properties", {}).items() if not ({"description", "$ref"} & set(prop))
        ]

    schema = Recipe.model_json_schema()
    assert {
        kind: undocumented(part) for kind, part in {**schema["$defs"], "Recipe": schema}.items() if undocumented(part)
    } == {}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.temprature=1", "--set: unknown key 'loss.temprature': did you mean 'loss.temperature'?"),
        ("temperature=1", "--set: unknown key 'temperature': did you mean 'loss.temperature'?"),
        ("data.train={dataset: a, splt: b}", "--set: unknown key 'data.train.splt': did you mean 'data.train.split'"),
        ("seed=abc", "--set: seed: should be a valid integer, not the text 'abc'"),
        ("seed=1.5", "--set: seed: should be a valid integer, not the number 1.5"),
        ("training.epochs=true", "--set: training.epochs: should be a valid number, not true/false True"),
        ("training.epochs=no", "--set: training.epochs: should be a valid number, not the text 'no'"),
        (
            "loss.temperature=0",
            "--set: loss.temperature: should be greater than or equal to 0.000001, not the number 0",
        ),
        ("loss.temperature=", "--set: loss.temperature: should be a valid number, not nothing"),
        ("training.batch_size=1", "--set: training.batch_size: should be greater than 1, not the number 1"),
        ("training=3", "--set: training: should be a mapping, not the number 3"),
        (
            "training.precision=fp8",
            "--set: training.precision: should be 'auto', 'fp32', 'fp16' or 'bf16', not the text 'fp8'",
        ),
        ("data.train.split=x", "--set data.train.split: 'train' holds"),
        ("foo", "--set 'foo': write it as key=value"),
        ("a=[1", "--set a:1: not valid YAML"),
        ("name=../up", "--set: name: should match pattern"),
        ("a..b=3", "--set 'a..b=3': write it as key=value"),
        ("data.train={a: }", "--set: data.train: should be a file, a hub data set, a mapping with the key dataset"),
        ("data.sample.row=3", "--set: unknown key 'data.sample.row': did you mean 'data.sample.rows'?"),
        ("seed=99999999999", "--set: seed: should be less than 4294967296"),
        ("data.train=", "--set: data.train: should be"),
        ("model.base=''", "--set: model.base: should have at least 1 character"),
        ("data.train=[]", "--set: data.train: should have at least 1 item, not a list"),
        ("data.train=[a, '']", "--set: data.train.1: should have at least 1 character, not the text ''"),
        ("data.columns.anchr=a", "--set: unknown key 'data.columns.anchr': did you mean 'data.columns.anchor'?"),
        ("data.columns={negative: [0]}", "--set: data.columns.negative.0: should be greater than 0, not the number 0"),
        ("data.nli.hard_negatives=lsat", "--set: data.nli.hard_negatives: should be 'first' or 'all', not the text"),
        ("data.sample.rows=-1", "--set: data.sample.rows: should be greater than 0, not the number -1"),
    ],
)
def test_a_bad_override_is_named(override: str, message: str):
    with pytest.raises(InputError) as error:
        load_recipe("quickstart", [override])
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "r.yaml: a recipe is a mapping of keys to values, this is a list"),
        ("", "r.yaml: a recipe is a mapping of keys to values, this is nothing"),
        ("model: {base: x}\n", "r.yaml: the key 'data' is missing"),
        ("model: {base: x}\ndata: {train: y}\nseed: [\n", "r.yaml:4: not valid YAML"),
        ("seed: 1\nmodel: {base: x}\nseed: 2\n", "r.yaml:3: not valid YAML: the key 'seed' stands twice"),
        ("model: {base: 3}\ndata: {train: y}\n", "r.yaml: model.base: should be a valid string, not the number 3"),
        ("model: {base: x}\ndata: {train: y}\nlos: {}\n", "r.yaml: unknown key 'los': did you mean 'loss'?"),
        (b"\xff\xfe", "r.yaml: not UTF-8 text"),
        ("? [a]\n: 1\n", "r.yaml: not valid YAML: unhashable"),
        ("seed: " + "1" * 5000, "r.yaml: not valid YAML: Exceeds the limit"),
        ("seed: !!int abc", "r.yaml: not valid YAML: invalid literal"),
        ("[" * 3000, "r.yaml: not valid YAML: maximum recursion depth"),
        ("a: &a {b: *a}\n", "r.yaml: "),
        ("b: &b {base: x}\nmodel: {<<: *b}\ndata: {train: y}\n", "r.yaml: unknown key"),
    ],
)
def test_a_bad_file_is_named_with_its_line(
    text: str | bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as error:
        load_recipe("r.yaml")
    assert str(error.value).startswith(message)


def test_a_name_is_made_of_the_file_s(tmp_path: Path):
    path = tmp_path / "my recipe (2).yaml"
    path.write_text("model: {base: x}\ndata: {train: y}\n")
    assert load_recipe(path).name == "my-recipe-2"


def test_unknown_recipes_get_the_nearest_names():
    with pytest.raises(InputError, match=r"no recipe 'quickstrat': did you mean 'quickstart'\?"):
        load_recipe("quickstrat")
    with pytest.raises(InputError, match=r"none.yaml: cannot read this recipe: No such file"):
        load_recipe("none.yaml")


def test_numbers_are_yaml_1_2(tmp_path: Path):
    # What PyYAML's own loader makes of these is the reason for another one.
    assert yaml.safe_load("5e-5") == "5e-5"
    assert yaml.safe_load("no") is False
    assert load_recipe("quickstart", ["training.learning_rate=5e-5"]).training.learning_rate == 5e-5
    assert load_recipe("quickstart", ["description=no"]).description == "no"


def test_references_into_packages():
    assert Path(resolve("package:simcse_st/data/quickstart/dev.csv")).is_file()
    assert resolve("some/hub-id") == "some/hub-id"
    with pytest.raises(InputError, match="the installed package 'simcse_st' holds no 'nothing'"):
        resolve("package:simcse_st/nothing")
    with pytest.raises(InputError, match="'no_such_package' is not installed"):
        resolve("package:no_such_package/model")


def test_a_recipe_extends_another_but_for_the_keys_it_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("extends: snli-unsup\nmodel: {pooling: mean}\ndata: {sample: null}\nseed: 7\n")
    Path("child.yaml").write_text("extends: mine.yaml\nseed: 8\n")
    child, parent = load_recipe("child.yaml"), load_recipe("snli-unsup")
    assert (child.name, child.description, child.seed, child.data.sample) == ("child", "", 8, None)
    given = {"name", "seed", "model.pooling", "data.sample"}
    assert set(child.differences(parent)) == given
    Path("mine.yaml").write_text("extends: child.yaml\n")
    with pytest.raises(InputError, match=r"extends: must be another recipe's name or path, not the text 'child.yaml'"):
        load_recipe("child.yaml")
    Path("mine.yaml").write_text("extends: snli-unsup\nloss: {temprature: 1}\n")
    with pytest.raises(InputError, match=r"^mine.yaml: unknown key 'loss.temprature': did you mean 'loss.temperature'"):
        load_recipe("child.yaml")


def test_an_unknown_key_is_named_whatever_type_it_is_called_after(tmp_path: Path):
    """Keys that end as the members of a union are called, which stand in pydantic's places too."""
    path = tmp_path / "mine.yaml"
    for key, text in (("hint", "extends: quickstart\nhint: 1"), ("data.test.footprint", "extends: quickstart")):
        path.write_text(text)
        overrides = {} if key == "hint" else {"data.test": {"retrieval": "x.jsonl", "footprint": 1}}
        with pytest.raises(InputError, match=f"unknown key '{key}'"):
            load_recipe(path, overrides)
