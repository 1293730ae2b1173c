"""From what users hold (files, Hub datasets) to what training and evaluation take, with the facts about it."""

from simcse_st.data.sts import GradedPairs, load_graded_pairs
from simcse_st.data.training import TrainingData, load_training_data

__all__ = ["GradedPairs", "TrainingData", "load_graded_pairs", "load_training_data"]
