"""How to cite what a model is made of."""

from __future__ import annotations

_SIMCSE = """@inproceedings{gao-etal-2021-simcse,
    title = "{S}im{CSE}: Simple Contrastive Learning of Sentence Embeddings",
    author = "Gao, Tianyu and Yao, Xingcheng and Chen, Danqi",
    booktitle = "Proceedings of the 2021 Conference on Empirical Methods in Natural Language Processing",
    year = "2021",
    url = "https://aclanthology.org/2021.emnlp-main.552",
}"""
_SENTENCE_TRANSFORMERS = """@inproceedings{reimers-gurevych-2019-sentence,
    title = "Sentence-{BERT}: Sentence Embeddings using {S}iamese {BERT}-Networks",
    author = "Reimers, Nils and Gurevych, Iryna",
    booktitle = "Proceedings of the 2019 Conference on Empirical Methods in Natural Language Processing",
    year = "2019",
    url = "https://aclanthology.org/D19-1410",
}"""
_SNLI = """@inproceedings{bowman-etal-2015-large,
    title = "A large annotated corpus for learning natural language inference",
    author = "Bowman, Samuel R. and Angeli, Gabor and Potts, Christopher and Manning, Christopher D.",
    booktitle = "Proceedings of the 2015 Conference on Empirical Methods in Natural Language Processing",
    year = "2015",
    url = "https://aclanthology.org/D15-1075",
}"""
_MULTINLI = """@inproceedings{williams-etal-2018-broad,
    title = "A Broad-Coverage Challenge Corpus for Sentence Understanding through Inference",
    author = "Williams, Adina and Nangia, Nikita and Bowman, Samuel",
    booktitle = "Proceedings of the 2018 Conference of the North American Chapter of the Association for Computational Linguistics: Human Language Technologies",
    year = "2018",
    url = "https://aclanthology.org/N18-1101",
}"""  # noqa: E501
_STSB = """@inproceedings{cer-etal-2017-semeval,
    title = "{S}em{E}val-2017 Task 1: Semantic Textual Similarity Multilingual and Crosslingual Focused Evaluation",
    author = "Cer, Daniel and Diab, Mona and Agirre, Eneko and Lopez-Gazpio, I{\\~n}igo and Specia, Lucia",
    booktitle = "Proceedings of the 11th International Workshop on Semantic Evaluation",
    year = "2017",
    url = "https://aclanthology.org/S17-2001",
}"""
# By a part of a data set's name.
_DATASETS = {
    "snli": (_SNLI,),
    "multi_nli": (_MULTINLI,),
    "mnli": (_MULTINLI,),
    "all-nli": (_SNLI, _MULTINLI),
    "nli-for-simcse": (_SNLI, _MULTINLI),
    "nli_for_simcse": (_SNLI, _MULTINLI),
    "stsb": (_STSB,),
}


def citations(datasets: list[str]) -> list[str]:
    """BibTeX entries: of the method, of the library, and of the data sets that are known.

    Args:
        datasets: Names of data sets; STS-B goes by ``stsb``.
    """
    found = [entry for name in datasets for part, entries in _DATASETS.items() if part in name for entry in entries]
    return list(dict.fromkeys([_SIMCSE, _SENTENCE_TRANSFORMERS, *found]))
