"""What identifies is taken out, by value and by form; all else stays as it was."""

import json
import re
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.doctor.redact import Identity, Redactor, _domains, this_identity
from tests.doctor.machines import cases

ALICE = Identity(("alice",), ("/home/alice", "C:\\Users\\alice"), ("alice-pc", "box7"))


def redact(text: str, identity: Identity = ALICE) -> str:
    return Redactor(identity).text(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("alice's model", "[user-1]'s model"),
        ("Alice and ALICE", "[user-1] and [user-1]"),
        ("malice alice2 _alice alices", "malice alice2 _alice alices"),
        ("/home/alice/m.gguf", "~/m.gguf"),
        ("/home/alice2/m.gguf", "/home/[user-1]/m.gguf"),
        ("PATH=/opt:/home/alice:/bin", "PATH=/opt:~:/bin"),
        ("C:\\Users\\alice\\m", "~\\m"),
        (json.dumps("C:\\Users\\alice\\m"), '"~\\\\m"'),
        ("/mnt/c/Users/bob/m", "/mnt/c/Users/[user-1]/m"),
        ("C:\\Users\\John Smith\\m", "C:\\Users\\[user-1]\\m"),
        ("/home/carol: no such file", "/home/[user-1]: no such file"),
        ("file:///home/alice/m", "file:~/m"),
        ("ssh alice@box7", "ssh [user-1]@[host-1]"),
        ("alice-pc:8080 box7.lan mybox7", "[host-1]:8080 [host-2].lan mybox7"),
    ],
)
def test_names_and_homes(text: str, expected: str) -> None:
    assert redact(text) == expected


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("HF_TOKEN=hf_AbCdEfGhIjKlMnOpQrStUvWx", "hf_"),
        ("token hf_AbCdEfGh1", "hf_"),
        ("git clone https://ghp_abcdefghij1234@github.com/o/r", "ghp_"),
        ("github_pat_11ABCDEFG0abcdefgh", "github_pat"),
        ('"OPENAI_API_KEY": "sk-proj-abcdefghijklmnop"', "sk-proj"),
        ("Authorization: Bearer abc.def-ghi123", "abc.def"),
        ("authorization: Basic YWxhZGRpbjpvcGVu1", "YWxh"),
        ("https://bob:hunter2@example.com/x", "hunter2"),
        ("DB_PASS=hunter2x", "hunter2x"),
        ("MYSQL_PWD=hunter2x", "hunter2x"),
        ("server=db;pwd=hunter2x", "hunter2x"),
        ("passwd=hunter2x", "hunter2x"),
        ("curl --user wendy:pass123 http://x", "pass123"),
        ("curl -u wendy:pass123 http://x", "pass123"),
        ("key ASIAQWERTYUIOPASDFGH", "ASIA"),
        ("disk serial S6Z2NJ0T123456", "S6Z2"),
        ("/etc/machine-id 0123456789abcdef0123456789abcdef", "0123456789abcdef"),
        ("    GPU PDI                     : 0x1ff6f1e2d3c4b5a6", "1ff6f1e2"),
        ("from ::ffff:192.168.0.9 port 4", "0.9"),
        ("redis://:p4ssw0rd@10.1.2.3", "p4ssw0rd"),
        ("PASSWORD='correct-horse'", "correct-horse"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI", "wJalr"),
        ("Serial Number: PF2ABCD9", "PF2ABCD9"),
        ('{"serial": "S4EWNX0R123"}', "S4EWNX0R"),
        ("mail bob.smith@example.org now", "bob.smith"),
        ("link aa:bb:cc:dd:ee:ff up", "aa:bb"),
        ("link AA-BB-CC-DD-EE-FF up", "AA-BB"),
        ("peer 203.0.113.7:443", "203.0"),
        ("inet 10.0.0.3/24", "10.0.0.3"),
        ("fe80::1ff:fe23:4567:890a%eth0", "fe80"),
        ("[2001:db8::1]:8080", "2001:db8"),
        ("123e4567-e89b-12d3-a456-426614174000", "123e4567"),
        ("GPU-8f9d2c1e-1234-5678-9abc-def012345678", "8f9d2c1e"),
        ("UUID: GPU-8f9d2c1e (cut off)", "8f9d2c1e"),
        ("UUID: GPU-8F9D2C1E (cut off)", "8F9D2C1E"),
        ("file=%2Fhome%2Falice%2Fm.gguf", "alice"),
        ("error:\\nalice\\tsaid so", "alice"),
        ("\x1b[1;31malice\x1b[0m", "alice"),
        ("a windows box at 192.168.1.20 and a driver from 10.1.2.3", "192.168"),
        ("a windows box at 192.168.1.20 and a driver from 10.1.2.3", "10.1.2.3"),
        ("nas.corp.example:/volume1/models on /mnt", "corp.example"),
        ("\\\\fileserver\\share\\m.gguf", "fileserver"),
        ('"device": "//fileserver/share"', "fileserver"),
        ("/dev/disk/by-id/nvme-Samsung_SSD_990_PRO_2TB_S7KHNJ0W123456A-part2", "S7KHNJ0W"),
        ("/dev/disk/by-uuid/A1B2-C3D4", "A1B2"),
        ("owner S-1-5-21-3623811015-3361044348-30300820-1013", "3623811015"),
        ("infiniband 80:00:02:08:fe:80:00:00:00:00:00:00:00:02:c9:03:00:31:78:f2", "c9:03"),
        ("https://cdn.example/x.gguf?X-Amz-Signature=3f1a&X-Amz-Credential=AKx", "3f1a"),
        ("https://example.com/m?access_token=abcd1234", "abcd1234"),
        ("strata run hf:o/m --hf-token abcd1234", "abcd1234"),
        ("nvapi-AbCdEfGh12345678", "AbCdEf"),
        ("glpat-AbCdEfGh12345678", "AbCdEf"),
        ("mail=bob%40example.org", "bob"),
        ("%2Fhome%2Fbob%2Fm.gguf", "bob"),
        ("C:\\\\\\\\Users\\\\\\\\bob\\\\\\\\m", "bob"),
        ("C:\\Documents and Settings\\bob\\m", "bob"),
        ("\\\\?\\C:\\Users\\bob\\m", "bob"),
        ("\\/home\\/bob\\/m", "bob"),
        ("token: hf_AbCdEfGh\nIjKlMnOpQrStUvWx", "IjKl"),
        ("HF_TOKEN=hf_AbCdEfGhIjKl\\\n  MnOpQrStUvWx", "MnOp"),
        ("Bearer abcdefghijklmnopqr\n  stuvwxyz0123", "stuv"),
        ("Authorization%3A%20Bearer%20abc123def456", "abc123"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNz\naC1rZXk=\n-----END OPENSSH PRIVATE KEY-----", "aC1r"),
        ("API_KEY: 'abc def ghi'", "ghi"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG", "wJalr"),
        ('{"token": "abcd1234"}', "abcd1234"),
        ("hf_token=abcd1234", "abcd1234"),
        ("SerialNumber\n\nPF2ABCD9", "PF2A"),
        ("interface aabb.ccdd.eeff", "ccdd"),
    ],
)
def test_forms(text: str, secret: str) -> None:
    assert secret not in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "kernel 6.18.54.1-microsoft-standard-WSL2",
        "driver 580.65.6.1",
        "nvidia-cublas-cu12 12.8.4.1",
        '"nvidia-cublas-cu12": "12.8.4.1"',
        "nvidia-cudnn-cu12==9.10.2.21",
        "127.0.0.1:8080 ::1 0.0.0.0",
        "at 12:34:56 in std::vector of 0000:01:00.0",
        "hf_transfer and hf_hub_download; sk-learn; disk-speed-of-the-model",
        "max_tokens: 200, decode_tokens_per_s=34.2, top-k 8",
        "Basic Render Driver",
        "0x7f3a8c000000 -> 00:1f.2",
        "sha256 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "/root/models /usr/local/cuda/lib64",
        "// a comment /* */ and a//b and C:/models/m.gguf",
        "cudaHostAlloc(Mapped|Portable) at src/core/native_head.cpp:151",
        "PATH=/opt/cuda:/usr/bin:/bin",
        "open: /data/m.gguf; stat:0; eos_token: 2",
        "\\\\.\\PHYSICALDRIVE0 \\\\?\\C:\\models",
        "hf_transfer\nQwen3-30B is loaded with token: 0x7f3a8c00aa00",
        "pad_token=151643 next_token: end_of_text",
        "ends with hf_\nloading at 2024.1234.5678",
        "0000:01:00.0 00000000:41:00.0 Xid (PCI:0000:41:00): 79",
    ],
)
def test_what_identifies_nobody_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "name", ["root", "a", "cuda", "max", "ubuntu", "c++.*[x", "josé", "o'brien", "李雷", "x86", "7"]
)
def test_adversarial_user_names(name: str) -> None:
    home = "/root" if name == "root" else f"/home/{name}"
    text = f"a cuda kernel of max size at {home}/m.gguf; USER={name}; {name}s x{name} /usr/local/cuda; ssh {name}@far"
    out = redact(text, Identity((name,), (home,), ()))
    assert "a cuda kernel of max size at " in out
    assert "/usr/local/cuda" in out
    assert f"{name}s x{name}" in out
    if name == "root":
        assert out == text
    else:
        assert f"{home}/" not in out
        assert f"USER={name}" not in out
        assert f"{name}@" not in out


@pytest.mark.parametrize("host", ["cuda", "model", "linux", "ab"])
def test_a_host_that_is_called_like_a_word_is_found_where_it_stands_as_a_name(host: str) -> None:
    identity = Identity(("alice",), ("/home/alice",), (host,))
    for text in (
        f"Linux {host} 6.8.0-45-generic #45-Ubuntu SMP x86_64",
        f"Dec 01 10:00:00 {host} kernel: NVRM: loading",
        f"Dec 01 10:00:00 {host} strata[77]: loading",
        f"alice@{host}:~$ nvidia-smi",
        f'{{"host": "{host}"}}',
        f"HOSTNAME={host}",
    ):
        assert "[host-1]" in redact(text, identity), text
    for text in (f"Linux driver and cuda kernel of the model, {host}", f"at 10:00:00 {host} was loaded"):
        assert redact(text, identity) == text
    assert Redactor(identity).value({"host": host, "user": "alice", "note": host}) == {
        "host": "[host-1]",
        "user": "[user-1]",
        "note": host,
    }


@pytest.mark.parametrize(
    ("home", "text"),
    [
        ("C:\\Users\\John Smith", "c:/users/john smith/m"),
        ("C:\\Users\\John Smith", "\\\\?\\C:\\Users\\John Smith\\m"),
        ("C:\\Users\\John Smith", "file:///C:/Users/John%20Smith/m"),
        ("C:\\Users\\John Smith", "C%3A%5CUsers%5CJohn%20Smith%5Cm"),
        ("/data/an na", "/data/an\\ na/m"),
        ("/data/an na", "//data//an na//m"),
        ("/data/o'brien", "/data/o\\'brien/m"),
        ("/data/$(id)", "\\/data\\/$(id)\\/m"),
    ],
)
def test_a_home_in_every_spelling(home: str, text: str) -> None:
    out = redact(text, Identity((), (home,), ()))
    assert re.search(r"~|\[user-1\]", out)
    assert not re.search("smith|an.{1,3}na|brien|id", out, re.IGNORECASE)


def test_the_domain_of_a_host_goes_with_it(tmp_path: Path) -> None:
    resolver = tmp_path / "resolv.conf"
    resolver.write_text("# search not.this\nnameserver 10.0.0.1\nsearch corp.example.com lan\n")
    assert _domains(resolver) == {"corp.example.com"}
    assert _domains(tmp_path / "absent") == set()
    out = redact("box7.corp.example.com and db01.corp.example.com", Identity((), (), ("box7", "corp.example.com")))
    assert out == "[host-1].[host-2] and db01.[host-2]"


@pytest.mark.parametrize("spelling", ["jos\u00e9", "jose\u0301", "jos%C3%A9", "jos\\u00e9", "JOS\u00c9"])
def test_a_name_in_every_spelling(spelling: str) -> None:
    out = redact(f"the model of {spelling} here", Identity(("jos\u00e9",), (), ()))
    assert out == "the model of [user-1] here"


def test_a_name_is_not_found_before_its_accent() -> None:
    assert redact("jose\u0301 jose", Identity(("jose",), (), ())) == "jose\u0301 [user-1]"


def test_equal_values_have_equal_pseudonyms_across_texts() -> None:
    redactor = Redactor(ALICE)
    one, two = "GPU-8f9d2c1e-1234-5678-9abc-def012345678", "GPU-00000000-1234-5678-9abc-def012345678"
    assert redactor.text(f"{one} {two}") == "GPU-[uuid-1] GPU-[uuid-2]"
    assert redactor.text(two) == "GPU-[uuid-2]"
    counted = {r.pseudonym: r.times for r in redactor.replaced}
    assert counted == {"[uuid-1]": 1, "[uuid-2]": 2}


def test_what_was_replaced_is_told_without_the_value() -> None:
    redactor = Redactor(ALICE)
    redactor.text("HF_TOKEN=hf_AbCdEfGhIjKlMnOp for alice at 10.0.0.3")
    assert {r.kind for r in redactor.replaced} == {"token", "user", "ip"}
    assert "alice" not in repr(redactor.replaced)


def test_documents_keep_their_shape() -> None:
    facts = cases()["gpu-order"].machine().facts
    identity = Identity(("ok", "linux", "docker"), ("/home/me",), ("cuda",))
    safe = Redactor(identity).value(facts)
    assert msgspec.json.decode(msgspec.json.encode(safe), type=type(facts)) == safe
    assert safe.host.status == facts.host.status
    before, after = facts.cuda.value, safe.cuda.value
    assert before
    assert after
    assert [d.nvml_index for d in before.devices] == [d.nvml_index for d in after.devices]
    nvml = safe.nvml.value
    assert nvml
    assert {d.uuid for d in after.devices} == {g.uuid for g in nvml.gpus}  # still matched, no longer identifying
    assert not {d.uuid for d in after.devices} & {d.uuid for d in before.devices}


def test_secret_keys_lose_their_whole_value() -> None:
    document = {"environment": {"HF_TOKEN": "short", "CUDA_HOME": "/usr/local/cuda"}, "serial": "x1"}
    safe = Redactor(ALICE).value(document)
    assert safe["environment"] == {"HF_TOKEN": "[token]", "CUDA_HOME": "/usr/local/cuda"}
    assert safe["serial"] == "[token]"


@settings(max_examples=200, deadline=None)
@given(st.text(min_size=3, max_size=12), st.text(max_size=40), st.text(max_size=40))
def test_any_name_is_gone_from_its_home(name: str, before: str, after: str) -> None:
    identity = Identity((name,), (f"/home/{name}",), (name,))
    Redactor(identity).text(before + name + after)  # whatever the name, it never raises
    if name.isalnum():
        assert f"/home/{name}/" not in redact(f"{before} /home/{name}/x {after}", identity)


def test_this_identity_needs_no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise OSError("no username set in the environment")

    monkeypatch.setattr("getpass.getuser", nobody)
    monkeypatch.setenv("USER", "someone")
    identity = this_identity()
    assert "someone" in identity.users
    assert identity.hosts


def test_a_large_log_takes_seconds() -> None:
    line = "loading layer 12 of 48: 0x7f3a8c000000 ok at /home/alice/m (123.4 MiB) from 10.0.0.3\n"
    started = time.monotonic()
    redact(line * 10_000)  # 0.9 MB
    assert time.monotonic() - started < 20


def test_an_account_without_home_or_name_still_has_an_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """`docker run --user 12345` without HOME: the system knows nobody of that number."""
    pwd = pytest.importorskip("pwd")

    def unknown(uid: int) -> None:
        raise KeyError(f"uid not found: {uid}")

    for name in ("HOME", "USERPROFILE", "USER", "USERNAME", "LOGNAME", "SUDO_USER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    identity = this_identity()
    assert identity.users == ()
    assert redact("/home/bob/m", identity) == "/home/[user-1]/m"


def test_the_full_name_of_an_account_and_the_place_a_linked_home_points_to_are_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pwd = pytest.importorskip("pwd")
    (tmp_path / "disk2" / "u77").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "disk2" / "u77")
    account = pwd.struct_passwd(("u77", "x", 77, 77, "Ada Lovelace,,,", str(tmp_path / "home"), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: account)
    out = redact(f"{tmp_path}/disk2/u77/m.gguf of Ada Lovelace", this_identity())
    assert out == "~/m.gguf of [user-1]"


@pytest.mark.parametrize(
    "text",
    [
        "PWD=/srv/models OLDPWD=/srv",
        "pwd=C:\\models",
        "docker run --user 1000:1000 image",
        "serial console ttyS0 115200",
        "serial 8250 driver loaded",
        "listening on ::ffff:127.0.0.1",
        "machine-id is missing",
    ],
)
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    assert redact(text) == text
