"""The masked-language-model term, which the paper offers as an option beside the contrastive loss."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling

logger = logging.getLogger(__name__)


class MaskedLanguageModel(nn.Module):
    """Predicts masked tokens of a batch with the encoder that is being trained.

    The prediction head comes from the encoder's own checkpoint; where that has none, it starts from random weights,
    which is logged. The term is computed in one forward pass of the whole batch, in the encoder's own precision.

    Args:
        model: The model whose encoder is shared.
        probability: The share of tokens to predict; of these 80% are masked, 10% replaced and 10% kept, as in BERT.

    Raises:
        ValueError: The tokenizer has no mask token, or the encoder no such head.
    """

    def __init__(self, model: SentenceTransformer, probability: float = 0.15) -> None:
        super().__init__()
        if model.tokenizer.mask_token is None:
            raise ValueError("mlm_weight needs a tokenizer with a mask token, which the model's has not")
        encoder: Any = model[0].auto_model
        revision = getattr(encoder.config, "_commit_hash", None)  # that of the encoder, if it came from the hub
        try:
            self.lm, loading = AutoModelForMaskedLM.from_pretrained(
                encoder.name_or_path, output_loading_info=True, dtype=encoder.dtype, revision=revision
            )
        except ValueError:
            raise ValueError(f"mlm_weight: {type(encoder).__name__} has no masked-language-model head") from None
        missing = [key for key in loading["missing_keys"] if not key.startswith(self.lm.base_model_prefix)]
        if missing:
            logger.warning("%s has no masked-language-model head: it starts from random weights", encoder.name_or_path)
        setattr(self.lm, self.lm.base_model_prefix, encoder)
        self.lm.tie_weights()  # to the shared encoder's word embeddings
        self.lm.to(encoder.device)
        self._mask = DataCollatorForLanguageModeling(model.tokenizer, mlm_probability=probability).torch_mask_tokens

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        """The mean cross-entropy over the predicted tokens, in float32.

        Args:
            features: ``input_ids``, ``attention_mask`` and the like, shape ``(sentences, tokens)``.
        """
        ids = features["input_ids"]
        masked, labels = (tensor.to(ids.device) for tensor in self._mask(ids.cpu().clone()))
        inputs = {name: features[name] for name in ("attention_mask", "token_type_ids") if name in features}
        logits = self.lm(input_ids=masked, **inputs).logits
        predicted = labels != -100
        if not predicted.any():
            return logits.sum() * 0.0
        with torch.autocast(ids.device.type, enabled=False):
            return F.cross_entropy(logits[predicted].float(), labels[predicted])
