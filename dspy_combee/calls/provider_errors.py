"""What an error of a language model's provider means: whether it is the prompt's doing, and whether it may pass."""

from __future__ import annotations

import json

from dspy.utils.exceptions import (
    LMAuthError,
    LMBillingError,
    LMConfigurationError,
    LMInvalidRequestError,
    LMProviderError,
    LMServerError,
    LMUnsupportedModelError,
    is_retryable_lm_error,
)

# Errors that no second attempt can mend and that say nothing about the prompt.
FATAL_ERRORS = (LMAuthError, LMBillingError, LMConfigurationError, LMUnsupportedModelError)

# The HTTP statuses of a provider that is down or overloaded.
_UNAVAILABLE = {502, 503, 504, 529}


def is_refusal(error: BaseException) -> bool:
    """Whether the provider refuses whatever the prompt is: a key, a bill, an address or a model's name is wrong."""
    # DSPy's own engine makes an invalid request of HTTP 404, LiteLLM's an unknown model.
    return isinstance(error, FATAL_ERRORS) or (isinstance(error, LMInvalidRequestError) and error.status == 404)


def is_outage(error: BaseException) -> bool:
    """Whether the provider is down, overloaded or out of reach, or something else answers in its place."""
    if type(error) is LMProviderError:  # The page of a proxy, for example; to LiteLLM's engine it is a server error.
        return error.__cause__ is not None and isinstance(
            error.__cause__.__cause__, json.JSONDecodeError | UnicodeDecodeError
        )
    return isinstance(error, Exception) and is_retryable_lm_error(error)


def may_pass(failure: Exception) -> bool:
    """Whether an error of a reflection call says nothing about the prompt and may pass.

    Not every outage: a server error (500) may be the prompt's doing. Here it fails one call of a tree, which does
    without; in a rollout it would blame the candidate.
    """
    if not isinstance(failure, LMServerError):
        return is_retryable_lm_error(failure)
    cause: BaseException | None = failure
    while cause is not None:
        if type(cause).__name__ == "APIConnectionError":
            return True  # LiteLLM makes a server error of a connection that failed.
        cause = cause.__cause__ or cause.__context__
    return failure.status in _UNAVAILABLE
