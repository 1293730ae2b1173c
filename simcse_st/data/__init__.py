"""From what users hold (files, hub data sets) to what training and evaluation take, with the facts about it."""

from simcse_st.data.pairs import Pairs, load_pairs, truncation
from simcse_st.data.sentences import Sentences, load_sentences
from simcse_st.data.sources import Source, file_sha256
from simcse_st.data.sts import GradedPairs, load_graded_pairs

__all__ = [
    "GradedPairs",
    "Pairs",
    "Sentences",
    "Source",
    "file_sha256",
    "load_graded_pairs",
    "load_pairs",
    "load_sentences",
    "truncation",
]
