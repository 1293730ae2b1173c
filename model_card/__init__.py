"""The model card template and its rendered example."""
