"""What an installation carries."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

from simcse_st.recipes import shipped_recipes


def test_recipes_data_and_card_template_are_installed():
    for package, name in (
        ("simcse_st.recipes", "quickstart.yaml"),
        ("simcse_st.data", "quickstart/train.jsonl"),
        ("simcse_st.data", "quickstart/README.md"),
        ("simcse_st.model_card", "template.md.jinja"),
        ("simcse_st.model_card", "citations.bib"),
        ("simcse_st", "py.typed"),
    ):
        assert resources.files(package).joinpath(name).is_file(), (package, name)


def test_a_checkout_finds_its_own_template():
    # Started there, Python imports the package out of the working directory and not the installed one.
    program = "import simcse_st.card as card; print(card.__file__); assert 'recipe' in card.load_template()"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(root / "simcse_st" / "card.py")


def test_metadata():
    package = metadata.metadata("simcse-st")
    assert package["License-Expression"] == "Apache-2.0"
    assert package["Requires-Python"] == ">=3.10"
    assert {"quickstart", "plot", "test", "dev"} <= set(package.get_all("Provides-Extra"))


def test_the_readme_lists_every_recipe():
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `([\w-]+)` \|", readme.split("## Recipes")[1].split("## Data")[0], flags=re.M)
    assert sorted(table) == list(shipped_recipes())
