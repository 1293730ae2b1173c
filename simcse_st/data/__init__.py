"""From what users hold (files, hub data sets) to what training and evaluation take, with the facts about it."""

from simcse_st.data.pairs import NLIRule, load_pairs
from simcse_st.data.prepared import TrainingData, truncation
from simcse_st.data.rows import file_sha256
from simcse_st.data.sentences import load_sentences
from simcse_st.data.sources import Source
from simcse_st.data.sts import GradedPairs, load_graded_pairs
from simcse_st.data.table import Reading

__all__ = [
    "GradedPairs",
    "NLIRule",
    "Reading",
    "Source",
    "TrainingData",
    "file_sha256",
    "load_graded_pairs",
    "load_pairs",
    "load_sentences",
    "truncation",
]
