"""Tell what an error of a language model's provider means: is it the prompt's doing, and may it pass?"""

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

# Errors that a retry cannot fix and that say nothing about the prompt.
FATAL_ERRORS = (LMAuthError, LMBillingError, LMConfigurationError, LMUnsupportedModelError)

# HTTP statuses of a provider that is down or overloaded.
_UNAVAILABLE = {502, 503, 504, 529}


def is_refusal(error: BaseException) -> bool:
    """Return whether the provider refuses every prompt: a key, a bill, an address or a model's name is wrong."""
    # DSPy's own engine reports HTTP 404 as an invalid request, LiteLLM's as an unknown model.
    return isinstance(error, FATAL_ERRORS) or (isinstance(error, LMInvalidRequestError) and error.status == 404)


def is_outage(error: BaseException) -> bool:
    """Return whether the provider is down, overloaded or unreachable, or something else answers in its place."""
    if type(error) is LMProviderError:  # A proxy's page, for example; LiteLLM's engine reports a server error.
        return error.__cause__ is not None and isinstance(
            error.__cause__.__cause__, json.JSONDecodeError | UnicodeDecodeError
        )
    return isinstance(error, Exception) and is_retryable_lm_error(error)


def may_pass(failure: Exception) -> bool:
    """Return whether an error of a reflection call says nothing about the prompt and may pass.

    This is narrower than `is_outage`: a server error (500) may be the prompt's doing. Here it fails one call of a
    tree, which does without that call; in a rollout it would be blamed on the candidate.
    """
    if not isinstance(failure, LMServerError):
        return is_retryable_lm_error(failure)
    cause: BaseException | None = failure
    while cause is not None:
        if type(cause).__name__ == "APIConnectionError":
            return True  # LiteLLM reports a failed connection as a server error.
        cause = cause.__cause__ or cause.__context__
    return failure.status in _UNAVAILABLE
