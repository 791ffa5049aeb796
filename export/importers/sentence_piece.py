"""SentencePiece vocabularies as ``tokenizer.json`` of the ``tokenizers`` library."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Self

from tfkv.errors import ModelSourceError
from tfkv.export.importers.tokenizer_json import to_json

if TYPE_CHECKING:
    from tokenizers.models import Model
    from tokenizers.normalizers import Normalizer

#: Kinds of pieces, by the numbers that SentencePiece and GGUF give them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
#: Stands for a space.
_SPACE = "\u2581"
_UNIGRAM, _BPE = 1, 2


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of the vocabulary; its place in it is its id.

    Args:
        text: Its text, with a lower block for each space.
        score: Its logarithmic probability, or in BPE a number that falls with its rank.
        kind: ``NORMAL``, ``CONTROL`` and so on.
    """

    text: str
    score: float
    kind: int = NORMAL


@dataclasses.dataclass(frozen=True)
class SentencePieceVocabulary:
    """A vocabulary of SentencePiece, as read from a model file.

    Control pieces that stand in a text are parsed as one id, as chat templates need it;
    SentencePiece itself never does. In front of a text that follows one a space is put, too,
    where the vocabulary puts one in front of texts.

    Args:
        pieces: In the order of their ids.
        unigram: Whether a text is cut into the likeliest pieces; else pieces are merged, those
            with the highest score first (BPE).
        charsmap: How characters are normalised, compiled by SentencePiece.
        add_prefix_space: Whether a text gets a space in front.
        collapse_spaces: Whether spaces at both ends are taken off, and runs become one.
        bos: Text of a piece that ``encode(..., add_special_tokens=True)`` puts in front.

    Reference:
        Kudo and Richardson, https://arxiv.org/abs/1808.06226;
        https://github.com/google/sentencepiece
    """

    pieces: Sequence[Piece]
    unigram: bool = False
    charsmap: bytes = b""
    add_prefix_space: bool = True
    collapse_spaces: bool = False
    bos: str | None = None

    @classmethod
    def from_proto(cls, proto: bytes, bos: str | None = None) -> Self:
        """Reads a model of SentencePiece, serialised.

        Raises:
            ModelSourceError: It is none, or of words or characters.
        """
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2

        model = sentencepiece_model_pb2.ModelProto()
        try:
            model.ParseFromString(proto)
        except DecodeError as error:
            raise ModelSourceError(f"This is no SentencePiece model: {error}.") from error
        kind = model.trainer_spec.model_type
        if kind not in (_UNIGRAM, _BPE):
            raise ModelSourceError(
                "A SentencePiece model of words or of characters is not supported. Expected one "
                "of the kind UNIGRAM or BPE."
            )
        if model.trainer_spec.treat_whitespace_as_suffix:
            raise ModelSourceError(
                "A SentencePiece model with spaces behind words is not supported. Expected them "
                "in front."
            )
        rules = model.normalizer_spec
        return cls(
            [Piece(piece.piece, piece.score, piece.type) for piece in model.pieces],
            unigram=kind == _UNIGRAM,
            charsmap=rules.precompiled_charsmap,
            add_prefix_space=rules.add_dummy_prefix,
            collapse_spaces=rules.remove_extra_whitespaces,
            bos=bos,
        )

    def to_tokenizer_json(self) -> str:
        """The vocabulary as text of a ``tokenizer.json``.

        Raises:
            ModelSourceError: Two pieces have the same text, or none stands for what is unknown.
        """
        import tokenizers
        from tokenizers import decoders

        ids = {piece.text: index for index, piece in enumerate(self.pieces)}
        if len(ids) != len(self.pieces):
            raise ModelSourceError(
                f"The vocabulary has {len(self.pieces)} pieces, of which {len(ids)} are distinct. "
                "Expected all to be."
            )
        tokenizer = tokenizers.Tokenizer(self._model(ids))
        tokenizer.normalizer = self._normalizer()
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self.add_prefix_space:
            steps.append(decoders.Strip(" ", 1, 0))
        tokenizer.decoder = decoders.Sequence(steps)
        special = self._texts(UNKNOWN, CONTROL)
        return to_json(tokenizer, ids, special, self._texts(USER_DEFINED), self.bos)

    def _texts(self, *kinds: int) -> list[str]:
        return [piece.text for piece in self.pieces if piece.kind in kinds]

    def _model(self, ids: dict[str, int]) -> Model:
        from tokenizers import models

        unknown = [index for index, piece in enumerate(self.pieces) if piece.kind == UNKNOWN]
        if not unknown:
            raise ModelSourceError("The vocabulary has no piece for what is unknown.")
        by_bytes = any(piece.kind == BYTE for piece in self.pieces)
        if self.unigram:
            scored = [(piece.text, piece.score) for piece in self.pieces]
            return models.Unigram(scored, unk_id=unknown[0], byte_fallback=by_bytes)
        return models.BPE(
            vocab=ids,
            merges=list(self._merges(ids)),
            unk_token=self.pieces[unknown[0]].text,
            fuse_unk=True,
            byte_fallback=by_bytes,
        )

    def _merges(self, ids: dict[str, int]) -> Iterator[tuple[str, str]]:
        """Pairs of pieces that make a third, those of the highest score first."""
        order = sorted(
            (piece for piece in self.pieces if piece.kind == NORMAL),
            key=lambda piece: -piece.score,
        )
        mergeable = {piece.text for piece in order}
        for piece in order:
            pairs = [(piece.text[:at], piece.text[at:]) for at in range(1, len(piece.text))]
            known = [pair for pair in pairs if mergeable.issuperset(pair)]
            yield from sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))

    def _normalizer(self) -> Normalizer:
        from tokenizers import Regex, normalizers

        steps: list[Normalizer] = []
        if self.charsmap:
            steps.append(normalizers.Precompiled(self.charsmap))
        if self.collapse_spaces:
            steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        if self.add_prefix_space:
            steps.append(normalizers.Prepend(_SPACE))
        return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
