"""Pairs -> pairs with hard negatives that a model found."""
