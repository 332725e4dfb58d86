"""Secrets: what looks like one, or is known as one, becomes `[redacted]`.

Texts that go into logs, records and reports pass through `shorten` or `hide_secrets`, which also hide the keys that
a run was given (`keeping_secret`).

What counts as a secret (`redact` goes by the look of the text, `redact_data` by the keys of mappings too, and then
replaces all texts in a list or a mapping under such a name):

- **Keys of providers**, by their prefix: OpenAI, Anthropic, OpenRouter, DeepSeek and Langfuse (`sk-...`, with a
  digit and 20 characters or more), Google (`AIza...`, `ya29....`, `GOCSPX-...`), AWS (`AKIA...`, `ASIA...`), GitHub
  (`ghp_...`, `github_pat_...` and their kin), GitLab (`glpat-...`), Hugging Face (`hf_...`), Slack (`xoxb-...`,
  `xapp-...`), Stripe (`sk_live_...`, `whsec_...`), Groq (`gsk_...`), xAI (`xai-...`), NVIDIA (`nvapi-...`), Replicate
  (`r8_...`), Perplexity (`pplx-...`), Tavily (`tvly-...`), LangSmith (`lsv2_...`), npm (`npm_...`), PyPI
  (`pypi-AgE...`), SendGrid (`SG....`), Databricks (`dapi...`), DigitalOcean (`dop_v1_...`).
- **JSON web tokens**: `eyJ....eyJ....signature`.
- **Private key blocks**: `-----BEGIN ... PRIVATE KEY-----` to its end, or to the last line of base64 when it is cut.
- **Credentials in URLs**: the password of `scheme://user:password@host`, a long user name without a password.
- **HTTP authorization**: what follows `Authorization: Bearer` (`Basic`, `Token`, `Bot`), and `Bearer` alone when a
  value with a digit, or of 24 characters or more, follows.
- **Named values**: what is assigned with `=` or `:` to a name that ends in password, passwd, passphrase, pwd, secret,
  api key, access key, secret key, private key, account key, access token, auth token, refresh token, client secret
  (in any case, with `_`, `-` or a blank between the words, quoted or not, as in `"api_key": "..."`,
  `DB_PASSWORD=...`, `"passwords": ["...", "..."]`), and after an option such as `--password`. A name that ends in
  `token` counts when the value has 16 characters or more, with a letter and a digit. Left alone are values that name
  a secret and are none: placeholders (`<key>`, `${KEY}`, `****`, `None`, `required`), paths, expressions of code
  (`os.environ[...]`, `self.password`, `password=password`), and, unless a lone `=` stands between, bare words without
  a digit or a sign (prose).

Hashes, UUIDs, base64 images, paths and code have none of these looks and stay. A secret without a known look is not
found: name it in `extra_secrets`.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from dspy_combee.records.text import text_of

REDACTED = "[redacted]"

# A literal, which is fast to search for, and the pattern to try if the text holds it. Every repetition, here and
# below, follows a literal or is bounded, so that no text takes time quadratic in its length.
_KEYS: tuple[tuple[str, str], ...] = (
    ("sk-", r"sk-(?=[A-Za-z_-]{0,200}[0-9])[A-Za-z0-9_-]{20,}"),
    ("AIza", r"AIza[\w-]{35}"),
    ("ya29.", r"ya29\.[\w-]{20,}"),
    ("GOCSPX-", r"GOCSPX-[\w-]{20,}"),
    ("AKIA", r"AKIA[0-9A-Z]{16}(?![0-9A-Za-z+/])"),
    ("ASIA", r"ASIA[0-9A-Z]{16}(?![0-9A-Za-z+/])"),
    *((f"gh{kind}_", rf"gh{kind}_[A-Za-z0-9]{{36,}}") for kind in "opsur"),
    ("github_pat_", r"github_pat_\w{22,}"),
    ("glpat-", r"glpat-[\w-]{20,}"),
    ("hf_", r"hf_[A-Za-z0-9]{30,}"),
    ("xox", r"xox[abeoprs]-[\w-]{10,}"),
    ("xapp-", r"xapp-[\w-]{20,}"),
    ("k_live_", r"[prs]k_live_[A-Za-z0-9]{10,}"),
    ("k_test_", r"[prs]k_test_[A-Za-z0-9]{10,}"),
    ("whsec_", r"whsec_[A-Za-z0-9+/=]{24,}"),
    ("gsk_", r"gsk_[A-Za-z0-9]{40,}"),
    ("xai-", r"xai-[A-Za-z0-9]{40,}"),
    ("nvapi-", r"nvapi-[\w-]{40,}"),
    ("r8_", r"r8_[A-Za-z0-9]{30,}"),
    ("pplx-", r"pplx-[A-Za-z0-9]{40,}"),
    ("tvly-", r"tvly-[\w-]{20,}"),
    ("lsv2_", r"lsv2_[a-z]{2}_[0-9a-f]{32}_[0-9a-f]{10}"),
    ("npm_", r"npm_[A-Za-z0-9]{36}"),
    ("pypi-AgE", r"pypi-AgE[\w-]{50,}"),
    ("SG.", r"SG\.[\w-]{22}\.[\w-]{43}"),
    ("dapi", r"dapi[0-9a-f]{32}"),
    ("dop_v1_", r"dop_v1_[0-9a-f]{64}"),
    ("eyJ", r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"),
)
# Part of a longer word (a name in snake case, a stretch of base64) is no key.
_NOT_IN_A_WORD = r"(?<![A-Za-z0-9_+-])"

_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:(?:(?!-----BEGIN)[\s\S]){0,20000}?-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
    r"|(?:(?:\\r|\\n|\s){1,4}[A-Za-z0-9+/=]{32,})+)"
)
_URL_PASSWORD = re.compile(r"""(://[^\s/:@"'<>]{0,256}:)([^\s/@"'<>]{1,256})(?=@)""")
_URL_TOKEN = re.compile(r"(://)([A-Za-z0-9_-]{20,256})(?=@)")
_AUTHORIZATION = re.compile(
    r"""(authorization\\?["']?\s{0,4}[:=]\s{0,4}\\?["']?(?:basic|bearer|token|bot)\s{1,4})([^\s"'\\,;]{4,})""",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(?<![\w-])(bearer\s{1,4})([\w.~+/=-]{8,})", re.IGNORECASE)

_NAMES = (
    r"pass(?:word|wd|phrase)|pwd|secret|(?:api|access|secret|private|account)[ _-]?key"
    r"|(?:access|auth|refresh)[_-]?token"
)
_QUOTED = (
    r'"(?:\\.|[^"\\\n]){1,1000}"'
    r"|'(?:\\.|[^'\\\n]){1,1000}'"
    r'|\\"(?:(?!\\").){1,1000}\\"'
)
_VALUE = _QUOTED + r"""|[^\s"'`,;&|<>\\]{1,1000}"""
# `password=`, `"api_key": `, `\"secret\":`, `PASSWORD := `; not `==`.
_NAMED = re.compile(
    rf"""((?:{_NAMES}|(?P<token>token))[0-9]?\\?["'`]?)([ \t]{{0,4}}(?::=|=>|[:=])(?![:=])[ \t]{{0,4}})({_VALUE})""",
    re.IGNORECASE,
)
# `"passwords": ["...", "..."]`
_LISTED = re.compile(
    rf"""((?:{_NAMES})[s0-9]?\\?["'][ \t]{{0,4}}:[ \t]{{0,4}}\[\s{{0,20}})"""
    rf"((?:{_QUOTED})(?:\s{{0,20}},\s{{0,20}}(?:{_QUOTED})){{0,50}})",
    re.IGNORECASE,
)
_ITEM = re.compile(_QUOTED)
_OPTION = re.compile(rf"(--(?:[a-z]{{1,20}}-){{0,3}}(?:{_NAMES}|token)[ \t]{{1,4}})({_VALUE})", re.IGNORECASE)
# Of data; there the plural names a list or an object of them.
_SECRET_NAME = re.compile(rf"(?:^|[^A-Za-z]|(?<=[a-z])(?=[A-Z]))(?:{_NAMES})[s0-9]?$", re.IGNORECASE)
_TOKEN_NAME = re.compile(r"token[0-9]?$", re.IGNORECASE)

_NO_VALUES = re.compile(
    "none|null|nil|undefined|true|false|yes|str|string|bytes|text|any|optional|required|missing|empty|unset|default|"
    "changeme|placeholder|redacted|invalid|hidden|masked",
    re.IGNORECASE,
)
_MASK = frozenset("*.xX#_•-")
_STARTS_NO_VALUE = ("$", "<", "{", "[", "(", "%", "/", "./", "../", "~", "@", REDACTED)
_CODE = re.compile(r"[A-Za-z_]\w*(?:(?:\.|::|->)[A-Za-z_]\w*)*(?:[(\[{].*)?")
_CLOSING = re.compile(r"[)\]}]+[:.]?$")
_NAMES_A_SECRET = re.compile(r"passw|pwd|passphrase|secret|token|key|credential", re.IGNORECASE)


def _is_value(value: str, shortest: int = 4) -> bool:
    """Tell a value from a placeholder, a path or a mask."""
    if len(value) < shortest or value.startswith(_STARTS_NO_VALUE) or _NO_VALUES.fullmatch(value.rstrip(".!?")):
        return False
    return not set(value) <= _MASK


def _is_any_value(value: str) -> bool:
    return _is_value(value, shortest=1)


def _is_token(value: str) -> bool:
    return len(value) >= 16 and value.isprintable() and " " not in value and _has_digit_and_letter(value)


def _has_digit_and_letter(value: str) -> bool:
    return any(c.isdigit() for c in value) and any(c.isalpha() for c in value)


def _is_bare_secret(value: str, assigned_tightly: bool) -> bool:
    """Tell a secret from an expression, a word or a type in a value without quotes."""
    if not _is_value(value):
        return False
    if not _CODE.fullmatch(value):
        return True
    if not value.replace("_", "").isalnum():
        return False  # `os.environ[...]`, `self.password`, `get_password()`
    if any(c.isdigit() for c in value):
        return not _NAMES_A_SECRET.search(value)  # `hunter2`, but not `password2`
    return assigned_tightly and not _NAMES_A_SECRET.search(value)


def _redact_named(match: re.Match[str]) -> str:
    name, between, value = match.group(1), match.group(3), match.group(4)
    quote = _quote_of(value)
    if quote:
        return name + between + _redact_quoted(value, quote, _is_token if match.group("token") else _is_any_value)
    value = _CLOSING.sub("", value)
    rest = match.group(4)[len(value) :]
    tight = between == "="
    found = _is_bare_secret(value, tight) and (not match.group("token") or _is_token(value))
    return f"{name}{between}{REDACTED}{rest}" if found else match.group()


def _quote_of(value: str) -> str:
    quotes = ('\\"', '"', "'")
    return next((q for q in quotes if value.startswith(q) and value.endswith(q) and len(value) > 2 * len(q)), "")


def _redact_quoted(value: str, quote: str, is_secret: Callable[[str], bool]) -> str:
    return quote + REDACTED + quote if is_secret(value[len(quote) : -len(quote)]) else value


def _redact_listed(match: re.Match[str]) -> str:
    return match.group(1) + _ITEM.sub(
        lambda item: _redact_quoted(item.group(), _quote_of(item.group()), _is_any_value), match.group(2)
    )


def _redact_option(match: re.Match[str]) -> str:
    value = match.group(2).strip("\\\"'")
    if value.startswith("-") or not _is_bare_secret(value, assigned_tightly=False):
        return match.group()
    return match.group(1) + REDACTED


def _redact_second(match: re.Match[str]) -> str:
    if not _is_value(match.group(2), shortest=1):
        return match.group()
    return match.group(1) + REDACTED


def _redact_bearer(match: re.Match[str]) -> str:
    value = match.group(2)
    if len(value) < 24 and not any(c.isdigit() for c in value):
        return match.group()
    return match.group(1) + REDACTED


_KEY_PATTERNS = tuple((hint, re.compile(_NOT_IN_A_WORD + pattern, re.ASCII)) for hint, pattern in _KEYS)
# Literals, one of which the lower-cased text holds wherever the pattern matches.
_PATTERNS: tuple[tuple[tuple[str, ...], re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (("private key",), _KEY_BLOCK, lambda match: REDACTED),
    (("://",), _URL_PASSWORD, _redact_second),
    (("://",), _URL_TOKEN, _redact_second),
    (("authorization",), _AUTHORIZATION, _redact_second),
    (("bearer",), _BEARER, _redact_bearer),
    (("pass", "pwd", "secret", "key", "token"), _NAMED, _redact_named),
    (("pass", "pwd", "secret", "key", "token"), _LISTED, _redact_listed),
    (("--",), _OPTION, _redact_option),
)


def redact(text: str, extra_secrets: Iterable[str] = ()) -> str:
    """Replace everything in `text` that looks like a secret by `[redacted]`.

    What counts as one is listed at the top of this module. Redacting twice changes nothing more.

    Args:
        text: Any text.
        extra_secrets: Secrets to replace whatever they look like; blank ones are ignored.

    Raises:
        TypeError: If `extra_secrets` is one text instead of several.
    """
    for secret in _checked(extra_secrets):
        text = text.replace(secret, REDACTED)
    for hint, pattern in _KEY_PATTERNS:
        if hint in text:
            text = pattern.sub(REDACTED, text)
    lowered = text.lower()
    for hints, pattern, replacement in _PATTERNS:
        if any(hint in lowered for hint in hints):
            text = pattern.sub(replacement, text)
    return text


def redact_data(value: Any, extra_secrets: Iterable[str] = ()) -> Any:
    """Redact every text in `value`, and replace the texts under a secret's name, however deep.

    Mappings become dicts, lists and tuples keep their type; any other object is passed by reference.

    Args:
        value: Plain data, as parsed from JSON.
        extra_secrets: As in `redact`.
    """
    return _redact_value(value, _checked(extra_secrets), None)


def _redact_value(value: Any, secrets: tuple[str, ...], is_secret: Callable[[str], bool] | None) -> Any:
    if isinstance(value, str):
        return REDACTED if is_secret is not None and is_secret(value) else redact(value, secrets)
    if isinstance(value, Mapping):
        return {
            redact(key, secrets) if isinstance(key, str) else key: _redact_value(item, secrets, _rule(key, is_secret))
            for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(_redact_value(item, secrets, is_secret) for item in value)
    return value


def _rule(key: Any, above: Callable[[str], bool] | None) -> Callable[[str], bool] | None:
    """Choose the rule for texts under `key`: its own or the one `above`, whichever is stricter."""
    if above is _is_any_value or not isinstance(key, str):
        return above
    if _SECRET_NAME.search(key):
        return _is_any_value
    return _is_token if _TOKEN_NAME.search(key) else above


def _checked(secrets: Iterable[str]) -> tuple[str, ...]:
    if isinstance(secrets, str | bytes):
        raise TypeError("extra_secrets must be several texts, such as a list of them, not one text")
    # Longest first: a secret may be part of another.
    return tuple(sorted({secret for secret in secrets if secret.strip()}, key=lambda secret: (-len(secret), secret)))


# The secrets of a run, and texts that go into logs, records and reports -----------------------------------------

_SECRETS: ContextVar[tuple[str, ...]] = ContextVar("dspy_combee_secrets", default=())
_SECRET_VARIABLES = ("_API_KEY", "_ACCESS_KEY", "_TOKEN", "_SECRET")
_SECRET_OPTION = re.compile("key|secret|credentials|passw|(?:^|_)token(?:_|$)")
_SECRET_HEADER = re.compile("auth|key|token|secret|cookie|credential|passw|session", re.IGNORECASE)


def shorten(value: object, limit: int = 500, form: Callable[[Any], str] = str) -> str:
    """Return the text of `value` on one line, without secrets, and cut at `limit` characters with a mark."""
    line = " ".join(hide_secrets(text_of(value, form)).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def traceback_of(error: BaseException) -> str:
    """Format the traceback of an error without secrets."""
    return hide_secrets("".join(traceback.format_exception(error)).rstrip())


def hide_own_secrets(value: Any) -> Any:
    """Hide the run's own secrets in plain data. What only looks like a secret stays: it may belong to the task."""
    if isinstance(value, str):
        for secret in _SECRETS.get():
            value = value.replace(secret, REDACTED)
        return value
    if isinstance(value, dict):
        return {hide_own_secrets(key): hide_own_secrets(item) for key, item in value.items()}
    return [hide_own_secrets(item) for item in value] if isinstance(value, list) else value


def holds_own_secret(data: bytes) -> bool:
    """Tell whether `data` holds one of the run's own secrets."""
    return any(secret.encode() in data for secret in _SECRETS.get())


def hide_secrets(text: str) -> str:
    """Replace what looks like a secret, and the run's own secrets (`keeping_secret`), by `[redacted]`."""
    return redact(text, _SECRETS.get())


@contextmanager
def keeping_secret(secrets: Iterable[str]) -> Iterator[None]:
    """Hide these texts too in the block, and in every task that is started in it.

    An error that leaves the block is cut off from the causes whose text holds a secret.
    """
    token = _SECRETS.set(tuple(sorted({*_SECRETS.get(), *secrets}, key=len, reverse=True)))
    try:
        yield
    except BaseException as error:
        _cut_chain(error)
        raise
    finally:
        _SECRETS.reset(token)


def _cut_chain(error: BaseException) -> None:
    cause = error.__cause__ or error.__context__
    while cause is not None:
        text = text_of(cause)
        if hide_secrets(text) != text:
            error.__cause__ = error.__context__ = None
            return
        error, cause = cause, cause.__cause__ or cause.__context__


def _is_random(text: str) -> bool:
    return len(text) >= 20 and text.isalnum() and not text.isalpha()


def secrets_of(lms: Iterable[Any]) -> set[str]:
    """Collect the keys and header values that language models were given, and the keys in the environment."""
    found: set[str] = set()
    for lm in lms:
        found.update(_secret_values(getattr(lm, "kwargs", {})))
    found.update(value for name, value in os.environ.items() if name.endswith(_SECRET_VARIABLES))
    return {secret for secret in found if len(secret) >= 8}


def _secret_values(options: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the texts under a secret's name, also in options that are groups of options (credentials)."""
    for name, value in ((str(name), value) for name, value in options.items()):
        if name.endswith("headers") and isinstance(value, Mapping):
            for header, item in value.items():
                # `Bearer KEY` is a secret, and KEY is one by itself.
                parts = [str(item), *str(item).split()]
                yield from (part for part in parts if _SECRET_HEADER.search(str(header)) or _is_random(part))
        elif _SECRET_OPTION.search(name):
            if isinstance(value, Mapping):
                yield from _secret_values(value)
            elif isinstance(value, str):
                yield value
