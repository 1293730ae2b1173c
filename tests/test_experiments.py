"""Several seeds, and a recipe against itself without one part: what is run, what is compared, what is kept."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from simcse_st import InputError, Recipe, Run, ablate, load_recipe, train, train_seeds
from simcse_st.evaluation.records import Evaluation, MeasuredModel, Seeds, Tasks
from simcse_st.evaluation.report import report, report_table
from simcse_st.evaluation.tables import ablation_tables, seeds_table
from simcse_st.records import BatchFacts, Environment, GradedFacts, Manifest, Results, Scores, TrainFacts
from simcse_st.training.experiments import ABLATIONS, _plan


@pytest.fixture
def short(tiny_recipe: Recipe) -> Recipe:
    training = tiny_recipe.training.model_copy(update={"max_steps": 4, "eval_steps": 2})
    return tiny_recipe.model_copy(update={"training": training})


def results(folder: Path) -> Results:
    return Run(folder).results


def test_seeds_are_run_once_each_and_summed_up(short: Recipe, tmp_path: Path):
    record = train_seeds(short, [1, 2], tmp_path / "seeds")
    scores = [results(tmp_path / "seeds" / f"seed-{seed}").test.spearman for seed in (1, 2)]
    assert [run.test for run in record.seeds] == scores
    assert scores[0] != scores[1]
    assert record.test.mean == pytest.approx(sum(scores) / 2)
    assert record.test.sd == pytest.approx(statistics.stdev(scores))
    assert Run(tmp_path / "seeds").read(Seeds) == record
    alone = train(short.model_copy(update={"seed": 2}), tmp_path / "alone")
    assert alone.results.weights_sha256 == results(tmp_path / "seeds" / "seed-2").weights_sha256

    # One seed more, after an interruption: what is finished is not touched, what is not is run.
    first = tmp_path / "seeds" / "seed-1" / "results.json"
    before = first.stat().st_mtime_ns
    (tmp_path / "seeds" / "seed-2" / "results.json").unlink()
    again = train_seeds(short, [1, 2, 3], tmp_path / "seeds")
    assert first.stat().st_mtime_ns == before
    assert [run.test for run in again.seeds][:2] == scores
    together = report([str(tmp_path / "seeds")])
    assert [system.name.rpartition("/")[2] for system in together.systems] == [
        "seed-1", "seed-2", "seed-3", "seeds, mean of 3 seeds",
    ]  # fmt: skip
    assert report_table(together).rows[-1][2] == f"{again.test.mean:.2f} ± {again.test.sd:.2f}"
    table = seeds_table(again)
    assert [row[0] for row in table.rows] == ["1", "2", "3", "mean ± standard deviation"]
    assert table.rows[-1][3] == f"{again.test.mean:.2f} ± {again.test.sd:.2f}"
    other = short.loss.model_copy(update={"temperature": 0.1})
    with pytest.raises(InputError, match="seed-1 holds a run of another recipe"):
        train_seeds(short.model_copy(update={"loss": other}), [1], tmp_path / "seeds")


def test_an_ablation_compares_runs_that_differ_in_one_key(short: Recipe, tmp_path: Path):
    record = ablate(short, ["hard-negatives"], [1, 2], tmp_path / "ablation")
    part = record.without["hard-negatives"]
    assert (part.key, part.value) == ("data.hard_negatives", False)
    gains = []
    for seed, pair in zip((1, 2), part.seeds, strict=True):
        folders = [tmp_path / "ablation" / kind / f"seed-{seed}" for kind in ("full", "without-hard-negatives")]
        recipes = [load_recipe(folder / "recipe.yaml").model_dump() for folder in folders]
        assert [recipe["data"].pop("hard_negatives") for recipe in recipes] == [True, False]
        names = [recipe.pop("name") for recipe in recipes]
        assert names == [f"tiny-seed-{seed}", f"tiny-without-hard-negatives-seed-{seed}"]
        assert recipes[0] == recipes[1]
        scores = [results(folder) for folder in folders]
        assert pair.difference["dev"] == scores[0].dev.spearman - scores[1].dev.spearman
        assert pair.difference["test"] == scores[0].test.spearman - scores[1].test.spearman
        gains.append(pair.difference["dev"])
        of_step = [
            {entry.step: entry.dev["spearman"] for entry in Run(folder).history() if entry.dev} for folder in folders
        ]
        assert pair.dev_difference_of_step == {step: of_step[0][step] - of_step[1][step] for step in (0, 2, 4)}
        assert pair.dev_difference_of_step[0] == 0
        assert pair.dev_difference_of_step[4] != 0
    assert part.difference["dev"].mean == pytest.approx(statistics.mean(gains))
    assert part.difference["dev"].sd == pytest.approx(statistics.stdev(gains))
    assert [step.step for step in part.steps] == [2, 4]
    systems = report([str(tmp_path / "ablation")]).systems
    assert [system.name.rpartition(", ")[2] for system in systems if system.spread] == ["mean of 2 seeds"] * 2
    kept, by_step = ablation_tables(record)
    assert [row[1] for row in kept.rows] == ["1", "2", "mean ± sd"]
    assert kept.rows[-1][6] == f"{statistics.mean(gains):+.2f} ± {statistics.stdev(gains):.2f}"
    assert [row[1] for row in by_step.rows] == ["2", "4"]


@pytest.mark.parametrize(
    ("without", "seeds", "message"),
    [
        (["hard-negative"], [1], "--without: no part 'hard-negative': did you mean 'hard-negatives'"),
        (["masking"], [1], "--without masking: tiny has loss.mask_false_negatives=False already"),
        ([], [1], "--without: name a part; known: 'hard-negatives'"),
        (["hard-negatives"], [], "--seeds: give different whole numbers from 0"),
        (["hard-negatives"], [1, 1], "--seeds: give different whole numbers from 0"),
    ],
)
def test_what_cannot_be_compared(without: list[str], seeds: list[int], message: str, short: Recipe, tmp_path: Path):
    with pytest.raises(InputError, match=message):
        ablate(short, without, seeds, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_runs_that_do_not_belong_together_are_not_summed_up(short: Recipe, tiny_data: Path, tmp_path: Path):
    for split in ("train.jsonl", "dev.csv", "test.csv"):
        shutil.copy(tiny_data / split, tmp_path / split)
    files = {"train": "train.jsonl", "dev": "dev.csv", "test": "test.csv"}
    data = short.data.model_copy(update={split: str(tmp_path / name) for split, name in files.items()})
    recipe, folder = short.model_copy(update={"data": data}), tmp_path / "seeds"
    train_seeds(recipe, [1], folder)
    rows = (tmp_path / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(rows[:24]) + "\n")
    with pytest.raises(InputError, match="the runs differ in prepared_sha256: the data have changed in between"):
        train_seeds(recipe, [1, 2], folder)
    # Weights that are not the ones that were scored.
    weights = folder / "seed-1" / "model" / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if "word_embeddings" in name)
    save_file({**tensors, name: tensors[name] * 2}, weights, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"seed-1/model/model.safetensors has changed since it was measured"):
        train_seeds(recipe, [1], folder)
    with pytest.raises(InputError, match="holds other things .*: choose another --output"):
        train_seeds(recipe, [1], tmp_path)


def test_all_is_checked_before_the_first_run(short: Recipe, tmp_path: Path):
    train(short.model_copy(update={"seed": 3, "name": "other"}), tmp_path / "seeds" / "seed-3")
    with pytest.raises(InputError, match="seed-3 holds a run of another recipe"):
        train_seeds(short, [1, 3], tmp_path / "seeds")
    assert [path.name for path in (tmp_path / "seeds").iterdir()] == ["seed-3"]
    with pytest.raises(InputError, match="model.shared_dropout_mask is about two views of one sentence"):
        ablate(short, ["second-dropout-mask"], [1], tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_several_gpus_need_a_launcher_and_no_more(short: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(InputError, match="2 GPUs without a launcher"):
        train_seeds(short, [1], tmp_path / "seeds")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(_plan({"": short}, [1, 2], tmp_path / "seeds", False)) == 2


def test_a_part_that_the_data_do_not_have_cannot_be_left_out(short: Recipe, tmp_path: Path):
    (tmp_path / "plain.jsonl").write_text("".join(f'{{"anchor": "a {i}", "positive": "b {i}"}}\n' for i in range(20)))
    data = short.data.model_copy(update={"train": str(tmp_path / "plain.jsonl")})
    with pytest.raises(InputError, match="--without hard-negatives: the data have no hard negatives"):
        ablate(short.model_copy(update={"data": data}), ["hard-negatives"], [1], tmp_path / "x")


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_part_is_a_key_of_the_recipe(name: str):
    section, key, value = ABLATIONS[name]
    assert getattr(getattr(load_recipe("quickstart"), section), key) is not None
    recipe = "snli-unsup" if name == "second-dropout-mask" else "snli-sup"
    changed = load_recipe(recipe, [f"{section}.{key}={json.dumps(value)}"])
    assert getattr(getattr(changed, section), key) == value


STSB = {"dev": (1500, 2.364), "test": (1379, 2.608)}


def fake_run(folder: Path, dev: float, test: float, data: dict = STSB, unsupervised: bool = False) -> Path:
    """A finished run, as far as a report reads it."""
    graded = {
        split: GradedFacts(
            sources=[], columns=[], pairs=size, scale=5, mean_gold=mean, pairs_sha256=f"{split}{size}{mean}"
        )
        for split, (size, mean) in data.items()
    }
    train = TrainFacts(
        sources=[], columns={}, rows_read=9, rows_usable=9, dropped={}, rule="", prepared_sha256="",
        **({"sentences": 9} if unsupervised else {"pairs": 9}),
    )  # fmt: skip
    results = Results(
        recipe="r", best_step=3, total_steps=9, base={"dev": 0, "test": 0}, weights_sha256="", files={}, modules=[],
        model_sha256=folder.name, train_seconds=1, sentences_per_second=1,
        dev=Scores(spearman=dev, pearson=0, n=data["dev"][0], alignment=0.25, uniformity=-2.5),
        test=Scores(spearman=test, pearson=0, n=data["test"][0]),
        batches=BatchFacts(
            batches=1, sentences=1, anchors=1, negatives=1, fewest_negatives=1, most_negatives=1, masked_cells=0
        ),
    )  # fmt: skip
    run = Run(folder)
    run.write(results)
    run.write(Manifest(train=train, **graded))
    (folder / "recipe.yaml").write_text("")
    run.model_path.mkdir()
    (run.model_path / "README.md").write_text("")
    return folder


def measured(name: str, sha256: str, tasks: Tasks) -> MeasuredModel:
    return MeasuredModel(
        name=name, model_sha256=sha256, modules=[], dimension=1, parameters=1, precision="float32", tasks=tasks
    )


def test_a_report_compares_like_with_like(tmp_path: Path):
    sup = fake_run(tmp_path / "sup", 82.05, 78.75)
    unsup = fake_run(tmp_path / "unsup", 76.92, 68.33, unsupervised=True)
    small = fake_run(tmp_path / "small", 60, 70, {"dev": (132, 2.5), "test": (132, 2.5)})
    same_size = fake_run(tmp_path / "same-size", 60, 70, {"dev": (1500, 1.9), "test": (1379, 1.9)})
    tasks = Tasks(**{
        split: Scores(spearman=score, pearson=0, n=size, pairs_sha256=f"{split}{size}{mean}", mean_gold=mean)
        for (split, (size, mean)), score in zip(STSB.items(), (59.31, 47.29), strict=True)
    })  # fmt: skip
    environment = Environment(python="", system="", packages={}, device="cpu", devices=1, threads=1, precision="")
    models = [measured("bert:mean", "b", tasks), measured("sup again", "sup", tasks)]
    evaluation = Evaluation(protocol="", data={}, models=models, environment=environment)
    Run(tmp_path).write(evaluation)
    record = report([str(sup), str(unsup), str(tmp_path / "evaluation.json")])
    names = [system.name for system in record.systems]
    assert names == [
        str(sup),
        str(unsup),
        "bert:mean",
        "paper, supervised BERT-base (reported)",
        "paper, unsupervised BERT-base (reported)",
    ]
    gaps = [(system.gap.dev, system.gap.test) for system in record.systems[:2]]
    assert gaps[0] == pytest.approx((82.05 - 86.20, 78.75 - 84.25))
    assert gaps[1] == pytest.approx((76.92 - 82.50, 68.33 - 76.85))
    assert record.systems[2].gap is None
    table = report_table(record)
    assert table.rows[0] == [str(sup), "82.05", "78.75", "0.250", "-2.500", "-4.15", "-5.50", "3 of 9", "r"]
    assert "dev n 1,500, test n 1,379" in table.title

    # A run on other data is not measured against the paper, and the table says which data.
    for other in (small, same_size):
        (system,) = report([str(other)]).systems
        assert system.gap is None
    mixed = report_table(report([str(sup), str(small)]))
    assert [row[1] for row in mixed.rows] == ["A", "B", "STS-B", "STS-B"]
    assert "A is dev n 1,500, test n 1,379; B is dev n 132, test n 132" in mixed.title
    with pytest.raises(InputError, match="nowhere: no results.json, seeds.json, ablation.json or evaluation.json"):
        report([str(tmp_path / "nowhere")])
    (unsup / "results.json").write_text("{}")
    with pytest.raises(InputError, match="unsup/results.json: not a record of this command: recipe: Field required"):
        report([str(unsup)])
    (sup / "results.json").write_text("{")
    with pytest.raises(InputError, match="sup/results.json: not a record of this command: Invalid JSON"):
        report([str(sup)])
