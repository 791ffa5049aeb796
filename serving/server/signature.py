"""One SignatureDef: from the tensors of a request to feeds and fetches."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import numpy as np
from tensorflow.core.framework import tensor_pb2
from tensorflow.core.protobuf import meta_graph_pb2

from tfkv.serving.server.call_error import internal, invalid_argument
from tfkv.serving.server.tensors import parse_tensor

_METHODS = (
    "tensorflow/serving/predict",
    "tensorflow/serving/classify",
    "tensorflow/serving/regress",
)


def _join(names: Iterable[str]) -> str:
    return ",".join(sorted(names))


class Signature:
    """Checks of TensorFlow Serving's `PreProcessPrediction`, with its texts.

    Args:
        definition: SignatureDef of the loaded MetaGraph.

    Example:
        >>> feeds = signature.feeds(request.inputs)
        >>> aliases, fetches = signature.fetches(tuple(request.output_filter))

    Reference:
        tensorflow_serving/servables/tensorflow/predict_util.cc,
        tensorflow/cc/saved_model/util.cc
    """

    def __init__(self, definition: meta_graph_pb2.SignatureDef) -> None:
        self.definition = definition
        self._inputs = {alias: definition.inputs[alias].name for alias in sorted(definition.inputs)}
        self._outputs = {
            alias: definition.outputs[alias].name for alias in sorted(definition.outputs)
        }
        self._defaults = {
            alias: parse_tensor(proto) for alias, proto in definition.defaults.items()
        }
        self.fetches = functools.lru_cache(maxsize=256)(self._find_fetches)

    def feeds(self, given: Mapping[str, tensor_pb2.TensorProto]) -> dict[str, np.ndarray]:
        """Tensor name to value, defaults included.

        Raises:
            CallError: An input is missing, extra, misnamed or cannot be parsed.
        """
        self._check_method()
        self._check_size(given)
        feeds, used = {}, 0
        for alias, feed_name in self._inputs.items():
            if alias in given:
                used += 1
                try:
                    feeds[feed_name] = parse_tensor(given[alias])
                except (ValueError, OverflowError, MemoryError) as error:
                    raise invalid_argument(f"tensor parsing error: {alias}") from error
            elif alias in self._defaults:
                feeds[feed_name] = self._defaults[alias]
            else:
                raise invalid_argument(
                    f"Signature input alias: {alias}(feed name: {feed_name}) not found in "
                    "request and no default value provided. Inputs expected to be in the "
                    f"request {{{_join(given)}}}, or default input alias set: "
                    f"{_join(self._defaults)}"
                )
        if used != len(given):
            raise invalid_argument(
                "Inputs contains invalid name. Used request inputs: "
                f"{_join(set(given) & set(self._inputs))}, request input: {_join(given)}"
            )
        return feeds

    def _find_fetches(
        self, output_filter: tuple[str, ...]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Aliases and tensor names to fetch; all of them for an empty filter.

        Raises:
            CallError: An alias is unknown or occurs twice.
        """
        if not output_filter:
            return tuple(self._outputs), tuple(self._outputs.values())
        seen = set()
        for alias in output_filter:
            if alias not in self._outputs:
                raise invalid_argument(
                    f"output tensor alias not found in signature: {alias} Outputs expected "
                    f"to be in the set {{{_join(self._outputs)}}}."
                )
            if alias in seen:
                raise invalid_argument(f"duplicate output tensor alias: {alias}")
            seen.add(alias)
        return output_filter, tuple(self._outputs[alias] for alias in output_filter)

    def _check_method(self) -> None:
        if self.definition.method_name not in _METHODS:
            raise internal(
                "Expected prediction signature method_name to be one of "
                f"{{{', '.join(_METHODS)}}}. Was: {self.definition.method_name}"
            )

    def _check_size(self, given: Mapping[str, tensor_pb2.TensorProto]) -> None:
        sent, expected = len(given), len(self._inputs)
        if sent == expected or (sent < expected and self._defaults):
            return
        names = set(given)
        raise invalid_argument(
            f"input size does not match signature: {sent}!={expected} len({{{_join(names)}}}) "
            f"!= len({{{_join(self._inputs)}}}). "
            f"Sent extra: {{{_join(names - set(self._inputs))}}}. "
            f"Missing but required: {{{_join(set(self._inputs) - names)}}}."
        )
