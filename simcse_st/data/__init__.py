"""From what users hold (files, Hub datasets) to what training and evaluation take, with the facts about it."""

from simcse_st.data.held_out import HeldOut, RetrievalSet, load_held_out
from simcse_st.data.sts import GradedPairs, load_graded_pairs
from simcse_st.data.training import TrainingData, load_training_data

__all__ = [
    "GradedPairs",
    "HeldOut",
    "RetrievalSet",
    "TrainingData",
    "load_graded_pairs",
    "load_held_out",
    "load_training_data",
]
