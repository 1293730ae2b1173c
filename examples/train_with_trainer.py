"""SimCSELoss and SimCSECollator in a plain Sentence Transformers script.

Run it as ``python examples/train_with_trainer.py [MODEL] [OUTPUT]``.
"""

import sys

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)

from simcse_st import SimCSECollator, SimCSELoss

base = sys.argv[1] if len(sys.argv) > 1 else "sentence-transformers/all-MiniLM-L6-v2"
output = sys.argv[2] if len(sys.argv) > 2 else "simcse-example"

# Two hard negatives, one, none: nothing is put in the place of those that are missing.
rows = [
    {
        "anchor": "The train to Aldmoor leaves at nine.",
        "positive": "A nine o'clock train goes to Aldmoor.",
        "negative": ["The train from Aldmoor arrives at nine.", "The train to Aldmoor leaves at ten."],
    },
    {
        "anchor": "Nobody in the office speaks Greek.",
        "positive": "There is no Greek speaker among the staff.",
        "negative": ["Everybody in the office speaks Greek."],
    },
    {"anchor": "How do I descale a kettle?", "positive": "What removes limescale from a kettle?", "negative": None},
    {"anchor": "It rained all week.", "positive": "We had seven days of rain.", "negative": []},
]
columns = {name: [row[name] for row in rows] for name in ("anchor", "positive")}
columns["negative"] = [row["negative"] or [] for row in rows]  # a column of Arrow has one type: a list of strings

model = SentenceTransformer(base)
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        output_dir=output, per_device_train_batch_size=4, num_train_epochs=5, learning_rate=5e-5, report_to="none"
    ),
    train_dataset=Dataset.from_dict(columns),
    loss=SimCSELoss(model, temperature=0.05),
    data_collator=SimCSECollator(model.preprocess, max_length=32),
)
trainer.train()
model.save_pretrained(output)
