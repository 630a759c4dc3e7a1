"""How text is cut into pieces before byte-level merging: the one list of what ``tokenizer.ggml.pre`` may name.

A model was trained on merges that never cross these cuts, so a wrong pattern gives ids that the model has not seen.
The patterns, in the syntax of Oniguruma (which the `tokenizers` library uses), are checked against published
tokenizers or llama.cpp; fixtures/golden/README.md says which. Patterns of one entry are applied one after another,
each to every piece that the one before has left; what a pattern matches and what lies between its matches become
pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True)
class PreTokenizer:
    """What happens to text before merging.

    Attributes
    ----------
    cuts : tuple of str
        Patterns that cut the text.
    nfc : bool
        Whether the text is brought to Unicode's composed form first.
    whole_pieces : bool
        Whether a piece that is itself a token is taken whole, even where no merges lead to it.
    adds_bos : bool
        Whether a text begins with BOS where the file does not say.
    """

    cuts: tuple[str, ...]
    nfc: bool = False
    whole_pieces: bool = False
    adds_bos: bool = False

    def cutter(self) -> pre_tokenizers.PreTokenizer:
        """Return what does the cutting."""
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.cuts]
        )


_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_HAN = "一-龥"
_KANA = "\u3040-\u309f\u30a0-\u30ff"

_WORDS_OF_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """Words with the character before them, `digits`, marks with line ends: the pattern of Llama 3 and Qwen 2."""
    return rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"


def _cased(letters: str, suffix: str, digits: str, ends: str) -> str:
    """Words cut where lower case turns upper: the pattern of GPT-4o and its followers.

    `letters` narrows what counts as a letter, `suffix` is the contraction that stays with its word, `ends` are the
    characters that stay with the marks before them.
    """
    upper, lower = (
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]",
    )
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+{ends}|{_LINES}"
    )


_MARK_WORDS = (  # a mark stays with the ASCII word after it, a line end with the marks before it
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
)
_CASED_LETTERS = (  # Latin, Greek, Cyrillic, Armenian, Georgian, Cherokee and other alphabets with two cases
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbe"
    "ῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_EAST_ASIAN = f"[{_HAN}\u0800-一가-\ud7ff]+"
_ASIAN_SCRIPTS = (
    "[一-\u9fff㐀-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff･-ﾟ\u2f00-\u2fdfเ-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)

_QWEN2 = PreTokenizer((_words(r"\p{N}"),), nfc=True)
_QWEN2_AS_IS = PreTokenizer((_words(r"\p{N}"),))
_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), whole_pieces=True, adds_bos=True)
_LLAMA3_MERGED = PreTokenizer((_words(r"\p{N}{1,3}"),))
_GPT_2 = PreTokenizer((_WORDS_OF_GPT2,))
_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _WORDS_OF_GPT2))
_GPT_4O = PreTokenizer((_cased("", rf"{_SUFFIX}?", r"\p{N}{1,3}", r"[\r\n/]*"),), whole_pieces=True)
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", f"[{_HAN}{_KANA}]+", _MARK_WORDS))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "qwen2": _QWEN2,  # Qwen 1.5 to Qwen 3, Qwen3-Next
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": PreTokenizer(  # Qwen 3.5 and 3.6: combining marks belong to the word
        (
            rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}",
        ),
        nfc=True,
    ),
    "megrez": _QWEN2_AS_IS,
    "hunyuan": _QWEN2_AS_IS,  # Hunyuan-A13B
    "grok-2": _QWEN2_AS_IS,
    "solar-open": _QWEN2_AS_IS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "lfm2": _LLAMA3,  # LFM2-8B-A1B
    "dbrx": _LLAMA3_MERGED,
    "glm4": _LLAMA3_MERGED,  # GLM 4.5 to 4.7
    "chatglm-bpe": _LLAMA3_MERGED,
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,  # Granite 3
    "gpt-2": _GPT_2,
    "gigachat": _GPT_2,  # GigaChat-20B-A3B
    "olmo": PreTokenizer((_WORDS_OF_GPT2,), nfc=True),  # OLMoE
    "gpt-4o": _GPT_4O,  # gpt-oss
    "llama4": _GPT_4O,
    "kanana2": _GPT_4O,
    "minimax-m2": _GPT_4O,
    "kimi-k2": PreTokenizer(  # Chinese characters are pieces of their own, other letters are cut as in GPT-4o
        (r"\p{Han}+|" + _cased(r"&&[^\p{Han}]", rf"{_SUFFIX}?", r"\p{N}{1,3}", r"[\r\n]*"),), whole_pieces=True
    ),
    "tekken": PreTokenizer(  # Mistral NeMo and later
        (_cased("", "", r"\p{N}", r"[\r\n/]*"),), whole_pieces=True, adds_bos=True
    ),
    "deepseek-llm": PreTokenizer(  # DeepSeek V2
        (r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _EAST_ASIAN, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    "deepseek-v3": _DEEPSEEK_V3,  # DeepSeek V3 and R1
    "hunyuan-dense": _DEEPSEEK_V3,
    "joyai-llm": _DEEPSEEK_V3,
    "bailingmoe": _QWEN2_AS_IS,  # Ling: written differently, cuts the same
    "bailingmoe2": _QWEN2_AS_IS,
    "llada-moe": _QWEN2_AS_IS,
    "afmoe": PreTokenizer(  # Trinity: digits in threes from the right
        # Two patterns, for one that looks ahead from every group would take time in the square of the digits.
        (r"\p{N}+", r"\A\p{N}{1,2}(?=(?:\p{N}{3})+\z)|\p{N}{1,3}", _ASIAN_SCRIPTS, _MARK_WORDS)
    ),
    "exaone-moe": PreTokenizer(  # words with the spaces between them
        (
            rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
}
