"""Language-model calls whose reply is a JSON object with lists in it, each item of which is judged by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dspy
from pydantic import BaseModel, ModelWrapValidatorHandler, PrivateAttr, model_validator

from dspy_combee.calls.lm_calls import LMCallResult, StrictJSONAdapter, UsageMeter, call_lm
from dspy_combee.records.errors import ProviderError
from dspy_combee.records.secrets import hide_own_secrets
from dspy_combee.records.types import Usage


class AsGiven(BaseModel):
    """An item of a reply: the prompt shows its schema, `given` is what came, be it valid or not."""

    _given: Any = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, handler: ModelWrapValidatorHandler[AsGiven]) -> AsGiven:
        made = cls.model_construct()
        made._given = value
        return made

    @property
    def given(self) -> Any:
        """The item as it stood in the reply."""
        return self._given


@dataclass(frozen=True)
class _Ask:
    """One call, ready to be made (and made again): a predictor and its inputs."""

    predictor: Any
    inputs: Mapping[str, Any]

    def __call__(self) -> Any:
        with dspy.context(adapter=StrictJSONAdapter()):
            return self.predictor(**self.inputs)


def ask(
    predictor: Any, inputs: Mapping[str, Any], lm: Any, types: Mapping[str, type], meter: UsageMeter
) -> LMCallResult:
    """Make one call, judged on the raw reply and made again once.

    Args:
        predictor: A `dspy.Predict`; the value of the result is its prediction.
        inputs: Its inputs, safe for a prompt (`text.as_data`).
        lm: The reflection LM.
        types: The fields that the reply must hold, and their types.
        meter: Takes what the call used.

    Raises:
        ProviderError: As in `call_lm`.
    """
    try:
        result = call_lm(_Ask(predictor, hide_own_secrets(dict(inputs))), lm, types)
    except ProviderError as error:
        meter.add(error.usage or Usage())
        raise
    meter.add(result.usage)
    return result
