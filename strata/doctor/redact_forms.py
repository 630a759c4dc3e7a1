"""What identifies a person or a machine, by its form: addresses, serials, tokens, homes, and names beside a label."""

from __future__ import annotations

import re

# Names that identify nobody, and that every log is full of.
NOBODY = frozenset({"root", "admin", "administrator", "nobody", "localhost", "default", "public", "runner"})
# Words of the field: someone called like one is replaced only where it stands as a name (/home/cuda, USER=cuda).
WORDS = frozenset(
    re.findall(
        r"\w+",
        """cuda gpu cpu ram vram nvidia driver linux windows ubuntu debian fedora arch wsl docker python cupy numpy
        model models strata expert experts token tokens cache kernel memory disk head plan run test max min free used
        total home host local data work dev lib usr bin etc opt var tmp mnt user users system the and for not are was
        has one all""",
    )
)
EDGE = r"\w\u0300-\u036f"  # what a word is made of: letters, digits, underscore, combining accents
VERSION_BEFORE = re.compile(  # the word itself, then nothing but what stands between a name and its version
    r"(?:nvidia|cuda|cupy|cublas|cudnn|nccl|nvrtc|version|driver|kernel|release|build|linux|windows|package|==|\bv)"
    r"[\w\-.]{0,24}[\"': =(]{0,4}$",
    re.IGNORECASE,
)
# Colours, titles and links of a terminal, which would hide a word's edge.
ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b\n]{0,1000}(?:\x07|\x1b\\))")
BEGINS = rf"(?:(?<![{EDGE}])|(?<=%[0-9A-Fa-f]{{2}})|(?<=\\[nrt]))"  # a word's edge, in an encoded text too
SECRET_KEY = re.compile(r"token$|secret|passw|api_?key|access_?key|credential|serial|machine.?id", re.IGNORECASE)
ASSIGNED = r"\\?[\"']?[ \t]*[=:][ \t]*\\?[\"']?"  # what stands between a key and its value in JSON, env or prose
SLASH = r"(?:[/\\]{1,8}|%2[Ff]|%5[Cc])"  # as it stands in a path, escaped once or more, or in a URL
NAME_IN_PATH = r"(?:(?!%2[Ff]|%5[Cc])[^/\\\s\"'<>|:;,)\]])+"

# The rest of what was wrapped at the end of a line: a word by itself that no language has.
_REST = r"\r?\n[ \t]*(?=[\w-]*(?:\d|[a-z][A-Z]))[\w-]{4,}(?![\w=:/.])"
FORMS = {  # kind -> pattern; what its group "keep_..." matched stays in the text
    # Whole ones of hf_ and ghp_ have 34 and 36 signs: behind fewer, the rest may follow in the next line.
    "token": rf"(?<![\w-])(?:hf_(?=[A-Za-z0-9]*[A-Z0-9])[A-Za-z0-9]{{8,33}}\\?{_REST}"
    rf"|gh[pousr]_[A-Za-z0-9]{{8,35}}\\?{_REST}"
    r"|hf_(?=[A-Za-z0-9]*[A-Z0-9])[A-Za-z0-9]{8,}|gh[pousr]_[A-Za-z0-9]{8,}|github_pat_\w{8,}"
    r"|glpat-[\w-]{8,}|nvapi-[\w-]{8,}|gsk_\w{8,}|r8_\w{8,}|npm_\w{8,}|pypi-[\w-]{16,}|AIza[\w-]{20,}"
    r"|[sr]k_(?:live|test)_\w{8,}|sk-[A-Za-z0-9_-]{12,}|xox[a-z]-[A-Za-z0-9-]{8,}|A(?:KI|SI)A[0-9A-Z]{12,}|eyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?)",
    "private_key": r"(?P<keep_key>-----BEGIN [A-Z ]*PRIVATE KEY-----)[^-]*",
    "bearer": rf"{BEGINS}(?P<keep_bearer>(?i:bearer(?:[ \t+]|%20)+|authorization{ASSIGNED}(?:basic|token)[ \t]+))"
    rf"(?:(?=\S*\d)[A-Za-z0-9._~+/=-]{{6,}}|[A-Za-z0-9._~+/=-]{{16,}})(?:\\?{_REST})?",
    "login": r"(?P<keep_login>://)[^\s/@\"'<>]+(?=@)",
    "secret": rf"(?P<keep_secret>(?:TOKEN|SECRET|(?:_PASS|_PWD)(?=[=:])"
    r"|(?i:(?<![\w$])pwd(?==(?![/~.\\]|[A-Za-z]:))"  # a folder otherwise
    rf"|access_?key|passw(?:or)?d|api[_-]?key|secret)){ASSIGNED})"
    r"(?!hf_[A-Za-z0-9]{8}|gh[pousr]_)(?:(?<=[\"'])[^\"'\n]{1,200}(?=\\?[\"'])"
    rf"|[^\s\"'\\,;]{{4,}}(?:\\{_REST})?)"
    rf"|(?P<keep_token>(?i:token){ASSIGNED})(?!0x)(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{{8,}}"  # not eos_token: 2
    r"|(?P<keep_query>[?&](?i:[\w-]*token|sig(?:nature)?|key|policy|credential|x-amz-[\w-]+|key-pair-id)=)[^\s&\"'<>]+"
    r"|(?P<keep_option>(?<!\S)--?(?:[\w-]+-)?(?:token|password)[ =])[^\s\"']{4,}"
    r"|(?P<keep_login_option>(?<!\S)(?:-u|--(?:[\w-]+-)?user)[ =]\"?[A-Za-z][^\s:\"'/]*:)(?!/)[^\s\"']{3,}",
    "serial": rf"(?<!\w)(?P<keep_serial>(?i:serial(?:[ _-]?(?:number|no))?|s/n|machine-id){ASSIGNED})"
    r"[A-Za-z0-9][\w-]{3,}"
    r"|(?<!\w)(?P<keep_plain>(?i:serial(?:[ _-]?(?:number|no))?)[ \t]+)(?=[\w-]*\d)(?=[\w-]*[A-Z])"
    r"[A-Z0-9][A-Z0-9-]{7,}(?![\w-])"
    r"|(?P<keep_machine>machine-id[\"']?:?[ \t]+)[0-9a-f]{32}(?!\w)"
    r"|(?P<keep_pdi>(?i:gpu )?PDI[ \t]*[:=][ \t]*)0x[0-9a-fA-F]{6,}"
    r"|(?P<keep_table>(?i:serial ?number)[ \t]*\r?\n\s*)(?=\S*\d)[A-Za-z0-9][\w-]{3,}"
    r"|(?P<keep_disk>/disk/by-[a-z]+/)[^\s\"',;)]+",
    "email": r"(?<![\w.+-])[\w.+-]{1,64}(?:@|%40)(?:[A-Za-z0-9-]{1,63}\.){1,4}[A-Za-z]{2,24}(?![\w-])",
    "server": r"(?:(?<=^)|(?<=[\s\"'=(]))(?P<keep_share>\\{2,4}|//)(?![.?])[\w.-]+(?=[/\\])"
    r"|(?<![\w/:.\\-])(?!\w+:/{2})[A-Za-z][\w.-]+(?=:/[\w.-])",  # \\server\share, //server/share, server:/share
    "elsewhere": rf"(?P<keep_elsewhere>(?:{SLASH}(?i:home|users|documents and settings)"
    rf"|(?<![\w.])/(?:run/)?media){SLASH})"
    rf"(?:{NAME_IN_PATH}(?: {NAME_IN_PATH}){{0,3}}(?={SLASH})|{NAME_IN_PATH})",
    "uuid": r"(?<![0-9A-Za-z])(?P<keep_uuid>(?:GPU|MIG)-)?[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
    r"(?![0-9A-Za-z])|(?<![0-9A-Za-z])(?P<keep_part>(?:GPU|MIG)-)[0-9a-fA-F]{6,}[0-9a-fA-F-]*"
    r"|(?<!\w)(?P<keep_sid>S-1-5-21-)\d+(?:-\d+){2,}",
    "mac": r"(?<![\w:.-])(?:[0-9A-Fa-f]{2}[:-]){5,19}[0-9A-Fa-f]{2}(?![\w:-])"
    r"|(?<![\w.])(?=[\d.]*[A-Fa-f])(?:[0-9A-Fa-f]{4}\.){2}[0-9A-Fa-f]{4}(?![\w.])",
    "ip": r"(?<![\w:.])::(?i:ffff):(?:\d{1,3}\.){3}\d{1,3}(?![\w.])"
    r"|(?<![\w.+-])(?:\d{1,3}\.){3}\d{1,3}(?![\w+-]|\.\d)"
    r"|(?<![\w:.])[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:]{1,38}(?:%\w+)?(?![\w:])",
}
SAME_KIND = {  # told to a person as one kind
    **dict.fromkeys(("private_key", "bearer", "login", "secret"), "token"),
    **dict.fromkeys(("server", "domain"), "host"),
}
USER_KEY = re.compile(r"user(?:[ _]?name)?|logname|owner", re.IGNORECASE)
HOST_KEY = re.compile(r"host(?:[ _]?name)?|computer ?name|nodename|domain", re.IGNORECASE)
NAMED_USER = (
    rf"(?P<keep_user>(?i:{USER_KEY.pattern})(?:{ASSIGNED}|[ \t]+))<NAME>(?![{EDGE}])"
    rf"|(?<![{EDGE}])<NAME>(?=@)"
)
NAMED_HOST = (  # after a user, a label or a log's time stamp, and in what uname prints
    rf"(?P<keep_host>(?i:{HOST_KEY.pattern}){ASSIGNED})<NAME>(?![{EDGE}])"
    rf"|(?:(?<=@)|(?<=Linux )(?=\S+ \d)|(?<=\d\d:\d\d:\d\d )(?=\S+ [\w.-]+(?:\[\d+\])?:))<NAME>(?![{EDGE}])"
)
