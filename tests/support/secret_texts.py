"""Texts with a secret, and ordinary texts that look a little like one. All secrets are made up."""

from __future__ import annotations

_LETTERS = "q8Kd02mVx7LtYw3RzB5nHc9JfGsPeA4u"
TOKEN = f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiI0MiJ9.{_LETTERS}"

SECRET_TEXTS = {
    # text with {} in place of the secret: the secret
    "connected with DB_PASS={}": "geheim7x",
    "MYSQL_PWD={} mysql -u root": "nightingale",
    "PGPASSWORD='{}' psql": "two words 7",
    'config {{"ssh_pass": "{}"}} read': "correcthorse",
    "apiKey: {}": "x7Kp29ab",
    'header {{\\"x-api-key\\": \\"{}\\"}}': "abcdefgh12",
    "wands --token {} push": "abcdefgh12",
    "wands --password={} push": "nightingale",
    "a=https://h.example/x.h5?X-Amz-Date=1&X-Amz-Signature={}&b=2": "0f3a" * 16,
    "https://h.example/x?X-Amz-Credential={}": "AKIAQ8KD02MVX7LTYW3R/eu",
    "https://h.example/x?X-Goog-Signature={} failed": "0f3a" * 16,
    "https://blob.example/x?sp=r&sig={}": "Ab%2Fcd%3D",
    "https://h.example/data?token={}": "abc",
    "https://h.example/data?page=2&access_token={}#top": "abc",
    "https://maps.example/v1?key={}": _LETTERS,
    "Authorization: Bearer {}": "opaque-token-of-a-server",
    "Authorization: Basic {}": "YWxhZGRpbjpvcGVuIHNlc2FtZQ==",
    "curl -H 'authorization: bearer {}' https://h.example": _LETTERS,
    '{{"Authorization": "Bearer {}"}}': _LETTERS,
    "sent Bearer {} to the server": _LETTERS,
    "the cookie {} was rejected": TOKEN,
    "id {}.": f"AKIA{'Q8KD02MVX7LTYW3R'}",
    "sts {}.": f"ASIA{'Q8KD02MVX7LTYW3R'}",
    "aws_secret_access_key = {}": "wJalr/UtnFEMI+K7MDENG/bPxRfiCYq8Kd02mVx7",
    "DefaultEndpointsProtocol=https;AccountKey={};EndpointSuffix=x": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50==",
    "google {}": f"AIza{_LETTERS}abc",
    "oauth {}": f"ya29.{_LETTERS}",
    "client {}": f"GOCSPX-{_LETTERS}",
    "alibaba {}": f"LTAI5t{_LETTERS[:16]}",
    "model {}": f"sk-proj-{_LETTERS}",
    "stripe {}": f"sk_live_{_LETTERS}",
    "slack {}": f"xoxb-{_LETTERS}",
    "npm {}": f"npm_{_LETTERS}abcd",
    "wandb {}": f"wandb_v1_{_LETTERS}",
    "hub x_{}": f"hf_{_LETTERS}",
    "git {}": f"ghp_{_LETTERS}",
    "git2 {}": f"github_pat_{_LETTERS}",
    "lab {}": f"glpat-{_LETTERS}",
    "https://{}@hub.example/a": "carol:ge@heim",
    "postgres://{}@db.example:5432/x": "carol:geheim",
    "-----BEGIN OPENSSH {}": f"PRIVATE KEY-----\n{_LETTERS}\n-----END OPENSSH PRIVATE KEY-----",
    "-----BEGIN RSA PRIVATE KEY-----{}": f"\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128,0A\n\n{_LETTERS}",
}
"""Maps a text, with {} in place of a secret, to the secret."""

ORDINARY_TEXTS = (
    "A transformer of 14B parameters, with 512 tokens of text.",
    "GIT_TOKENIZER=transformer",
    "TOKENIZERS_PARALLELISM=false, num_tokens=123456789, max_tokens: 65536000",
    "The password: transformer. A secret: under water; the key: a fox.",
    "pad_token='<pad>', eos_token=[SEP12345], mask_token: '<extra_id_0>'",
    "primary_key=sample_id, cache_key=wan2.1-14b, sample_key=clips/000001",
    "PWD=runs/default, OLDPWD=runs/earlier, COMPASS=north-east-7",
    "hf_hub_download, hf_transfer, sk-learn-classifier-of-images, AKIARA",
    "hf://datasets/a/b@main and https://h.example/a?page=2&key=fox&size=1280x720",
    "mail carol@h.example or https://h.example/@carol/x",
    "the bearer of a very-long-and-hyphenated-name",
    "data.exclude=[films/night#3], lora.targets=attention+ffn, optim.lr=1e-05",
    "HF_TOKEN_PATH=token-of-the-hub, GIT_CREDENTIAL_HELPER=cache-for-a-day",
    "-----BEGIN PUBLIC KEY-----",
    "\"l=\\)yR{='#T",  # a backslash is no quote
    "set HF_TOKEN, or run `hf auth login`; --token is not an option",
)

SECRET_NAMES = (
    *(
        "HF_TOKEN",
        "WANDB_API_KEY",
        "DB_PASS",
        "MYSQL_PWD",
        "PGPASSWORD",
        "SSHPASS",
        "AWS_SECRET_ACCESS_KEY",
        "S3_KEY",
    ),
    *(
        "GITHUB_TOKEN_2",
        "client_secret",
        "apiKey",
        "x-api-key",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "CI_JOB_JWT",
        "DEPLOY_PAT",
    ),
)
ORDINARY_NAMES = (
    *(
        "GIT_TOKENIZER",
        "TOKENIZERS_PARALLELISM",
        "MAX_TOKENS",
        "num_tokens",
        "PWD",
        "OLDPWD",
        "COMPASS",
        "BYPASS_CACHE",
    ),
    *(
        "GNOME_KEYRING_CONTROL",
        "XKB_KEYBOARD",
        "pad_token",
        "PUBLIC_KEY",
        "SSH_ASKPASS",
        "HF_TOKEN_PATH",
        "SECRETARY",
        "PATH",
    ),
)
