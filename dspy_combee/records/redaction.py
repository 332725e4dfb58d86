"""Redaction: values that look like secrets become `[redacted]`. Pure, and without imports from the package.

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

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

REDACTED = "[redacted]"

# A literal, which is fast to look for, and the pattern that is tried where it stands in the text. Every repetition,
# here and below, has a literal before it or a bound, so that no text takes time quadratic in its length.
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
    """Whether a value is one, and no placeholder, path or mask for it."""
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
    """Whether a value without quotes is a secret, and no expression, word or type."""
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
# What stands in the text in lower case where the pattern may match.
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
    """`text` with everything that looks like a secret replaced by `[redacted]`.

    What counts is listed at the top of this module. Redacting twice changes nothing more.

    Args:
        text: Any text.
        extra_secrets: Secrets to replace whatever they look like; blank ones are passed over.

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
    """`value` with every text in it redacted, and with the texts that stand under a secret's name, however deep.

    Mappings become dicts, lists and tuples stay what they are; every other object is passed by reference.

    Args:
        value: Plain data, such as JSON gives.
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
    """What makes a text under this key a secret; `above` is the rule for the mapping, the stricter one stays."""
    if above is _is_any_value or not isinstance(key, str):
        return above
    if _SECRET_NAME.search(key):
        return _is_any_value
    return _is_token if _TOKEN_NAME.search(key) else above


def _checked(secrets: Iterable[str]) -> tuple[str, ...]:
    if isinstance(secrets, str | bytes):
        raise TypeError("extra_secrets must be several texts, such as a list of them, not one text")
    # The longest first: a secret may be part of another.
    return tuple(sorted({secret for secret in secrets if secret.strip()}, key=lambda secret: (-len(secret), secret)))
