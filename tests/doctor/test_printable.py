from strata.doctor.printable import printable


def test_what_a_terminal_obeys_is_left_out() -> None:
    assert printable("a\x1b[31mb\x1b]0;t\x07\x9b2Jc\u202ed\x7f") == "a[31mb]0;t2Jcd"


def test_all_else_stays() -> None:
    text = "plain\n\tüñí 李雷 🦆 👩\u200d🚀 נסה ✓ \U0001f1e9"
    assert printable(text) == text
