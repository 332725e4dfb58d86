import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_combee.records.secrets import REDACTED, redact, redact_data

# Made up here, in parts, so that no scanner takes them for real ones.
ALNUM = "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8s9T0u1V2w3X4y5Z6"
HEX = "0123456789abcdef" * 4
KEYS = {
    "openai": "sk-" + ALNUM[:48],
    "openai project": "sk-proj-" + ALNUM + "_-" + ALNUM,
    "anthropic": "sk-ant-api03-" + ALNUM + "-AA",
    "openrouter": "sk-or-v1-" + HEX,
    "deepseek": "sk-" + HEX[:32],
    "google": "AIza" + ALNUM[:35],
    "google oauth": "ya29." + ALNUM,
    "google client": "GOCSPX-" + ALNUM[:28],
    "aws": "AKIA" + "ABCDEFGH12345678",
    "aws temporary": "ASIA" + "ABCDEFGH12345678",
    "github": "ghp_" + ALNUM[:36],
    "github app": "ghs_" + ALNUM[:36],
    "github fine-grained": "github_pat_" + ALNUM[:22] + "_" + ALNUM,
    "gitlab": "glpat-" + ALNUM[:20],
    "hugging face": "hf_" + ALNUM[:34],
    "slack": "xoxb-" + "1234567890-" + ALNUM[:24],
    "stripe": "sk_live_" + ALNUM[:24],
    "stripe restricted": "rk_test_" + ALNUM[:24],
    "groq": "gsk_" + ALNUM,
    "xai": "xai-" + ALNUM + ALNUM,
    "nvidia": "nvapi-" + ALNUM,
    "replicate": "r8_" + ALNUM[:37],
    "npm": "npm_" + ALNUM[:36],
    "pypi": "pypi-AgEIcHlwaS5vcmc" + ALNUM,
    "sendgrid": "SG." + ALNUM[:22] + "." + ALNUM[:43],
    "databricks": "dapi" + HEX[:32],
    "jwt": "eyJ" + ALNUM[:20] + ".eyJ" + ALNUM[:30] + "." + ALNUM[:43],
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize(
    "form", ["{}", "the key is {}.", "export KEY={}", '{{"x": "{}"}}', "https://{}@host/x", "({})"]
)
def test_keys_of_providers(key, form):
    text = form.format(key)
    assert key not in redact(text)
    assert redact(text) == form.format(REDACTED)


SECRETS = [
    ("password=hunter2", "password=[redacted]"),
    ("password=swordfish", "password=[redacted]"),
    ("PGPASSWORD=swordfish psql -h db", "PGPASSWORD=[redacted] psql -h db"),
    ("DB_PASSWORD='two words'", "DB_PASSWORD='[redacted]'"),
    ("password: hunter2\nuser: me", "password: [redacted]\nuser: me"),
    ('"api_key": "abc"', '"api_key": "[redacted]"'),
    ("{'api-key': 'abc'}", "{'api-key': '[redacted]'}"),
    ('{\\"api_key\\": \\"a b c\\"}', '{\\"api_key\\": \\"[redacted]\\"}'),
    ('"password": "a\\"b", "x": 1', '"password": "[redacted]", "x": 1'),
    ('apiKey="abc"', 'apiKey="[redacted]"'),
    ("client_secret=0a1b2c3d&x=1", "client_secret=[redacted]&x=1"),
    ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG+bPxRfiCY", "aws_secret_access_key = [redacted]"),
    ("token=0123456789abcdef", "token=[redacted]"),
    ("mysql --password hunter2 --user me", "mysql --password [redacted] --user me"),
    ("tool --api-key=abcd1234 run", "tool --api-key=[redacted] run"),
    ("connect(password=hunter2)", "connect(password=[redacted])"),
    ("postgres://me:s3cr3t@db:5432/x", "postgres://me:[redacted]@db:5432/x"),
    ("redis://:s3cr3t@db", "redis://:[redacted]@db"),
    ("Authorization: Bearer abc.def", "Authorization: Bearer [redacted]"),
    ("-H 'authorization: basic dXNlcjpwYXNz'", "-H 'authorization: basic [redacted]'"),
    ('"Authorization": "token abcdef"', '"Authorization": "token [redacted]"'),
    ("bearer 0123456789", "bearer [redacted]"),
    ('"passwords": ["hunter2", "a b"], "x": ["y"]', '"passwords": ["[redacted]", "[redacted]"], "x": ["y"]'),
    ("{'api_key': [\n 'abc' ]}", "{'api_key': [\n '[redacted]' ]}"),
    ('{\\"secret\\": [\\"abc\\",\\"d\\"]}', '{\\"secret\\": [\\"[redacted]\\",\\"[redacted]\\"]}'),
]


@pytest.mark.parametrize(("text", "expected"), SECRETS)
def test_secrets_that_stand_in_text(text, expected):
    assert redact(text) == expected


@pytest.mark.parametrize("kind", ["RSA ", "EC ", "OPENSSH ", "ENCRYPTED ", ""])
def test_private_key_blocks(kind):
    body = "\n".join([HEX] * 5)
    block = f"-----BEGIN {kind}PRIVATE KEY-----\n{body}\n-----END {kind}PRIVATE KEY-----"
    assert redact(f"cat key\n{block}\nls") == "cat key\n[redacted]\nls"
    assert redact(f"cat key\n{block[:-50]}").startswith("cat key\n[redacted]")
    assert HEX not in redact(f"cat key\n{block[:300]}")
    assert redact(block.replace("\n", "\\n")) == REDACTED


HARMLESS = [
    "d41d8cd98f00b204e9800998ecf8427e",
    "commit 9fceb02d0ae598e95dc970b74767f19372d61af8",
    "sha256:" + HEX,
    "123e4567-e89b-12d3-a456-426614174000",
    "data:image/png;base64,"
    + "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==",
    "/9j/4AAQ" + "AKIAABCDEFGH12345678" * 3,  # Inside base64.
    'password = os.environ["DB_PASSWORD"]',
    "password = getpass()",
    "password: str = None",
    "def f(password: Optional[str] = None, api_key='', secret=None):",
    "connect(password=password, api_key=api_key, secret=self.secret)",
    "if password == other_password:\n    Password: must",
    "Password: must have at least 8 characters",
    "The secret: none of the tokens: 3000. The key: value of all.",
    'max_tokens=100 pad_token="<|endoftext|>" eos_token="</s>" next_token=5',
    "password_hash = bcrypt.hash(password)",
    "PWD=/home/user OLDPWD=/",
    "private_key=/etc/ssl/key.pem",
    "ssh_private_key: ~/.ssh/id_rsa",
    "Bearer authentication is used by the bearer of the token.",
    ".sk-folding-cube-of-a-very-long-class-name { color: red }",
    "task-123456789012345678901234567890",
    "risk-0123456789012345678901234567890",
    "http://host:8080/path@x",
    "git@github.com:a/b.git ssh://git@github.com/a/b",
    "api_key=${OPENAI_API_KEY} --api-key $KEY --password <password>",
    "password=****** api_key: <your key> secret={{ secret }}",
    "the --password option",
    '{"required": ["password", "secret"], "password": {"type": ["string", "null"]}, "secrets": ["string"]}',
    'api_keys = ["a" for key in keys]; password_fields: ["name"]',
    "for key, value in items: tokens[key] = value",
    "x = a if secret else b; key = keys[0]",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text):
    assert redact(text) == text


# Texts that are likely to be near a pattern.
PIECES = [
    *("password", "api_key", "token", "=", ":", '"', "'", "\\", '\\"', "sk-", "Bearer", "://", "@", "eyJ", ".", "--"),
    "hunter2",
    *("-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", REDACTED, "x" * 20, HEX, " ", ": ", "\n"),
]
near_secrets = st.lists(st.sampled_from(PIECES)).map("".join)


@given(st.one_of(st.text(), near_secrets))
def test_redacting_twice_changes_nothing_more(text):
    once = redact(text)
    assert redact(once) == once


SLOW = [
    *("a", "://", "password", "password=\\", 'secret="', "-----BEGIN PRIVATE KEY-----", "eyJ", "sk-", "--a-b-", "SG."),
    *('"password": [', '"secrets": ["a", ', '"secret": ["a"' + " " * 50),
    *("password ", "bearer ", "authorization: ", "-xoxb", "password=" + " " * 50, "://a:", "a1" * 30 + "+"),
]


@pytest.mark.parametrize("piece", SLOW)
def test_time_is_linear_in_the_length(piece):
    # Quadratic time would take minutes, and be ended by the timeout of the suite.
    text = piece * (400_000 // len(piece))
    redact(text)


def test_extra_secrets():
    assert redact("my dog Rex, my dog Rexona", ["Rex", "Rexona", ""]) == "my dog [redacted], my dog [redacted]"
    assert redact_data({"Rex": ["Rex"]}, ("Rex",)) == {REDACTED: [REDACTED]}
    with pytest.raises(TypeError, match="extra_secrets must be several texts"):
        redact("x", "secret")


def test_data():
    image = object()
    data = {
        "api_key": "abc",
        "OPENAI_API_KEY": "abc def",
        "dbPassword": "x y",
        "token": ALNUM,
        "nested": [{"secret": "abc"}, ("ok", KEYS["aws"])],
        "secret": None,
        "password": "",
        "secret_key": 5,
        "image": image,
    }
    assert redact_data(data) == {
        "api_key": REDACTED,
        "OPENAI_API_KEY": REDACTED,
        "dbPassword": REDACTED,
        "token": REDACTED,
        "nested": [{"secret": REDACTED}, ("ok", REDACTED)],
        "secret": None,
        "password": "",
        "secret_key": 5,
        "image": image,
    }
    harmless = {"token": "Hello", "tokens": ["a"], "key": "value", "password_hint": "blue", "monkey": "abc", 3: "x"}
    assert redact_data(harmless) == harmless
    assert redact_data(5) == 5


NESTED = [
    ({"password": ["pw", "q"]}, {"password": [REDACTED, REDACTED]}),
    ({"passwords": ("pw",)}, {"passwords": (REDACTED,)}),
    ({"api_keys": {"openai": "abc", 3: ["d"]}}, {"api_keys": {"openai": REDACTED, 3: [REDACTED]}}),
    ({"secret": {"token": "Hello", "length": 5}}, {"secret": {"token": REDACTED, "length": 5}}),
    ({"token": {"value": ALNUM, "kind": "jwt"}}, {"token": {"value": REDACTED, "kind": "jwt"}}),
    ({"token": [{"password": "pw"}]}, {"token": [{"password": REDACTED}]}),
    (
        [{"a": {"client_secret": [["pw"], None, "<secret>"]}}],
        [{"a": {"client_secret": [[REDACTED], None, "<secret>"]}}],
    ),
]


@pytest.mark.parametrize(("data", "expected"), NESTED)
def test_lists_and_mappings_under_a_secret_name(data, expected):
    assert redact_data(data) == expected
    assert redact_data(expected) == expected


json_keys = st.sampled_from(["value", "tokens", "token", "kind", "password", ""])
counts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(json_keys, inner, max_size=3),
)
texts_of_secrets = st.recursive(
    st.just("hunter-Zq") | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(json_keys, inner, max_size=3),
)


def without_texts(value):
    if isinstance(value, dict):
        return {key: without_texts(item) for key, item in value.items()}
    return [without_texts(item) for item in value] if isinstance(value, list) else isinstance(value, int) and value


@given(st.sampled_from(["password", "DB_PASSWORD", "apiKey", "secrets", "access-token"]), texts_of_secrets)
def test_no_text_under_a_secret_name_is_left(name, value):
    found = redact_data([{"at": {name: value}}])[0]["at"][name]
    assert "hunter" not in repr(found)
    assert without_texts(found) == without_texts(value), "the shape and the numbers stay"


@given(st.sampled_from(["tokens", "token", "token_usage", "max_tokens", "password", "secrets"]), counts)
def test_counts_stay_whatever_they_are_called(name, value):
    assert redact_data({name: value}) == {name: value}


def test_usage_of_tokens_is_no_secret():
    usage = {"tokens": {"prompt": 12, "by": ["step"]}, "token_usage": {"model": "gpt-4o-mini"}, "token": {"text": "Hi"}}
    assert redact_data(usage) == usage
