"""Tiny bases with random weights, one of each architecture, that exist without a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers as hf
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_WORDS, _LONG = 300, 64
_BRACKETS = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
_ANGLES = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def tokenizer(
    special: list[str], *, wrapped: bool = True, named: bool = True, **names: str
) -> hf.PreTrainedTokenizerFast:
    """Bytes as words. ``special`` are begin, padding, end, unknown and mask, in the order of their ids."""
    bytes_ = Tokenizer(models.BPE())
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bytes_.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=_WORDS, special_tokens=special, initial_alphabet=alphabet)
    )
    begin, end = special[0], special[2] if len(special) > 2 else special[0]
    if wrapped:
        ids = [(token, bytes_.token_to_id(token)) for token in (begin, end)]
        bytes_.post_processor = processors.TemplateProcessing(single=f"{begin} $A {end}", special_tokens=ids)
    if named:
        roles = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
        names = {**dict(zip(roles, special, strict=True)), "bos_token": begin, "eos_token": end, **names}
    return hf.PreTrainedTokenizerFast(tokenizer_object=bytes_, **names)


def _save(folder: Path, model: hf.PreTrainedModel, words: hf.PreTrainedTokenizerFast) -> None:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)  # far enough from zero that sentences differ before training
    model.save_pretrained(folder)
    words.save_pretrained(folder)


def _bert(folder: Path) -> None:
    config = hf.BertConfig(vocab_size=_WORDS, max_position_embeddings=_LONG, pad_token_id=1, **_SIZES)
    _save(folder, hf.BertModel(config), tokenizer(_BRACKETS))


def _roberta(folder: Path, padding: int = 1) -> None:
    special = [token for token in _ANGLES if token != "<pad>"]
    special.insert(padding, "<pad>")
    named = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), _ANGLES, strict=True))
    words = tokenizer(["<s>", *special[1:]], wrapped=False, named=False, bos_token="<s>", eos_token="</s>", **named)
    ids = [(token, words.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    config = hf.RobertaConfig(
        vocab_size=_WORDS, max_position_embeddings=_LONG + 2, type_vocab_size=1, pad_token_id=padding, **_SIZES
    )
    _save(folder, hf.RobertaModel(config), words)


def _xlm_roberta(folder: Path) -> None:
    config = hf.XLMRobertaConfig(
        vocab_size=_WORDS, max_position_embeddings=_LONG + 2, type_vocab_size=1, pad_token_id=1, **_SIZES
    )
    _save(folder, hf.XLMRobertaModel(config), tokenizer(_ANGLES))


def _mpnet(folder: Path) -> None:
    config = hf.MPNetConfig(vocab_size=_WORDS, max_position_embeddings=_LONG + 2, pad_token_id=1, **_SIZES)
    _save(folder, hf.MPNetModel(config), tokenizer(_ANGLES))


def _distilbert(folder: Path) -> None:
    config = hf.DistilBertConfig(
        vocab_size=_WORDS, max_position_embeddings=_LONG, dim=32, n_layers=2, n_heads=2, hidden_dim=64, pad_token_id=1
    )
    _save(folder, hf.DistilBertModel(config), tokenizer(_BRACKETS))


def _albert(folder: Path) -> None:
    config = hf.AlbertConfig(
        vocab_size=_WORDS,
        max_position_embeddings=_LONG,
        embedding_size=16,
        pad_token_id=1,
        hidden_dropout_prob=0.1,
        **_SIZES,
    )
    _save(folder, hf.AlbertModel(config), tokenizer(_BRACKETS))


def _electra(folder: Path) -> None:
    config = hf.ElectraConfig(
        vocab_size=_WORDS, max_position_embeddings=_LONG, embedding_size=16, pad_token_id=1, **_SIZES
    )
    _save(folder, hf.ElectraModel(config), tokenizer(_BRACKETS))


def _deberta(folder: Path) -> None:
    config = hf.DebertaV2Config(
        vocab_size=_WORDS, max_position_embeddings=_LONG, relative_attention=True, pos_att_type=["p2c", "c2p"],
        type_vocab_size=0, pad_token_id=1, **_SIZES,
    )  # fmt: skip
    _save(folder, hf.DebertaV2Model(config), tokenizer(_BRACKETS))


def _modernbert(folder: Path) -> None:
    config = hf.ModernBertConfig(
        vocab_size=_WORDS, max_position_embeddings=_LONG, pad_token_id=1, cls_token_id=0, sep_token_id=2,
        bos_token_id=0, eos_token_id=2, local_attention=16, **_SIZES,
    )  # fmt: skip
    _save(folder, hf.ModernBertModel(config), tokenizer(_BRACKETS))


def _t5_config() -> hf.T5Config:
    return hf.T5Config(vocab_size=_WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, pad_token_id=1)


def _t5_words() -> hf.PreTrainedTokenizerFast:
    words = tokenizer(
        ["<x>", "<pad>", "</s>", "<unk>"],
        wrapped=False,
        named=False,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    return words


def _t5(folder: Path) -> None:
    _save(folder, hf.T5Model(_t5_config()), _t5_words())


def _t5_encoder(folder: Path) -> None:
    _save(folder, hf.T5EncoderModel(_t5_config()), _t5_words())


def _gpt2(folder: Path) -> None:
    config = hf.GPT2Config(
        vocab_size=_WORDS, n_embd=32, n_layer=2, n_head=2, n_positions=_LONG, bos_token_id=0, eos_token_id=0
    )
    end = {"bos_token": "<|end|>", "eos_token": "<|end|>", "unk_token": "<|end|>"}
    _save(folder, hf.GPT2Model(config), tokenizer(["<|end|>"], wrapped=False, named=False, **end))


def _qwen(folder: Path) -> None:
    config = hf.Qwen2Config(vocab_size=_WORDS, num_key_value_heads=2, max_position_embeddings=_LONG, **_SIZES)
    words = tokenizer(["<|pad|>", "<|end|>"], wrapped=False, named=False, pad_token="<|pad|>", eos_token="<|end|>")
    _save(folder, hf.Qwen2Model(config), words)


def _qwen_embedding(folder: Path) -> None:
    _qwen(folder / "bare")
    modules = [Transformer(str(folder / "bare")), Pooling(32, "lasttoken"), Normalize()]
    SentenceTransformer(modules=modules).save(str(folder), create_model_card=False)


def _dense_and_prompts(folder: Path) -> None:
    _xlm_roberta(folder / "bare")
    modules = [Transformer(str(folder / "bare")), Pooling(32, "mean"), Dense(32, 16)]
    prompts = {"query": "find: ", "document": "text: "}
    model = SentenceTransformer(modules=modules, prompts=prompts, default_prompt_name="query")
    model.save(str(folder), create_model_card=False)


# Of each, how it is made and how a recipe has to read it; None where that need not be said.
ARCHITECTURES: dict[str, tuple[Callable[[Path], None], str | None]] = {
    "bert": (_bert, None),
    "roberta": (_roberta, None),
    "roberta, padding 3": (lambda folder: _roberta(folder, 3), None),
    "xlm-roberta": (_xlm_roberta, None),
    "mpnet": (_mpnet, None),
    "distilbert": (_distilbert, None),
    "albert": (_albert, None),
    "electra": (_electra, None),
    "deberta": (_deberta, None),
    "modernbert": (_modernbert, None),
    "t5": (_t5, "mean"),
    "t5 encoder": (_t5_encoder, "mean"),
    "gpt2": (_gpt2, "mean"),
    "qwen": (_qwen, "lasttoken"),
    "qwen embedding": (_qwen_embedding, None),
    "dense and prompts": (_dense_and_prompts, None),
}


def make_base(name: str, folder: Path) -> Path:
    """The folder of a new base of this architecture."""
    folder.mkdir()
    torch.manual_seed(0)
    ARCHITECTURES[name][0](folder)
    return folder
